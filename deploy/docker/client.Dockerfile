# A training image with Di-PS in it.   docker build -f deploy/docker/client.Dockerfile --build-arg BASE=my/training -t dips-client .
# BASE brings Python and the torch that fits its accelerators; it is kept, nothing of CUDA is fetched here.
ARG BASE
FROM python:3.12-slim AS wheel
WORKDIR /src
RUN pip install --no-cache-dir build
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY dips ./dips
RUN python -m build --wheel --outdir /wheels

FROM ${BASE}
COPY --from=wheel /wheels /wheels
RUN python -c 'import torch; print("keeping torch", torch.__version__)' \
    && pip install --no-cache-dir /wheels/*.whl \
    && rm -r /wheels
# The agent is the job's first process: it starts torchrun, forwards signals, ends with its exit code.
ENV PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
ENTRYPOINT ["dips-client", "--config", "/etc/dips/cluster.yaml", "--"]
CMD ["torchrun", "--help"]
