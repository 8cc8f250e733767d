"""Attention sinks of a layer: Megatron's `softmax_offset`, one score for each query head.

Megatron's own class draws equal sinks on all tensor-parallel ranks, and neither it nor
TransformerEngine marks them as sharded, so that the norm that clips gradients counts those of one
rank alone (core/tensor_parallel/layers.py:95). Burst's layers do both as Megatron does for weights.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter


def sinks_of(config: TransformerConfig, tp_group: dist.ProcessGroup) -> Tensor | None:
    """This rank's sinks of a new layer, [h]; None without; a parameter if they are learned."""
    if config.softmax_type == "vanilla":
        return None
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    heads = config.num_attention_heads // tp_group.size()
    zeros = torch.zeros(heads, dtype=config.params_dtype, device=device)
    if config.softmax_type == "off-by-one":
        return zeros
    sinks = mark_sharded(Parameter(zeros))
    if config.perform_initialization:
        _draw(sinks, config, tp_group)
    return sinks


def mark_sharded(sinks: Tensor | None) -> Tensor | None:
    """Let Megatron count a parameter of sinks on each tensor-parallel rank."""
    if isinstance(sinks, Parameter) and not hasattr(sinks, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def _draw(sinks: Parameter, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
    """Draw a rank's part of all heads on a CPU, or its own on a GPU, as Megatron does weights."""
    if not config.use_cpu_initialization:
        with get_cuda_rng_tracker().fork():
            config.init_method(sinks)
        return
    heads = torch.empty(config.num_attention_heads, dtype=sinks.dtype)
    config.init_method(heads)
    with torch.no_grad():
        sinks.copy_(heads.chunk(tp_group.size())[tp_group.rank()])
