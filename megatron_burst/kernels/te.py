"""TransformerEngine's fused attention: cuDNN, as Megatron's own layers call it."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.backends import Capability, QuerySide, deliver
from megatron_burst.kernels.band import plain_causal
from megatron_burst.kernels.entry import UNKNOWN, load, understand_all
from megatron_burst.kernels.varlen import starts
from megatron_burst.kernels.visible import Visible

_MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_CALL = (
    "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v", "fake_dtype",
    "fused_attention_backend", "attn_scale", "dropout", "qkv_layout", "o_format", "attn_mask_type",
)  # fmt: skip
_LAYOUT = "bshd_bshd_bshd"


class TransformerEngine:
    """fused_attn_fwd and fused_attn_bwd of TransformerEngine 2.20, on dense "bshd" tensors.

    Its functions take a layout by name and ignore strides, so tensors with gaps are copied. Its
    causal mask is aligned top left here, so a causal tile must be square. In training cuDNN
    supports head dimensions up to 256 on Hopper (nvte_get_fused_attn_backend).
    """

    capability = Capability(
        name="te",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_dim=128,
        dim_multiple=8,
        takes_delta=False,
        archs=frozenset({8, 9, 10}),
        max_dim_on={9: 256},
        speed="TransformerEngine's fused attention, which is cuDNN",
    )

    @cached_property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any], Any] | str:
        """(forward, backward, the kernels' name), or a text saying why they cannot be used."""
        module = load(_MODULE)
        if isinstance(module, str):
            return module
        backward = (*_CALL, "o", "d_o", "aux_ctx_tensors", "do_format", "dqkv_layout")
        given = {
            "fused_attn_fwd": (*_CALL, "is_training"),
            "fused_attn_bwd": (*backward, "deterministic"),
        }
        found = understand_all(module, given, {})
        if isinstance(found, str):
            return found
        try:
            return *found, module.FusedAttnBackend["F16_arbitrary_seqlen"]
        except (AttributeError, KeyError, TypeError):
            return f"{UNKNOWN}: it has no F16_arbitrary_seqlen"

    def missing(self) -> str | None:
        return self._functions if isinstance(self._functions, str) else None

    def _call(self, q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visible) -> dict:
        """What forward and backward both take."""
        return {
            "max_seqlen_q": q.shape[1], "max_seqlen_kv": k.shape[1],
            "cu_seqlens_q": starts(q), "cu_seqlens_kv": starts(k),
            "q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous(),
            "fake_dtype": q.dtype, "fused_attention_backend": self._functions[2],
            "attn_scale": scale, "dropout": 0.0, "qkv_layout": _LAYOUT, "o_format": "bshd",
            "attn_mask_type": "causal" if plain_causal(visible, "te") else "no_mask",
        }  # fmt: skip

    def forward(self, q, k, v, scale, visible, into=None):
        out, saved, *_ = self._functions[0](is_training=True, **self._call(q, k, v, scale, visible))
        lse = saved[0].view(q.shape[0], q.shape[2], q.shape[1])
        return deliver((out.view(*q.shape[:3], v.shape[3]), lse), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        no_dropout = torch.empty(2, dtype=torch.int64, device=k.device)
        grads = self._functions[1](
            o=side.out.contiguous(), d_o=side.dout.contiguous(),
            aux_ctx_tensors=[side.lse.contiguous().unsqueeze(-1), no_dropout],
            do_format="bshd", dqkv_layout=_LAYOUT, deterministic=deterministic,
            **self._call(side.q, k, v, scale, visible),
        )[:3]  # fmt: skip
        return deliver(tuple(grads), into)
