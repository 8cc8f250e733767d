"""What keeping the outputs of a layer's modules takes and saves, for "auto"."""

from collections.abc import Mapping, Sequence

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megatron_burst.recompute.budget import ModuleCost, router_bytes

ROUTER = "router"


def shared_shape(config: TransformerConfig, x: Tensor) -> tuple[int, int]:
    """Rows and sequences of a layer's input, of all ranks that share it by tensor parallelism."""
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return x.shape[0] * ranks, x.shape[1]


def costs_of(
    modules: Mapping[str, Sequence[tuple[bool, Module]]], config: TransformerConfig, x: Tensor
) -> tuple[ModuleCost, ...]:
    """What keeping each module takes and saves.

    Args:
        modules: of one layer by name, and whether they are experts'.
        config: the model's.
        x: the layer's input, of this rank; only its size counts.
    """
    found = []
    for name, those in modules.items():
        if name != ROUTER:
            found.append(_linear(name, those, config, x))
        elif not getattr(config, "moe_enable_routing_replay", False):
            found.append(_router(config, x))
    return tuple(found)


def _linear(
    name: str, modules: Sequence[tuple[bool, Module]], config: TransformerConfig, x: Tensor
) -> ModuleCost:
    rows, sequences = shared_shape(config, x)
    tokens, shard = rows * sequences, x.shape[0] * x.shape[1]
    num_bytes = flops = 0
    for of_experts, module in modules:
        weights = [w for key, w in module.named_parameters() if "layer_norm" not in key]
        for weight in (w for w in weights if w.dim() == 2):
            rows = _routed(config, shard) if of_experts else tokens
            made = shard if name == "linear_proj" else rows  # scattered over the ranks
            flops += 2 * rows * weight.numel()
            num_bytes += made * weight.shape[0] * x.itemsize
        if hasattr(module, "layer_norm_weight"):  # TransformerEngine keeps its output
            num_bytes += x.nbytes
    return ModuleCost(name, num_bytes, flops)


def _router(config: TransformerConfig, x: Tensor) -> ModuleCost:
    """Of a router's decisions: probabilities, map, and what their backward reads."""
    tokens = x.shape[0] * x.shape[1]
    each = {"fp32": 4, "fp64": 8}.get(config.moe_router_dtype or "", x.itemsize)
    bytes_ = router_bytes(config.num_moe_experts, config.moe_router_topk, each)
    flops = 2 * tokens * x.shape[2] * config.num_moe_experts
    return ModuleCost(ROUTER, tokens * bytes_, flops, waits=True)


def _routed(config: TransformerConfig, shard: int) -> int:
    """Tokens of a local expert, if all have equally many."""
    ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
    return shard * config.moe_router_topk * ranks // config.num_moe_experts
