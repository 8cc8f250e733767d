#!/usr/bin/env bash
# Several nodes without a batch system: run it on each node at about the same time.
#
# First, on one of them: megatron-burst doctor --nodes node0,node1,...
# and export what its lines `interface` and `hcas` name in every shell. Then, on node number I of N:
#     NODES=N NODE=I MASTER_ADDR=node0 MEGATRON=~/Megatron-LM examples/torchrun/many_nodes.sh
# With a plan: PLAN=plan.json, on each node. With other sizes: TP=2 PP=2.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
gpus="${GPUS:-8}"
nodes="${NODES:?how many nodes}"
WORLD=$((nodes * gpus))
source "$here/llama3_8b.sh"

launch() {
    local port="$1"
    shift
    torchrun --nnodes "$nodes" --node-rank "${NODE:?the number of this node, from 0}" \
        --master-addr "${MASTER_ADDR:?the first node}" --master-port "$port" \
        --nproc-per-node "$gpus" "$@"
}

# Stops here, on all nodes, if something would break the run.
launch "${DOCTOR_PORT:-29499}" -m megatron_burst.tools doctor

launch "${MASTER_PORT:-29500}" -m megatron_burst \
    "${MEGATRON:?the folder of Megatron-LM}/pretrain_gpt.py" "${ALL_FLAGS[@]}" "$@"
