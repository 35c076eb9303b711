#!/bin/bash
# One training cluster of a Di-PS run on one host, without a scheduler: the agent, and torchrun under it.
#   deploy/slurm/torchrun.sh cluster.yaml train.py ARGS...
set -euo pipefail
config=${1:?usage: torchrun.sh cluster.yaml train.py ARGS...}
shift
dips check --config "$config" ${CHECK:+--factory "$CHECK"}
exec dips-client --config "$config" -- torchrun --standalone --nproc-per-node "${GPUS:-8}" "$@"
