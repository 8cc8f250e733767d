"""What recomputed layers keep: the bytes of each item, and the recomputation that it saves."""

from dataclasses import dataclass, replace

from megatron_burst.recompute.auto.budget import ModuleCost, Placed, most, router_bytes
from megatron_burst.tools.job.layers import Experts
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.strategy import Job, Strategy, again_layers, first_stage_layers

RESULTS, HALF = "attention's results", "attention's results of half of the rows"
_SHARES = {RESULTS: 1.0, HALF: 0.5}
_WITH_NORM = "linear_qkv", "linear_q_up_proj", "linear_kv_up_proj"  # TransformerEngine's
_TRANSFERRED = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"  # to or from all TP ranks


@dataclass(frozen=True, slots=True)
class Item:
    """Something kept."""

    name: str
    num_bytes: float  # of an average layer and micro-batch
    placed: Placed  # in layers of the first pipeline stage


def results_bytes(job: Job, strategy: Strategy) -> float:
    """Bytes of attention's output and log-sum-exp in an average layer, on a rank."""
    tokens = job.seq // strategy.cp / strategy.tp
    return job.model.result_bytes * tokens * job.model.softmax_share


def items_of(job: Job, strategy: Strategy) -> tuple[Item, ...]:
    """All that a strategy keeps."""
    if strategy.recompute != "full":
        return ()
    costs = {module.name: module for module in module_costs(job, strategy)}
    results = results_bytes(job, strategy)
    items = [
        Item(name, _SHARES[name] * results if name in _SHARES else costs[name].num_bytes, placed)
        for name, placed in strategy.placed
    ]
    if strategy.keep in ("half", "all"):
        layers = again_layers(job.model, strategy)
        name, placed = placed_results(strategy.keep, layers, strategy.offload)
        items.insert(0, Item(name, _SHARES[name] * results, placed))
    return tuple(items)


def placed_results(keep: str, layers: int, offload: bool) -> tuple[str, Placed]:
    """What "half" or "all" keeps of attention's results in so many layers, and where."""
    placed = Placed(0, layers) if offload else Placed(layers)
    return (HALF if keep == "half" else RESULTS), placed


def largest_costs(job: Job, strategy: Strategy) -> tuple[ModuleCost, ...]:
    """What keeping each module's output takes at most, and saves in the mean: by these all layers
    choose where only some have experts."""
    share = _moe_share(job.model)
    kinds = {0.0, 1.0} if 0 < share < 1 else {share}
    flops = {one.name: one.flops for one in module_costs(job, strategy)}
    largest = most(module_costs(job, strategy, share) for share in kinds)
    return tuple(replace(one, flops=flops[one.name]) for one in largest)


def module_costs(
    job: Job, strategy: Strategy, share: float | None = None
) -> tuple[ModuleCost, ...]:
    """What keeping each module's output takes and saves in a layer, as a run counts it: with the
    norm's output that TransformerEngine's modules keep; experts as if all had equally many tokens.

    `share`: of the layers that have experts; None: the model's, for an average layer.
    """
    share = _moe_share(job.model) if share is None else share
    model, tokens = job.model, job.seq // strategy.cp
    shard = tokens / strategy.tp
    norm = 2 * model.hidden * shard
    costs = [_fc1(model, share, tokens, strategy.tp)]
    for name, inner, width in model.attention_products():
        num_bytes = 2 * shard * width * model.softmax_share
        num_bytes += norm * model.softmax_share if name in _WITH_NORM else 0.0
        flops = 2 * shard * inner * width * model.softmax_share
        costs.append(ModuleCost(name, round(num_bytes), round(flops)))
    if model.experts:
        costs.append(_router(model, model.experts, share * shard))
    return tuple(costs)


def _moe_share(model: Model) -> float:
    return model.moe_layers / model.layers


