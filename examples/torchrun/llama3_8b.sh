# What is trained, and how: the flags that every launcher in examples/ passes on.
# Sourced, not run. Llama-3 8B at one million tokens on 64 GPUs; change it to your own model.
#
# The sizes, and burst's options, are best taken from a plan:
#     megatron-burst plan --model llama3-8b --seq-length 1M --gpus 64 --gpus-per-node 8
# Pass its JSON as PLAN=plan.json: the run then takes burst's options from it, and refuses to start
# if the sizes below are not those of the plan.

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
    --attention-dropout 0
    --hidden-dropout 0
    --bf16
)

LENGTH_FLAGS=(
    --seq-length "${SEQ_LENGTH:-1048576}"
    --max-position-embeddings "${SEQ_LENGTH:-1048576}"
    --micro-batch-size 1
    --global-batch-size "${GLOBAL_BATCH_SIZE:-1}"
)

PARALLEL_FLAGS=(
    --tensor-model-parallel-size "${TP:-1}"
    --pipeline-model-parallel-size "${PP:-1}"
    --context-parallel-size "${CP:-64}"
    --context-parallel-impl burst
    --use-distributed-optimizer
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --burst-fused-loss
)

if [[ -n "${PLAN:-}" ]]; then
    PARALLEL_FLAGS+=(--burst-plan "$PLAN")
else
    PARALLEL_FLAGS+=(--burst-keep all --burst-keep-offload)
fi

# Every token counts the same on every rank: losses then do not depend on the context parallel size.
TRAINING_FLAGS=(
    --calculate-per-token-loss
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
    "${MODEL_FLAGS[@]}" "${LENGTH_FLAGS[@]}" "${PARALLEL_FLAGS[@]}" "${TRAINING_FLAGS[@]}"
    "${DATA_FLAGS[@]}"
)
