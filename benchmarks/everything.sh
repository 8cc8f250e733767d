#!/usr/bin/env bash
# All tables of one machine, planned for 8 GPUs and less than 25 minutes, the most telling rows first. Each part has a
# budget of its own, nothing is started after TOTAL_S, and what was measured is in its CSV when time is up.
#
#   benchmarks/everything.sh OUT [GPUS] [PART...]     OUT: folder of the CSVs; GPUS: all of them unless told
#   TINY=1 benchmarks/everything.sh OUT 2             small sizes, to see that it runs; on CPU processes too
#
# Parts, in order: one_node, slices, two_nodes, four_nodes, accuracy, million, more_slices, loss, layers.
set -uo pipefail
out=$(realpath -m "${1:?folder for the CSVs}")
gpus=${2:-$(python3 -c 'import torch; print(torch.cuda.device_count() or 2)')}
shift $(($# < 2 ? $# : 2))
total=${TOTAL_S:-1400} # what runs then may take `grace` more
grace=90
tiny=${TINY:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 CUDA_DEVICE_MAX_CONNECTIONS=1
between_nodes=(NCCL_SOCKET_IFNAME=lo NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=4) # pretended ones
all_te=(--impl te:p2p --impl te:a2a --impl te:a2a+p2p --impl te:all_gather)
te=("${all_te[@]:0:6}") # without the slowest
heads=32/8,32/32

sized() { # arguments of a full run, of a tiny one
    if [[ -z $tiny ]]; then echo "$1"; else echo "$2"; fi
}

within() { # seconds, then a command that takes --budget-s; less if TOTAL_S is near, nothing if it is over
    local seconds=$(($1 < total - SECONDS ? $1 : total - SECONDS))
    shift
    if ((seconds < 20)); then
        echo "== no time was left for: $*"
        return
    fi
    timeout $((seconds + grace)) "$@" --budget-s "$seconds"
    echo "== $SECONDS s since the start"
}

bench() { within "$1" torchrun --nproc-per-node "$gpus" -m "benchmarks.$2" "${@:3}"; }

attention() { # seconds, lengths, file, more options
    local sizes
    sizes=$(sized "--seq $2 --heads $heads" "--seq 1K --heads 4/2,4/4 --head-dim 8")
    # shellcheck disable=SC2086
    bench "$1" attention $sizes --impl burst:auto --impl ceiling --out "$out/$3.csv" "${@:4}"
}

nodes() { # number, seconds, lengths, file
    if ((gpus % $1 == 0 && gpus > $1)); then
        export "${between_nodes[@]}"
        attention "$2" "$3" "$4" --nodes "$1" "${te[@]}" --reps 3
        unset "${between_nodes[@]%%=*}"
    else
        echo "== $gpus GPUs are not $1 nodes"
    fi
}

slices() { # seconds, runs
    local runs=()
    for name in "${@:2}"; do runs+=(--only "$name"); done
    # shellcheck disable=SC2046
    within "$1" python3 benchmarks/slices.py measure "$out/slices.csv" --gpus "$gpus" $(sized "${runs[*]}" --tiny)
}

part() {
    case $1 in
        one_node) attention 230 64K,128K,256K,512K one_node "${all_te[@]}" --reps 3 ;;
        slices) slices 180 8b-1M:burst 8b-1M:megatron ;;
        two_nodes) nodes 2 170 64K,128K,256K two_nodes ;;
        four_nodes) nodes 4 90 64K,128K four_nodes ;;
        accuracy)
            timeout 60 torchrun --nproc-per-node "$gpus" benchmarks/accuracy.py "$out/accuracy.csv"
            ;;
        million) attention 190 1M one_node --impl te:p2p --impl te:a2a --reps 1 ;;
        more_slices)
            [[ -n $tiny ]] || slices 400 14b-1M:burst 14b-1M:megatron 8b-2M:burst 8b-2M:megatron 8b-1M:megatron-own-loss
            ;;
        loss) # shellcheck disable=SC2046
            bench 60 loss $(sized "--tokens 128K --hidden 4096 --vocab 128K" "--tokens 1K --hidden 32 --vocab 1K") \
                --impl burst:auto --impl burst:recompute --impl burst:forward --impl megatron:fused --out "$out/loss.csv"
            ;;
        layers) # shellcheck disable=SC2046
            bench 150 recompute $(sized "--seq 1M --layers 1" \
                "--seq 1K --layers 1 --heads 4/2 --head-dim 8 --hidden 32 --ffn 64") --reps 1 \
                --mode burst:all --mode burst:none --mode megatron:full --out "$out/recompute.csv"
            ;;
        *)
            echo "everything.sh: no part $1; see the first lines of it" >&2
            exit 1
            ;;
    esac
}

for name in "${@:-one_node slices two_nodes four_nodes accuracy million more_slices loss layers}"; do
    # shellcheck disable=SC2086
    for one in $name; do
        echo "== $one"
        part "$one"
    done
done
echo "== done in $SECONDS s"
