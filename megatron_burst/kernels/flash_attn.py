"""FlashAttention-2 and -3 of the packages built from source (not on the reading path).

A call passes some arguments by name. A function is understood if it has those, and if for every
other argument we know a value that switches it off. A new option without a default, or a missing
argument, is a reason not to call it.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.interface import QuerySide, copy_results
from megatron_burst.kernels.torch_gpu import (
    Flash,
    flat,
    flat_statistic,
    is_varlen,
    limits,
    results,
    segments_for,
)
from megatron_burst.kernels.visible import Visible


def load(module: str) -> Any:
    """A module, or a text saying why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages built for another torch fail in many ways
        reason = str(error).partition("\n")[0]
        return f"it cannot be imported ({reason or type(error).__name__})"


def understand(
    owner: Any, name: str, given: Collection[str], off: Mapping[str, Any]
) -> Callable[..., Any] | str:
    """A function that takes `given` by name with all else switched off, or why there is none.

    Args:
        owner: the module that should have it.
        name: the function's.
        given: arguments that every call passes.
        off: values, by name, that switch other arguments off; names that it lacks are left out.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        return f"it has no {name}"
    parameters = parameters_of(function)
    if parameters is None:
        return f"{name} has no readable signature"
    lacking = [x for x in given if x not in parameters]
    if lacking:
        return f"{name} does not take {', '.join(lacking)}"
    unknown = [
        x for x, p in parameters.items() if x not in given and x not in off and p.default is p.empty
    ]
    if unknown:
        return f"{name} requires {', '.join(unknown)}"
    return partial(function, **{x: value for x, value in off.items() if x in parameters})


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """A function's named parameters, or None if unknown; looks into torch's custom ops."""
    try:
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return None
    return parameters


_QKV = ("q", "k", "v", "softmax_scale", "causal")
_DENSE = ("_flash_attn_forward", "_flash_attn_backward")
_SEGMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_WINDOWS = {"window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1}


class FlashAttention2:
    """`flash_attn.flash_attn_interface` of flash-attn 2.8: what its autograd functions call.

    Another build of the kernels that torch ships as `flash`.
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
    _varlen = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")

    @cached_property
    def _functions(self) -> dict[str, Callable[..., Any]] | str:
        """By name, or a text saying why they cannot be used."""
        module = self._module()
        if isinstance(module, str):
            return module
        taken = ("dout", *_QKV, "out", self._lse, "dq", "dk", "dv", *self._flags)
        given = dict(zip(_DENSE, (_QKV, taken), strict=True))
        for name, names in zip(self._varlen, (_QKV, taken), strict=True):
            given[name] = (*names, *_SEGMENTS)
        found = {x: understand(module, x, names, self._off) for x, names in given.items()}
        why = next((x for x in found.values() if isinstance(x, str)), None)
        return found if why is None else f"its release is unknown: {why}"

    def _module(self) -> Any:
        return load("flash_attn.flash_attn_interface")

    def missing(self) -> str | None:
        return self._functions if isinstance(self._functions, str) else None

    def forward(self, q, k, v, scale, visible, into=None):
        if is_varlen(visible):
            run = self._functions[self._varlen[0]]
            where = _where(run, visible, q, k)
            out, lse = run(q=flat(q), k=flat(k), v=flat(v), softmax_scale=scale, **where)[:2]
            return copy_results(results(q, out, lse), into)
        run = self._functions[_DENSE[0]]
        out, lse = run(q=q, k=k, v=v, softmax_scale=scale, causal=visible.causal)[:2]
        return copy_results((out, lse), into)

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        inputs, varlen = (side.q, k, v), is_varlen(visible)
        grads = into
        if into is None or not _fit(into, inputs) or (varlen and k.shape[0] > 1):
            kept = torch.contiguous_format if varlen else torch.preserve_format
            grads = tuple(torch.empty_like(x, memory_format=kept) for x in inputs)
        flags = {"deterministic": deterministic} if self._flags else {}
        tensors = dict(zip(("dout", "q", "k", "v"), (side.dout, *inputs), strict=True))
        tensors |= dict(zip(("out", "dq", "dk", "dv"), (side.out, *grads), strict=True))
        if varlen:
            run = self._functions[self._varlen[1]]
            tensors = {name: flat(x) for name, x in tensors.items()}
            lse, where = flat_statistic(side.lse), _where(run, visible, side.q, k)
        else:
            run = self._functions[_DENSE[1]]
            lse, where = side.lse.contiguous(), {"causal": visible.causal}
        run(softmax_scale=scale, **{self._lse: lse}, **tensors, **where, **flags)
        return grads if grads is into else copy_results(grads, into)


def _where(run: partial, visible: Visible, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Segments and band under the function's own names for them."""
    segments, band = segments_for(visible, q, k), visible.within(q.shape[1], k.shape[1])
    left, right = (-1 if bound is None else bound for bound in (band.left, band.right))
    windows = {"window_size_left": left, "window_size_right": right}
    if "window_size" in run.keywords:
        windows = {"window_size": (left, right)}
    places = segments.cu_q, segments.cu_k, *limits(segments)
    return dict(zip(_SEGMENTS, places, strict=True)) | windows | {"causal": band.causal}


class FlashAttention3(FlashAttention2):
    """FlashAttention-3, as the hopper folder of flash-attn's repository builds it, for Hopper.

    Its deterministic backward does not support all head dimensions, so deterministic calls do not
    use it. Untested with outputs of more than 2^31 elements, where FlashAttention-2 fails.
    """

    capability = replace(
        FlashAttention2.capability, name="fa3", deterministic=False, archs=frozenset({9}),
        speed="FlashAttention-3, for Hopper", splits=False,
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
    _varlen = _DENSE

    def _module(self) -> Any:
        found = [load(x) for x in ("flash_attn_interface", "flash_attn_3.flash_attn_interface")]
        return next((x for x in found if not isinstance(x, str)), found[0])


def _fit(targets: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> bool:
    """Whether kernels that write in the inputs' dtype may write to the targets."""
    return all(a.dtype == b.dtype for a, b in zip(targets, inputs, strict=True))
