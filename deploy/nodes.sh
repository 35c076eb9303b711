#!/bin/bash
# One node of a training cluster whose nodes are started one by one: pods, ssh, whatever is not srun. Run it on each.
#   NODE=0 NODES=4 MASTER_ADDR=berlin-0.berlin deploy/nodes.sh cluster.yaml train.py ARGS...
#
# Node 0 is the head: the agent is its first process. The others start torchrun alone, and their ranks find the agent at
# MASTER_ADDR, port 29410 (or DIPS_AGENT=tcp://HOST:PORT), by the job's token: the cluster file's key `token`, or
# DIPS_AGENT_TOKEN, the same on all nodes. What ends with a code other than 0 is to be started anew by whoever started
# it, on each node: torchrun's nodes meet again by themselves.
set -euo pipefail
config=${1:?usage: NODE=0 NODES=4 MASTER_ADDR=HOST nodes.sh cluster.yaml train.py ARGS...}
shift
export DIPS_CLUSTER_FILE=$config MASTER_ADDR=${MASTER_ADDR:?the host of node 0} MASTER_PORT=${MASTER_PORT:-29500}
export DIPS_AGENT=${DIPS_AGENT:-tcp://$MASTER_ADDR:29410} # torchrun gives its ranks another MASTER_ADDR: rank 0's host
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that torchrun starts anew dial addresses of the dead
ranks=(torchrun --nnodes "${NODES:?how many nodes}" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-3}"
    --rdzv-id "${JOB:-dips}" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
    --rdzv-conf "is_host=$((${NODE:?this node, from 0} == 0))" "$@")
if [[ $NODE -ne 0 ]]; then
    exec "${ranks[@]}"
fi
dips check --config "$config" ${CHECK:+--factory "$CHECK"}
exec dips-client --config "$config" -- "${ranks[@]}"
