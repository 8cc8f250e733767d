"""Transforms of torch, compile, func and CUDA graphs, and what is refused of them."""

import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from megatron_burst.errors import BurstError
from megatron_burst.imports import when_imported


def uncompiled[F: Callable[..., Any]](function: F) -> F:
    """The function as one graph break of torch.compile, instead of one at each operation."""
    return _wrapped(function, None)


def compilable[F: Callable[..., Any]](traced: str) -> Callable[[F], F]:
    """The function; torch.compile traces another one for it, "module:name", whose arguments are
    this function, as one graph break, and its arguments."""
    return partial(_wrapped, traced=traced)


def _wrapped(function: Callable[..., Any], traced: str | None) -> Any:
    """torch.compiler.disable imports torch._dynamo, which takes as long as importing torch. So the
    function is wrapped only once torch._dynamo is imported: nothing is compiled before."""
    run, in_graph = function, None

    def disable() -> None:
        nonlocal run, in_graph
        reason = "megatron_burst runs kernels and communication that torch.compile cannot trace"
        run = torch.compiler.disable(function, reason=reason)
        if traced is not None:
            module, _, name = traced.partition(":")
            in_graph = partial(getattr(importlib.import_module(module), name), run)

    when_imported("torch._dynamo", disable)
    if run is not function and traced is None:
        return run

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if in_graph is not None and is_compiling():
            return in_graph(*args, **options)
        return run(*args, **options)

    return call


def autocast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """Inputs as torch's own attention and matrix products get them: under autocast those in other
    dtypes than float64 are cast to its dtype. What is no tensor stays."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) else ""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in tensors)


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def is_captured(x: Any) -> bool:
    """Whether a CUDA graph is being captured from what runs on this tensor."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_transforms(caller: str, *tensors: Tensor | None, capturable: bool = False) -> None:
    """Refuse a call, or a backward pass, that torch transforms. Takes about a microsecond.

    `tensors`: inputs of the call, or gradients passed to backward; `caller` begins the sentence;
    `capturable`: whether a CUDA graph may capture the call.

    Raises:
        BurstError: inside torch.func's transforms and vmap, if a tensor is batched or has a
            forward-mode tangent, and while a CUDA graph is captured.
    """
    if torch._C._are_functorch_transforms_active():
        kind = torch._C._functorch.peek_interpreter_stack().key().name.lower()
        _refuse(caller, f"a call inside torch.func's {kind}", "call it outside of torch.func")
    present = [x for x in tensors if isinstance(x, Tensor)]  # other kinds are refused later
    if any(map(torch._C._functorch.is_legacy_batchedtensor, present)):
        _refuse(caller, "a batch of tensors for one", "leave out is_grads_batched, or vectorize")
    if present and not capturable and is_captured(present[0]):
        raise BurstError(
            f"{caller}: a call must not be captured in a CUDA graph, because ranks synchronize and "
            "memory is allocated in Python, which a graph does not rerun; got a stream that is "
            "capturing; capture what comes before and after it (make_graphed_callables, "
            "--cuda-graph-modules)"
        )
    inside = forward_ad._current_level >= 0
    if inside and any(forward_ad.unpack_dual(x).tangent is not None for x in present):
        _refuse(caller, "an input with a tangent", "leave out torch.autograd.forward_ad")


def _refuse(caller: str, got: str, change: str) -> None:
    raise BurstError(
        f"{caller}: gradients must come from torch.autograd, one backward pass at a time, because "
        "kernels and transfers support neither batches of gradients nor forward mode; got "
        f"{got}; {change}, and differentiate by backward() or torch.autograd.grad"
    )
