"""What keeping the outputs of modules takes and saves, and the layers that choose by it, for
"auto"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_burst.recompute.auto.budget import ModuleCost, Placed, router_bytes
from megatron_burst.recompute.keeping import Frame

ROUTER = "router"


@dataclass(slots=True)
class ModelLayers:
    """A model's layers that ran in checkpoints."""

    # of heterogeneous layers, which have one each, the first one's
    config: ReferenceType[TransformerConfig]
    seen: WeakSet[Any] = field(default_factory=WeakSet)  # the layers
    are_all: bool = False  # whether these are all: a backward begins when each has run
    may_be_whole: bool = False  # whether the running block may leave out their checkpoints
    # what is chosen for inputs of a size
    by_input: dict[tuple[Any, ...], dict[str, Placed]] = field(default_factory=dict)
    # and what was in the first pass of a checkpoint's call, for the recomputation of that
    by_frame: WeakKeyDictionary[Frame, dict[str, Placed]] = field(default_factory=WeakKeyDictionary)


def layers_of(models: list[ModelLayers], config: TransformerConfig) -> ModelLayers:
    """Those of a model, by its configuration; added if there are none. Models that are gone are
    forgotten."""
    for model in models:
        model_config = model.config()
        if model_config is config or _is_of_one_model(model_config, config):
            return model
    models[:] = [model for model in models if model.config() is not None]
    models.append(ModelLayers(ref(config)))
    return models[-1]


def _is_of_one_model(first: TransformerConfig | None, second: TransformerConfig) -> bool:
    """Whether two configurations are those of layers of one model: from Megatron's #6313 on, each
    layer of a HybridModel has a copy."""
    if is_heterogeneous(first) and is_heterogeneous(second):
        return True
    names = ("is_hybrid_model", "num_layers", "hidden_size", "num_attention_heads")
    sizes = [[getattr(config, name, None) for name in names] for config in (first, second)]
    is_hybrid = getattr(second, "is_hybrid_model", False) and hasattr(type(second), "from_config")
    return bool(is_hybrid) and sizes[0] == sizes[1]


def is_heterogeneous(config: TransformerConfig | None) -> bool:
    """Whether each layer has a configuration of its own."""
    return bool(getattr(config, "heterogeneous_block_specs", False))


def may_differ(config: TransformerConfig) -> bool:
    """Whether only some of a model's layers may have experts, attention or feed-forwards."""
    mixed = [getattr(config, name, None) for name in ("is_hybrid_model", "linear_attention_freq")]
    pattern = getattr(config, "moe_layer_freq", 1)
    all_have_experts = pattern == 1 or (isinstance(pattern, list) and set(pattern) == {1})
    some_have_experts = bool(config.num_moe_experts) and not all_have_experts
    return some_have_experts or is_heterogeneous(config) or any(mixed)


def shared_shape(config: TransformerConfig, x: Tensor) -> tuple[int, int]:
    """Rows and sequences of a layer's input, of all ranks that share it by tensor parallelism."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return x.shape[0] * ranks, x.shape[1]


def repeats_decisions(config: TransformerConfig) -> bool:
    """Whether routers repeat recorded decisions, the next one in each recomputation: then neither
    they nor all of a layer can be kept."""
    return getattr(config, "moe_enable_routing_replay", False)


def costs_of(
    modules: Mapping[str, Sequence[tuple[bool, nn.Module]]], config: TransformerConfig, x: Tensor
) -> tuple[ModuleCost, ...]:
    """What keeping each module takes and saves, by name and whether they are experts'; of the
    layer's input on this rank only the size counts."""
    costs = [_linear(name, named, config, x) for name, named in modules.items() if name != ROUTER]
    if ROUTER in modules and not repeats_decisions(config):
        costs.append(_router(config, x))
    return tuple(costs)


def _linear(
    name: str, modules: Sequence[tuple[bool, nn.Module]], config: TransformerConfig, x: Tensor
) -> ModuleCost:
    tokens, shard = prod(shared_shape(config, x)), x.shape[0] * x.shape[1]
    num_bytes = flops = 0
    for of_experts, module in modules:
        rows = _tokens_of_expert(config, shard) if of_experts else tokens
        out_rows = shard if name == "linear_proj" else rows  # scattered over the ranks
        for key, weight in module.named_parameters():
            if "layer_norm" not in key and weight.dim() == 2:
                flops += 2 * rows * weight.numel()
                num_bytes += out_rows * weight.shape[0] * x.itemsize
        if hasattr(module, "layer_norm_weight"):  # TransformerEngine keeps its output
            num_bytes += x.nbytes
    return ModuleCost(name, num_bytes, flops)


def _router(config: TransformerConfig, x: Tensor) -> ModuleCost:
    """Of a router's decisions: probabilities, map, and what their backward reads."""
    tokens, experts = x.shape[0] * x.shape[1], config.num_moe_experts
    itemsize = {"fp32": 4, "fp64": 8}.get(config.moe_router_dtype or "", x.itemsize)
    num_bytes = tokens * router_bytes(experts, config.moe_router_topk, itemsize)
    return ModuleCost(ROUTER, num_bytes, 2 * tokens * x.shape[2] * experts, waits=True)


def _tokens_of_expert(config: TransformerConfig, shard: int) -> int:
    """Of a local expert, if all have equally many."""
    ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
    return shard * config.moe_router_topk * ranks // config.num_moe_experts
