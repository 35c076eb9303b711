# Master and slaves: no torch, no GPU.   docker build -f deploy/docker/daemons.Dockerfile -t dips-daemons .
#
#   BASE    an image with Python 3.11 or newer. `make pin` writes its digest here (no registry of images was within reach where
#           this was written, so none stands here yet); or --build-arg BASE=python@sha256:…
#   WHEELS  a directory of the build context with all wheels, hatchling's too (`pip download`): then nothing is fetched
#
# All packages are those of requirements.txt, by hash, S3 for mirrors among them; `make deploy-check` holds it to constraints.txt.
#
# The container runs as a user without rights, on a root file system that may be read-only: what is written goes to
# /var/lib/dips (ledger, snapshots: a volume), /var/cache/dips (compiled kernels) and /tmp.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE} AS install
ARG WHEELS=deploy/docker/wheels
WORKDIR /src
COPY ${WHEELS} /wheels
COPY pyproject.toml deploy/docker/requirements.txt README.md LICENSE CHANGELOG.md ./
COPY dips ./dips
RUN if ls /wheels/*.whl >/dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels; fi \
    && python3 -m venv /opt/dips \
    && /opt/dips/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements.txt \
    && /opt/dips/bin/pip install --no-cache-dir --no-compile --no-deps --no-build-isolation . \
    && /opt/dips/bin/pip uninstall -qy hatchling trove-classifiers pathspec pluggy pip

FROM ${BASE}
COPY --from=install /opt/dips /opt/dips
RUN install -d -o 10001 -g 10001 /var/lib/dips /var/cache/dips
ENV PATH=/opt/dips/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/var/cache/dips HOME=/tmp
USER 10001:10001
VOLUME ["/var/lib/dips"]
CMD ["dips", "--help"]
