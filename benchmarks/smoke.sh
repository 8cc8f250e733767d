#!/usr/bin/env bash
# The speed of everything that changes can slow down, on one GPU in five minutes: kernels, what a rank computes at
# CP 2, 4 and 8, the loss, a dense and a packed step. Prints ratios to peers of the same run beside the expected ones.
#
#   benchmarks/smoke.sh OUT [PART...]     OUT: folder of the CSVs; parts: kernels, rank, loss, steps; without: all
#   TINY=1 benchmarks/smoke.sh OUT        small sizes, to see that it runs; on a CPU too
set -uo pipefail
out=$(realpath -m "${1:?folder for the CSVs}")
shift
parts=("$@")
((${#parts[@]})) || parts=(kernels rank loss steps)
tiny=${TINY:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
python=${PYTHON:-python3}

sized() { if [[ -z $tiny ]]; then echo "$1"; else echo "$2"; fi; }

for part in "${parts[@]}"; do
    echo "== $part (${SECONDS} s)"
    # shellcheck disable=SC2046
    case $part in
        kernels)
            if [[ -n $tiny ]]; then echo "kernels are timed on GPUs"; continue; fi
            timeout 90 "$python" -m benchmarks.kernels "$out/kernels.csv" --dims 128 --seqs 16384 --budget-s 60 ;;
        rank)
            timeout 90 "$python" -m benchmarks.one_rank "$out/rank.csv" --ranks 2,4,8 \
                $(sized "--seq 64K --heads 32/8" "--seq 1K --heads 8/4 --dim 16") ;;
        loss)
            timeout 90 "$python" -m benchmarks.loss --out "$out/loss.csv" --budget-s 40 --impl burst:recompute \
                --impl burst:forward --impl megatron:fused \
                $(sized "--tokens 32K --hidden 4096 --vocab 128K" "--tokens 1K --hidden 32 --vocab 1K") ;;
        steps) # of a packed sample, then of one document
            for documents in drawn none; do
                settings=burst:off,burst:keep,burst:auto-12,megatron:off,megatron:full
                [[ -z $tiny || $documents == none ]] || settings=burst:off,burst:full # all that a CPU can
                timeout 120 "$python" -m benchmarks.frontier measure "$out/steps.csv" --documents $documents \
                    --only $settings --turns 1 --steps 3 --budget-s 90 \
                    $(sized "--model qwen3-8b --seq 64K" "--model tiny --seq 64")
            done ;;
        *) echo "no such part: $part"; exit 2 ;;
    esac
done
"$python" -m benchmarks.show smoke "$out"
