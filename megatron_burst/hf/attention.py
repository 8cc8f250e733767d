"""The attention function that transformers calls for `attn_implementation="burst"`, and the
functions of transformers and PEFT that burst replaces, to see how a sharded batch is used."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface

from megatron_burst.attention import burst_attention
from megatron_burst.errors import require
from megatron_burst.hf.batch import ShardedBatch
from megatron_burst.hf.calls import count_attention
from megatron_burst.hf.refusals import WHO, no_mask, of_attention
from megatron_burst.imports import when_imported
from megatron_burst.patching import Patch

_CALLS = "megatron_burst.hf.calls"
_CALL = "self", "args", "kwargs"
_PATCHES = (
    Patch("hf", "transformers.modeling_utils:PreTrainedModel.__init__", f"{_CALLS}:make_model",
          ("self", "config", "inputs", "kwargs"),
          "a model that does not know burst would stop with a KeyError", "transformers"),
    Patch("hf", "transformers.modeling_utils:PreTrainedModel.__call__", f"{_CALLS}:call_model",
          _CALL, "no hook of a model sees its keyword arguments and its outputs before the loss is "
          "used", "transformers"),
    Patch("hf", "transformers.loss.loss_utils:fixed_cross_entropy", f"{_CALLS}:cross_entropy",
          ("source", "target", "num_items_in_batch", "ignore_index", "kwargs"),
          "shows which labels and which count a loss is made of, and takes fused logits",
          "transformers"),
    Patch("hf", "transformers.trainer:Trainer.prediction_step", f"{_CALLS}:prediction_step",
          ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
          "metrics would get the shards of all ranks as if they were samples", "transformers"),
    Patch("hf", "peft.peft_model:PeftModel.__call__", f"{_CALLS}:call_model", _CALL,
          "PEFT calls forward of the model that it wraps, and no call of it is seen", "peft"),
)  # fmt: skip


def register() -> None:
    """Make "burst" an implementation of attention, whose use is checked. Idempotent."""
    for patch in _PATCHES:
        when_imported(patch.module, patch.apply)
    AttentionInterface.register("burst", _attend)
    AttentionMaskInterface.register("burst", no_mask)


def _attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
            attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
            sliding_window: int | None = None, s_aux: Tensor | None = None,
            softcap: float | None = None, is_causal: bool | None = None,
            burst: ShardedBatch | None = None, **options: Any) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers; q, k and v [b, heads, s, d], out [b, s, heads, d]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    arguments = {"attention_mask": attention_mask, "dropout": dropout, "burst": burst, **options}
    lengths, window = (query.shape[2], key.shape[2]), sliding_window
    # a compiled layer that reads its number would be compiled anew for each
    numbered = not is_compiling() or (burst is not None and burst.config.keep != "none")
    index = getattr(module, "layer_idx", None) if numbered else None
    count_attention(module, burst)
    require(WHO, of_attention(module, index, arguments, lengths, window, causal))
    out = burst_attention(
        *(x.transpose(1, 2) for x in _narrowed(module, query, key, value)), group=burst.group,
        causal=causal, softmax_scale=scaling, softcap=softcap or 0.0,
        window=None if window is None else (window - 1, 0), cu_seqlens=burst.cu_seqlens, sink=s_aux,
        layout=burst.layout, config=burst.config_of(index),
        layer=0 if index is None else index + 1,  # errors name no layer 0
    )  # fmt: skip
    return out, None


def _narrowed(module: torch.nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the model's dtype where norms or RoPE made them float32, as flash attention in
    transformers gets them: k-bit training keeps norms in float32."""
    value, config = tensors[-1], getattr(module, "config", None)
    if tensors[0].dtype != torch.float32 or torch.is_autocast_enabled(value.device.type):
        return tensors  # `burst_attention` knows autocast
    dtype = value.dtype
    if dtype == torch.float32 and hasattr(config, "_is_quantized"):
        dtype = config.dtype
    return tuple(x.to(dtype) for x in tensors)
