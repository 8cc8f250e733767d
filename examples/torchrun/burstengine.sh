#!/usr/bin/env bash
# The models and settings of BurstEngine's tables (arXiv 2509.19836), trained with Megatron's own pretrain_gpt.py:
# multi-head attention, one sequence over all GPUs, ZeRO-3, the fused LM head and loss, layers recomputed with
# attention's results kept.
#
#     MODEL=7b SEQ_LENGTH=2M NODES=4 NODE=I MASTER_ADDR=node0 MEGATRON=~/Megatron-LM examples/torchrun/burstengine.sh
#     TINY=1 examples/torchrun/burstengine.sh     # a small model on two CPU processes
#
# theirs: 7b 2M on 32 GPUs, 4M on 64; 14b 1M on 32, 2M on 64. Run it on each node, with its number NODE.
# KEEP=all, half or none: whole checkpoints, half of the sequence, none
# SHARDING=fsdp2 (ZeRO-3), or optimizer: Megatron's distributed optimizer
# More of Megatron's flags may follow, such as --burst-intra ring for their nested rings.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
nodes="${NODES:-1}"
gpus="${GPUS:-8}"
tokens="${SEQ_LENGTH:-2M}"
case "$tokens" in
    *M) tokens=$((${tokens%M} << 20)) ;;
    *K) tokens=$((${tokens%K} << 10)) ;;
esac

case "${MODEL:-7b}" in # as the presets burstengine-7b and -14b of megatron-burst plan
    7b) sizes=(32 4096 11008 32 31999) ;;
    14b) sizes=(40 5120 13824 40 119999) ;;
    *)
        echo "burstengine.sh: MODEL must be 7b or 14b, the models of BurstEngine's tables; got $MODEL" >&2
        exit 2
        ;;
esac
device=(--bf16)
script="${MEGATRON:+$MEGATRON/pretrain_gpt.py}"
if [[ -n "${TINY:-}" ]]; then
    gpus=2 tokens=256 sizes=(2 64 128 4 255)
    device=(--distributed-backend gloo --use-cpu-initialization --transformer-impl local)
    device+=(--no-masked-softmax-fusion --no-persist-layer-norm)
    script="${script:-$here/../pretrain_gpt.py}" # of the same form
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
fi

sharding="${SHARDING:-fsdp2}"
case "$sharding" in
    fsdp2)
        shards=(--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist)
        unset CUDA_DEVICE_MAX_CONNECTIONS # FSDP refuses 1
        ;;
    optimizer)
        shards=(--use-distributed-optimizer --calculate-per-token-loss)
        shards+=(--overlap-grad-reduce --overlap-param-gather)
        export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron requires it before Blackwell
        if [[ -n "${TINY:-}" ]]; then shards+=(--no-gradient-accumulation-fusion); fi
        ;;
    *)
        echo "burstengine.sh: SHARDING must be fsdp2 or optimizer; got $sharding" >&2
        exit 2
        ;;
esac

"${PYTHON:-python}" -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" --nproc-per-node "$gpus" \
    -m megatron_burst "${script:?MEGATRON must be the folder of Megatron-LM}" \
    --num-layers "${sizes[0]}" --hidden-size "${sizes[1]}" --ffn-hidden-size "${sizes[2]}" \
    --num-attention-heads "${sizes[3]}" --normalization RMSNorm --swiglu --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --seq-length "$tokens" --max-position-embeddings "$tokens" --micro-batch-size 1 --global-batch-size 1 \
    --context-parallel-size $((nodes * gpus)) --context-parallel-impl burst \
    --burst-fused-loss --burst-keep "${KEEP:-all}" \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size "${sizes[4]}" --split 98,1,1 \
    --lr 1e-5 --lr-decay-style constant --train-iters "${STEPS:-10}" --log-interval 1 \
    --eval-iters 0 --eval-interval 1000 --num-workers 1 "${shards[@]}" "${device[@]}" "$@"
