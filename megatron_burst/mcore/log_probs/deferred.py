"""Logits that are not computed: a tensor with their shape, and hidden states and weight behind it.

Frameworks transpose, scale, convert and slice logits before they compute log-probabilities. These
operations are recorded. All others compute the logits, so they are right too, and a log line says
which they were.
"""

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_burst.logs import log_message

_aten = torch.ops.aten
# operations that change how elements are addressed, and repeat none
_VIEWS = frozenset((
    _aten.alias.default, _aten.detach.default, _aten.slice.Tensor, _aten.squeeze.dim,
    _aten.transpose.int, _aten.unsqueeze.default,
))  # fmt: skip
_COPIES = frozenset((_aten.clone.default, _aten._to_copy.default))
# which power of their argument logits are multiplied by
_SCALES = {_aten.mul.Tensor: 1, _aten.div.Tensor: -1, _aten.div_.Tensor: -1}


@dataclass(slots=True)
class Source:
    """What logits in one part of memory would be computed from; all views of them have it."""

    layer: ColumnParallelLinear
    hidden: Tensor  # [s, b, h], or a tensor-parallel rank's part of s
    weight: Tensor | None  # as in a call of the layer; None: its own
    shape: torch.Size  # [s, b] of the layer's output
    dtype: torch.dtype  # of the logits
    tokens: Tensor  # [...] which of s * b each row in memory is of; contiguous
    scale: float = 1.0
    computed: Tensor | None = None  # [..., vocab / tp], once an operation needed them

    def logits(self, operation: str) -> Tensor:
        """All logits in memory, without gradients."""
        if self.computed is None:
            _log_why(operation)
            with torch.no_grad():
                rows = call(self.layer, self.hidden, self.weight).flatten(0, 1)
                self.computed = rows[self.tokens].to(self.dtype).mul_(self.scale)
        return self.computed


def call(layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """The layer's logits, computed by Megatron."""
    return ColumnParallelLinear.__call__(layer, hidden, weight=weight)[0]


class DeferredLogits(Tensor):
    """Logits of an output layer, or a view of them, in whose memory there is nothing.

    An autograd.Function that takes them as an argument gets them with their gradient.
    """

    source: Source
    tokens: Tensor  # [...] the token, of s * b, of each row; a view of the source's

    @staticmethod
    def __new__(cls, source: Source, tokens: Tensor) -> "DeferredLogits":
        classes = source.layer.output_size_per_partition
        steps = [step * classes for step in tokens.stride()]
        logits = Tensor._make_wrapper_subclass(
            cls, (*tokens.shape, classes), strides=(*steps, 1), dtype=source.dtype,
            storage_offset=tokens.storage_offset() * classes, device=tokens.device,
        )  # fmt: skip
        logits.source, logits.tokens = source, tokens
        return logits

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.sum and len(args) == 1 and not kwargs and _is_whole(args[0]):
                return _sum(args[0])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def logits_of(x: DeferredLogits) -> Tensor:  # those with one source share their memory
            return x.source.logits(str(func)).as_strided(x.size(), x.stride(), x.storage_offset())

        x, kwargs = args[0], kwargs or {}
        is_deferred = isinstance(x, DeferredLogits)
        result = _record(func, *args, **kwargs) if is_deferred else None
        if result is not None:
            return result
        args, kwargs = tree_map_only(DeferredLogits, logits_of, (args, kwargs))
        result = func(*args, **kwargs)
        return x if func._schema.is_mutable and is_deferred else result


def _record(func: Any, x: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    """The result of an operation without logits; None if it needs them."""
    if x.source.computed is not None:
        return None
    if func in _VIEWS:  # of whole rows: what it does with the token of each element
        view = func(x.tokens.unsqueeze(-1).expand(x.shape), *args, **kwargs)
        has_rows = (view.shape[-1:], view.stride()[-1:]) == (x.shape[-1:], (0,))
        return DeferredLogits(x.source, view[..., 0]) if has_rows else None
    dtype = kwargs.pop("dtype", x.dtype)
    is_copy = func in _COPIES and kwargs.keys() <= {"memory_format"}
    if is_copy and dtype in (x.dtype, torch.float32):
        return _copied(x, dtype)
    if func not in _SCALES or not isinstance(args[0], int | float) or args[0] <= 0:
        return None
    if not func._schema.is_mutable:
        x = _copied(x, x.dtype)
    elif x.tokens.numel() != x.source.tokens.numel():
        return None  # other rows keep their scale
    x.source.scale *= args[0] ** _SCALES[func]
    return x


def _copied(x: DeferredLogits, dtype: torch.dtype) -> DeferredLogits:
    """A contiguous copy."""
    tokens = x.tokens.clone(memory_format=torch.contiguous_format)
    return DeferredLogits(replace(x.source, dtype=dtype, tokens=tokens), tokens)


class _Defer(torch.autograd.Function):
    """Logits that are not computed, with the gradients of those of the layer."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, source: Source) -> Tensor:
        ctx.layer, ctx.own_weight = source.layer, weight  # whose attributes Megatron reads
        ctx.save_for_backward(hidden)
        return DeferredLogits(source, source.tokens)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors[0].detach().requires_grad_(), ctx.own_weight
        with torch.enable_grad():
            logits = call(ctx.layer, hidden, weight)
        inputs = (hidden, weight) if weight.requires_grad else (hidden,)
        return (*torch.autograd.grad(logits, inputs, grad), None, None)[:3]


def _is_whole(logits: DeferredLogits) -> bool:
    """Whether it has all rows, and nothing was computed."""
    source = logits.source
    return source.computed is None and logits.tokens.numel() == source.shape.numel()


def _sum(logits: DeferredLogits) -> Tensor:
    """The sum of all logits, which are linear: from that of hidden states."""
    source = logits.source
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        total = source.hidden.sum((0, 1), keepdim=True)
        return call(source.layer, total, source.weight).sum().to(source.dtype) * source.scale


def defer(layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """The logits of a call of the layer, [s, b, vocab / tp], not computed."""
    ranks = layer.tp_group.size() if layer.sequence_parallel else 1
    shape = torch.Size((hidden.shape[0] * ranks, hidden.shape[1]))
    tokens = torch.arange(shape.numel(), device=hidden.device).view(shape)
    source = Source(layer, hidden, weight, shape, hidden.dtype, tokens)
    return _Defer.apply(hidden, layer.weight if weight is None else weight, source)


@cache  # one line in a process for each operation
def _log_why(operation: str) -> None:
    log_message(
        f"burst log-probabilities: logits were computed, because {operation} needs them; leave "
        "log_probs=1 out where that is in every step", logging.WARNING,
    )  # fmt: skip
