# A training image with Di-PS in it.   docker build -f deploy/docker/client.Dockerfile --build-arg BASE=my/training -t dips-client .
#
#   BASE    brings Python and the torch that fits its accelerators; its torch and numpy are kept, all
#           else is the tested set; nothing of CUDA is fetched here.
#           Pin it: --build-arg BASE=my/training@sha256:…
#   WHEELS  a directory of the build context with all wheels, hatchling's too: then nothing is fetched
ARG BASE
FROM ${BASE}
ARG WHEELS=deploy/docker/wheels
USER 0:0
COPY ${WHEELS} /dips-src/wheels
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md /dips-src/
COPY dips /dips-src/dips
COPY deploy/nodes.sh /usr/local/bin/dips-nodes
RUN cd /dips-src \
    && if ls wheels/*.whl >/dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/dips-src/wheels; fi \
    && python3 -c 'import torch; from importlib import metadata as m; there = m.packages_distributions(); \
       print(*(f"{n}=={m.version(n)}" for n in ("torch", "numpy") if n in there), sep="\n")' >/tmp/kept \
    && sed 's/^\(.*\)==.*/^\1==/' /tmp/kept >/tmp/names && grep -v -f /tmp/names constraints.txt >>/tmp/kept \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir -c /tmp/kept . \
    && chmod 755 /usr/local/bin/dips-nodes \
    && install -d -o 10001 -g 10001 /var/lib/dips \
    && rm -r /dips-src /tmp/kept /tmp/names
# The agent is the job's first process: it starts torchrun, forwards signals, ends with its exit code.
# USER: torch.compile names its cache by it, and 10001 has no name (a KeyError in some releases of torch).
ENV PYTHONUNBUFFERED=1 HOME=/tmp USER=dips
USER 10001:10001
ENTRYPOINT ["dips-client", "--config", "/etc/dips/cluster.yaml", "--"]
CMD ["torchrun", "--help"]
