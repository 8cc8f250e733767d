# The model and training flags that every launcher in examples/ passes on.
# Sourced, not run, with WORLD set to the total number of GPUs. Llama-3 8B; change MODEL_FLAGS for
# your own model: megatron-burst plan prints its flags.
#
# Sharding, sequence length and recomputation come from a plan, or from the variables below:
#     megatron-burst plan llama3-8b --seq-length 1M --gpus 64 --json plan.json
#     PLAN=plan.json examples/torchrun/one_node.sh
# With a plan those variables may stay unset; the run refuses one that contradicts it.

MODEL_FLAGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 500000
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
)

if [[ -n "${PLAN:-}" ]]; then
    planned() { sed -n "s/.*\"$1\": *\([0-9][0-9]*\).*/\1/p" "$PLAN"; }
    PARALLEL_FLAGS=(
        --burst-plan "$PLAN"
        ${SEQ_LENGTH:+--seq-length "$SEQ_LENGTH"}
        ${GLOBAL_BATCH_SIZE:+--global-batch-size "$GLOBAL_BATCH_SIZE"}
        ${TP:+--tensor-model-parallel-size "$TP"}
        ${PP:+--pipeline-model-parallel-size "$PP"}
        ${CP:+--context-parallel-size "$CP"}
    )
    TP="$(planned --tensor-model-parallel-size)"
    PP="$(planned --pipeline-model-parallel-size)"
    CP="$(planned --context-parallel-size)"
else
    TP="${TP:-1}"
    PP="${PP:-1}"
    CP="${CP:-$((WORLD / (TP * PP)))}" # all remaining GPUs, so that DP is 1
    PARALLEL_FLAGS=(
        --seq-length "${SEQ_LENGTH:-1048576}"
        --max-position-embeddings "${SEQ_LENGTH:-1048576}"
        --micro-batch-size 1
        --global-batch-size "${GLOBAL_BATCH_SIZE:-$((WORLD / (TP * PP * CP)))}"
        --tensor-model-parallel-size "$TP"
        --pipeline-model-parallel-size "$PP"
        --context-parallel-size "$CP"
        --bf16
        --attention-dropout 0
        --use-distributed-optimizer
        --overlap-grad-reduce
        --overlap-param-gather
        --recompute-granularity full
        --recompute-method uniform
        --recompute-num-layers 1
        --burst-fused-loss
        --burst-keep all
        --burst-keep-offload results
    )
    if ((TP > 1)); then PARALLEL_FLAGS+=(--sequence-parallel); fi
    if ((CP > 1)); then PARALLEL_FLAGS+=(--context-parallel-impl burst); fi
fi

shards() { [[ -n "${PLAN:-}" ]] && grep -q "\"--use-$1\": true" "$PLAN"; }

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron requires it before Blackwell, and refuses it with FSDP
if shards torch-fsdp2 || shards megatron-fsdp; then CUDA_DEVICE_MAX_CONNECTIONS=8; fi

# Every token counts the same on every rank, so losses do not depend on the context parallel size.
# Not with FSDP2, where Megatron does not divide gradients by the tokens.
per_token=(--calculate-per-token-loss)
if shards torch-fsdp2; then per_token=(); fi
TRAINING_FLAGS=(
    "${per_token[@]}"
    --lr "${LR:-1e-5}"
    --min-lr "${MIN_LR:-1e-6}"
    --lr-decay-style cosine
    --train-iters "${TRAIN_ITERS:-100}"
    --weight-decay 0.1
    --clip-grad 1.0
    --log-interval 1
    --eval-iters 0
    --eval-interval 1000
)

if [[ -n "${DATA_PATH:-}" ]]; then
    DATA_FLAGS=(
        --data-path "$DATA_PATH"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER:?the folder of a tokenizer}"
        --split 99,1,0
    )
else
    DATA_FLAGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --split 98,1,1)
fi

ALL_FLAGS=(
    "${MODEL_FLAGS[@]}" "${PARALLEL_FLAGS[@]}" "${TRAINING_FLAGS[@]}" "${DATA_FLAGS[@]}"
)