def _fc1(model: Model, share: float, tokens: float, tp: int) -> ModuleCost:
    """The first product of a feed-forward, where so large a share of them are experts."""
    made = (2 if model.gated else 1) * _feed_width(model, share) * tokens / tp
    norm = 2 * model.hidden * (1 - share) * tokens / tp
    flops = (2 if model.gated else 1) * _feed_flops(model, share) * tokens / tp
    return ModuleCost("linear_fc1", round(2 * made + norm), round(flops))


def _router(model: Model, experts: Experts, tokens: float) -> ModuleCost:
    """A router's decisions of so many tokens, with probabilities in bf16."""
    num_bytes = router_bytes(experts.count, experts.active, 2)
    flops = 2 * model.hidden * experts.count * tokens
    return ModuleCost("router", round(num_bytes * tokens), round(flops), waits=True)


def _feed_width(model: Model, share: float) -> float:
    """Width of a token's feed-forward, all its experts together; `share`: of layers with them."""
    if not model.experts:
        return model.ffn
    active = model.experts.active * model.experts.ffn + model.experts.shared_ffn
    return (1 - share) * model.ffn + share * active


def _feed_flops(model: Model, share: float) -> float:
    """Of a token's product of a feed-forward from its input to its width, or back."""
    routed = share * model.experts.active * model.experts.ffn if model.experts else 0.0
    others = _feed_width(model, share) - routed
    return 2 * (model.hidden * others + model.expert_width * routed)


def last_flops(job: Job, strategy: Strategy) -> int:
    """Of a layer's last product, before which recomputation ends if anything is kept."""
    flops = _feed_flops(job.model, _moe_share(job.model))
    return round(flops * (job.seq // strategy.cp) / strategy.tp)


@dataclass(frozen=True, slots=True)
class Saved:
    """What an average layer of a strategy's stage does not recompute beside the others."""

    again: float  # share of the layers that are recomputed
    attention: float  # share of all layers whose attention's results are kept
    half: float  # the same, of half of them
    flops: float  # of products on a rank
    norms: float  # norms of the hidden states, per layer
    transfers: float  # of the four transfers of hidden states under tensor parallelism


def saved_by(job: Job, strategy: Strategy) -> Saved:
    """What keeping saves, and what it copies, in an average layer of the first stage."""
    if strategy.recompute != "full":
        return Saved(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    model, layers = job.model, again_layers(job.model, strategy)
    every = first_stage_layers(model, strategy)
    kept = {item.name: item for item in items_of(job, strategy)}
    shares = {name: (item.placed.device + item.placed.host) / every for name, item in kept.items()}
    flops = {module.name: module.flops for module in module_costs(job, strategy)}
    flops["linear_fc2"] = last_flops(job, strategy)
    again = layers / every
    outputs = {name: share for name, share in shares.items() if name in flops}
    if strategy.keep != "none":  # recomputation ends before the last product
        outputs["linear_fc2"] = again
    in_norm = {"linear_fc1": 1 - _moe_share(model)} | dict.fromkeys(_WITH_NORM, 1.0)
    return Saved(
        again, shares.get(RESULTS, 0.0), shares.get(HALF, 0.0),
        flops=sum(flops[name] * share for name, share in outputs.items()),
        norms=sum(in_norm.get(name, 0.0) * share for name, share in outputs.items()),
        transfers=sum(share for name, share in outputs.items() if name in _TRANSFERRED),
    )  # fmt: skip


def host_bytes(job: Job, strategy: Strategy) -> tuple[float, int]:
    """Bytes that a micro-batch copies to the host on the first stage, and from how many layers."""
    items, layers = items_of(job, strategy), again_layers(job.model, strategy)
    moved = sum(item.num_bytes * item.placed.host for item in items)
    count = max((item.placed.host for item in items), default=0)
    if strategy.offload_inputs:
        moved += layers * 2 * job.model.hidden * (job.seq // strategy.cp) / strategy.tp
        count = layers
    return moved, count
