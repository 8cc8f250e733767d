#!/usr/bin/env bash
# All tables of one machine in under 25 minutes, the most telling rows first; each part has a budget of its own and
# what it measured is in its CSV when time is up.
#
#   benchmarks/everything.sh OUT [GPUS]        OUT: folder of the CSVs; GPUS: all of them unless told
set -uo pipefail
out=${1:?folder for the CSVs}
gpus=${2:-$(python3 -c 'import torch; print(torch.cuda.device_count())')}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUDA_DEVICE_MAX_CONNECTIONS=1
te=(--impl te:p2p --impl te:a2a --impl te:a2a+p2p)

bench() { # seconds, then the command's own arguments
    local seconds=$1
    shift
    timeout $((seconds + 30)) torchrun --nproc-per-node "$gpus" -m megatron_burst.cli bench "$@" --budget-s "$seconds"
    echo "== bench $1: $SECONDS s since the start"
}

attention() { bench "$1" attention --impl burst:auto "${te[@]}" --impl ceiling "${@:2}"; }

attention 110 --seq 64K,128K,512K --heads 32/8 --reps 5 --out "$out/one_host.csv"
attention 150 --seq 64K,128K,256K --heads 32/32 --reps 3 --out "$out/one_host.csv"
timeout 60 torchrun --nproc-per-node "$gpus" benchmarks/accuracy.py "$out/accuracy.csv"

export NCCL_SOCKET_IFNAME=lo NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=4 # between pretended hosts
attention 150 --hosts 2 --seq 128K,256K --heads 32/8,32/32 --reps 3 --out "$out/two_hosts.csv"
if ((gpus >= 8)); then
    attention 100 --hosts 4 --seq 128K --heads 32/8,32/32 --reps 3 --out "$out/four_hosts.csv"
fi
unset NCCL_SOCKET_IFNAME NCCL_NSOCKS_PERTHREAD NCCL_SOCKET_NTHREADS

# a layer of Llama-3-8B's widths at 1M and 2M tokens, and of a 14B model with as many key heads as query heads
modes=(--mode burst:all --mode burst:none --mode megatron:full)
bench 150 recompute --seq 1M --layers 1 --reps 1 "${modes[@]}" --out "$out/recompute.csv"
bench 120 recompute --seq 2M --layers 1 --reps 1 --mode burst:all-offload --out "$out/recompute.csv"
bench 120 recompute --seq 1M --layers 1 --reps 1 --heads 40/40 --hidden 5120 --ffn 13824 --mode burst:all \
    --mode megatron:full --out "$out/recompute_14b.csv"
bench 60 loss --tokens 128K --hidden 4096 --vocab 128K --out "$out/loss.csv"
attention 200 --seq 1M --heads 32/8,32/32 --reps 2 --out "$out/one_host.csv"
echo "== done in $SECONDS s"
