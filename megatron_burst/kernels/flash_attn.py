"""FlashAttention-2 and -3 of the packages that people build from source, if they are there."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.backends import QuerySide, deliver
from megatron_burst.kernels.entry import load, understand_all
from megatron_burst.kernels.flash import Flash

_QKV = ("q", "k", "v", "softmax_scale", "causal")
_WINDOWS = {"window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1}


class FlashAttention2:
    """`flash_attn.flash_attn_interface` of flash-attn 2.8: what its autograd functions call.

    It is what torch ships as `flash`, in another build.
    """

    capability = replace(
        Flash.capability, name="flash-attn", speed="FlashAttention-2 of the flash-attn package"
    )
    _off = _WINDOWS | {
        "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
        "rng_state": None,
    }  # fmt: skip
    _lse = "softmax_lse"
    _flags: tuple[str, ...] = ("deterministic",)

    @cached_property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
        """(forward, backward), or in words why they cannot be used."""
        module = self._module()
        if isinstance(module, str):
            return module
        taken = ("dout", *_QKV, "out", self._lse, "dq", "dk", "dv", *self._flags)
        given = {"_flash_attn_forward": _QKV, "_flash_attn_backward": taken}
        return understand_all(module, given, self._off)

    def _module(self) -> Any:
        return load("flash_attn.flash_attn_interface")

    def missing(self) -> str | None:
        return self._functions if isinstance(self._functions, str) else None

    def forward(self, q, k, v, scale, visible, into=None):
        forward, _ = self._functions
        out, lse = forward(q=q, k=k, v=v, softmax_scale=scale, causal=visible.causal)[:2]
        return deliver((out, lse), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        _, backward = self._functions
        inputs = side.q, k, v
        grads = into if into and _fit(into, inputs) else tuple(map(torch.empty_like, inputs))
        flags = {"deterministic": deterministic} if self._flags else {}
        backward(
            dout=side.dout, q=side.q, k=k, v=v, out=side.out, dq=grads[0], dk=grads[1],
            dv=grads[2], softmax_scale=scale, causal=visible.causal,
            **{self._lse: side.lse.contiguous()}, **flags,
        )  # fmt: skip
        return grads if grads is into else deliver(grads, into)


class FlashAttention3(FlashAttention2):
    """FlashAttention-3, as the hopper folder of flash-attn's repository builds it, for Hopper.

    Its deterministic backward does not do all head dimensions, so it is not asked for it.
    """

    capability = replace(
        FlashAttention2.capability, name="fa3", deterministic=False, archs=frozenset({9}),
        speed="FlashAttention-3, for Hopper",
    )  # fmt: skip
    _off = (
        _WINDOWS
        | {"softcap": 0.0, "attention_chunk": 0, "num_splits": 1, "sm_margin": 0}
        | {"rotary_interleaved": True, "deterministic": False}
        | dict.fromkeys(
            (
                "k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new",
                "seqused_q", "seqused_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k",
                "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
                "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata",
                "pack_gqa",
            )
        )
    )  # fmt: skip
    _flags = ()

    def _module(self) -> Any:
        found = [load(x) for x in ("flash_attn_interface", "flash_attn_3.flash_attn_interface")]
        return next((x for x in found if not isinstance(x, str)), found[0])


def _fit(targets: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> bool:
    """Whether kernels that write their inputs' dtype may write to the targets."""
    return all(a.dtype == b.dtype for a, b in zip(targets, inputs, strict=True))
