# Master and slaves: no torch, no GPU.   docker build -f deploy/docker/daemons.Dockerfile -t dips-daemons .
# The container runs as a user without rights, on a root file system that may be read-only: what is written goes to
# /var/lib/dips (ledger, snapshots: a volume), /var/cache/dips (compiled kernels) and /tmp.
FROM python:3.12-slim AS wheel
WORKDIR /src
RUN pip install --no-cache-dir build
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY dips ./dips
RUN python -m build --wheel --outdir /wheels

FROM python:3.12-slim
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-compile -c /tmp/constraints.txt /wheels/*.whl \
    && rm -r /wheels /tmp/constraints.txt \
    && useradd --system --uid 10001 --no-create-home dips \
    && install -d -o dips -g dips /var/lib/dips /var/cache/dips
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/var/cache/dips HOME=/tmp
USER 10001:10001
VOLUME ["/var/lib/dips"]
CMD ["dips", "--help"]
