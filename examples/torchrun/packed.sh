#!/usr/bin/env bash
# A small GPT on packed documents (THD), on all GPUs of this machine, or else on two CPU processes.
#
#     examples/torchrun/packed.sh [text files] [Megatron's flags]
#
# Without text files: Python's own documentation. STEPS, SEQ_LENGTH and VERBOSE=1 may be set. Files are all for
# training: of few, Megatron's split would leave a validation set without documents.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python}"
files=()
while (($#)) && [[ "$1" != --* ]]; do
    files+=("$1")
    shift
done

split=98,1,1
if ((${#files[@]})); then split=100,0,0; fi

gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
if ((gpus > 1)); then
    cp="$gpus"
    device=(--bf16)
    export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron requires it before Blackwell
else
    cp=2
    device=(--distributed-backend gloo)
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 # one GPU has no context parallelism
fi
seq="${SEQ_LENGTH:-1024}"

# Each rank holds two chunks of each document.
data="${DATA:-demo/packed_cp$cp}"
"$python" "$here/data.py" "$data" ${files[@]+"${files[@]}"} --multiple $((2 * cp))

"$here/quiet.sh" "$python" -m torch.distributed.run --standalone --nproc-per-node "$cp" -m megatron_burst \
    "$here/pretrain_gpt.py" --data-path "$data" --split "$split" --pack-documents \
    --context-parallel-size "$cp" --context-parallel-impl burst "${device[@]}" \
    --num-layers 2 --hidden-size 192 --num-attention-heads 6 --position-embedding-type rope \
    --seq-length "$seq" --max-position-embeddings "$seq" --train-iters "${STEPS:-20}" \
    --calculate-per-token-loss "$@"
