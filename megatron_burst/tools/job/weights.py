"""Weights of a rank, and what their states take."""

from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.strategy import Job, Strategy, stage_layers


def static_bytes(job: Job, strategy: Strategy) -> tuple[float, float, float]:
    """Weights, gradients, optimizer.

    Source: 6 + 12 / ranks bytes per weight of Megatron's distributed optimizer
    (megatron/training/theoretical_memory_usage.py); its ranks are those of DP x CP.
    """
    dense, experts = params_of_rank(job, strategy)
    expert_ranks = max(1, job.gpus // (strategy.pp * strategy.ep))
    sharded = dense / (strategy.dp * strategy.cp) + experts / expert_ranks
    optimizer = 12 * sharded
    if strategy.fsdp != "none":  # bf16 gradients; two layers gathered, one's gradient whole
        one = layer_params(job, strategy)
        return 2 * sharded + 4 * one, 2 * sharded + 2 * one, optimizer
    return 2 * (dense + experts), 4 * (dense + experts), optimizer


def params_of_rank(job: Job, strategy: Strategy) -> tuple[float, float]:
    """Weights of the largest stage on a rank if only TP and EP shard them: dense ones, experts."""
    model, layers = job.model, stage_layers(job.model, strategy)
    ends = 1 if model.tied else 2  # embedding and head; prediction layers need both
    if strategy.pp == 1:
        stages = [(layers, model.predicted, ends)]
    else:
        end = model.layers - layers * (strategy.pp - 1)
        stages = [(layers, 0, 1), (end, model.predicted, ends if model.predicted else 1)]
    of_stages = (_stage_params(model, *stage) for stage in stages)
    sharded = [(dense / strategy.tp, experts / strategy.ep) for dense, experts in of_stages]
    return max(sharded, key=sum)


def _stage_params(model: Model, layers: int, predicted: int, ends: int) -> tuple[float, float]:
    """Weights of a stage: dense ones, with so many matrices of the vocabulary, and experts."""
    plain, moe = model.stage_feeds(layers)
    dense = layers * model.mixer_params + plain * model.dense_params
    dense += moe * model.shared_params + ends * model.embedding_params
    more, experts = model.predicted_params
    return dense + predicted * more, moe * model.expert_params + predicted * experts


def layer_params(job: Job, strategy: Strategy) -> float:
    """Weights of the largest layer on a rank, as FSDP gathers it."""
    model = job.model
    dense = model.dense_params / strategy.tp if model.dense_layers else 0.0
    experts = model.shared_params / strategy.tp + model.expert_params / strategy.ep
    linear = model.linear.params(model.hidden) if model.linear else 0
    halves = max(model.attention_params, linear) / strategy.tp, max(dense, experts)
    return max(halves) if model.pattern else sum(halves)
