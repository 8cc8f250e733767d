#!/usr/bin/env bash
# One node:  MEGATRON=~/Megatron-LM examples/torchrun/one_node.sh [more Megatron flags]
# With a plan: PLAN=plan.json ...
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
gpus="${GPUS:-8}"
WORLD="$gpus"
if [[ -z "${PLAN:-}" ]]; then SEQ_LENGTH="${SEQ_LENGTH:-131072}"; fi
source "$here/llama3_8b.sh"

torchrun --standalone --nproc-per-node "$gpus" -m megatron_burst.tools doctor

torchrun --standalone --nproc-per-node "$gpus" -m megatron_burst \
    "${MEGATRON:?the folder of Megatron-LM}/pretrain_gpt.py" "${ALL_FLAGS[@]}" "$@"
