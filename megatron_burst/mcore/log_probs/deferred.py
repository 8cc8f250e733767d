"""Logits that are not computed: a tensor with their shape, and hidden states and weight behind it.

Frameworks transpose, scale, convert and slice logits before they compute log-probabilities. These
operations are recorded. All others compute the logits, so they are right too, and a log line says
which they were.
"""

import logging
from collections.abc import Callable
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
    _aten.alias.default, _aten.detach.default, _aten.permute.default,
    _aten.select.int, _aten.slice.Tensor, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims, _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default,
    _aten.view.default, _aten._unsafe_view.default,
))  # fmt: skip
_COPIES = frozenset((_aten.clone.default, _aten._to_copy.default))
_SCALES: dict[Any, Callable[[float, float], float]] = {
    _aten.mul.Tensor: float.__mul__, _aten.mul_.Tensor: float.__mul__,
    _aten.div.Tensor: float.__truediv__, _aten.div_.Tensor: float.__truediv__,
}  # fmt: skip


@dataclass(slots=True)
class Source:
    """What logits in one part of memory would be computed from; all views of them have it."""

    layer: ColumnParallelLinear
    hidden: Tensor  # [s, b, h], or a tensor-parallel rank's part of s
    weight: Tensor | None  # as in a call of the layer; None: its own
    dtype: torch.dtype  # of the logits
    scale: float = 1.0
    index: Tensor | None = None  # token, of s * b, of each row in memory; None: in their order
    computed: Tensor | None = None  # [rows, vocab / tp], once an operation needed them

    @property
    def classes(self) -> int:
        """This rank's part of the vocabulary."""
        return self.layer.output_size_per_partition

    @property
    def shape(self) -> tuple[int, int, int]:
        """[s, b, vocab / tp] of the layer's output."""
        seq, batch, _ = self.hidden.shape
        ranks = self.layer.tp_group.size() if self.layer.sequence_parallel else 1
        return seq * ranks, batch, self.classes

    @property
    def rows(self) -> int:
        """Number of rows in memory."""
        return self.shape[0] * self.shape[1] if self.index is None else len(self.index)

    def tokens(self) -> Tensor:
        """The token of each row in memory."""
        hidden, index = self.hidden, self.index
        return torch.arange(self.rows, device=hidden.device) if index is None else index

    def logits(self) -> Tensor:
        """All rows in memory, [rows, vocab / tp]; without gradients."""
        if self.computed is None:
            with torch.no_grad():
                rows = call(self.layer, self.hidden, self.weight).reshape(-1, self.classes)
                rows = rows if self.index is None else rows[self.index]
                rows = rows.to(self.dtype)
                self.computed = rows if self.scale == 1 else rows * self.scale
        return self.computed


def call(layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """The layer's logits, computed by Megatron."""
    return ColumnParallelLinear.__call__(layer, hidden, weight=weight)[0]


class DeferredLogits(Tensor):
    """Logits of an output layer, or a view of them, in whose memory there is nothing.

    An autograd.Function that takes them as an argument gets them with their gradient.
    """

    source: Source

    @staticmethod
    def __new__(cls, source: Source, like: Tensor) -> "DeferredLogits":
        """`like`: a tensor on the meta device with size, strides and offset."""
        logits = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(),
            dtype=source.dtype, device=source.hidden.device,
        )  # fmt: skip
        logits.source = source
        return logits

    def like(self) -> Tensor:
        """A tensor on the meta device that addresses its memory as this one does."""
        elements = self.source.rows * self.source.classes
        memory = torch.empty(elements, dtype=self.dtype, device="meta")
        return memory.as_strided(self.size(), self.stride(), self.storage_offset())

    def tokens(self) -> Tensor:
        """The token, of s * b, of each row."""
        return _rows_of(self.source.tokens(), self)

    def logits(self) -> Tensor:
        """The logits, computed; all tensors with this source share their memory."""
        memory = self.source.logits()
        return memory.as_strided(self.size(), self.stride(), self.storage_offset())

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.sum and len(args) == 1 and not kwargs and args[0].is_whole():
                return _sum(args[0])
            return func(*args, **(kwargs or {}))

    def is_whole(self) -> bool:
        """Whether it has all rows, and nothing was computed."""
        source = self.source
        return source.computed is None and self.numel() == torch.Size(source.shape).numel()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if x is None or x.source.computed is None:
            recorded = None if x is None else _record(x, func, args[1:], kwargs)
            if recorded is not None:
                return recorded
            _log_why(str(func))
        real_args, real_kwargs = tree_map_only(DeferredLogits, cls.logits, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        return x if func._schema.is_mutable and x is not None else result


def _rows_of(memory: Tensor, logits: Tensor) -> Tensor:
    """What memory with one element for each row has for the rows of logits."""
    classes = logits.shape[-1]
    steps = [step // classes for step in logits.stride()[:-1]]
    return memory.as_strided(logits.shape[:-1], steps, logits.storage_offset() // classes)


def _record(x: DeferredLogits, func: Any, args: Any, kwargs: Any) -> DeferredLogits | None:
    """The result of an operation without logits; None if it needs them."""
    if func in _VIEWS:
        return _viewed(x, func, args, kwargs)
    if func in _COPIES:
        return _copied(x, func, kwargs)
    if func in _SCALES and isinstance(args[0], int | float) and args[0] > 0:
        result: DeferredLogits | None = x
        if not func._schema.is_mutable:
            result = _copied(x, _aten.clone.default, {})
        elif x.numel() != x.source.rows * x.source.classes:
            return None  # other rows keep their scale
        assert result is not None  # a copy in the same dtype
        result.source.scale = _SCALES[func](x.source.scale, float(args[0]))
        return result
    return None


def _viewed(x: DeferredLogits, func: Any, args: Any, kwargs: Any) -> DeferredLogits | None:
    """A view of whole rows; None if it is something else."""
    classes = x.source.classes
    try:
        view = func(x.like(), *args, **kwargs)
    except RuntimeError:  # raised again with the logits
        return None
    steps = [step for n, step in zip(view.shape, view.stride(), strict=True) if n != 1]
    has_rows = view.dim() > 0 and view.shape[-1] == classes and view.stride(-1) == 1
    by_row = all(step % classes == 0 for step in [*steps[:-1], view.storage_offset()])
    return DeferredLogits(x.source, view) if has_rows and by_row else None


def _copied(x: DeferredLogits, func: Any, kwargs: Any) -> DeferredLogits | None:
    """A copy, perhaps in another floating dtype; None for other conversions."""
    dtype = kwargs.get("dtype") or x.dtype
    is_elsewhere = kwargs.get("device") not in (None, x.device)
    if is_elsewhere or dtype not in (x.dtype, torch.float32, torch.float64):
        return None
    like = func(x.like(), **{name: value for name, value in kwargs.items() if name != "device"})
    index = torch.empty(like.numel() // like.shape[-1], dtype=torch.long, device=x.device)
    _rows_of(index, like).copy_(x.tokens())
    in_order = x.is_whole() and x.source.index is None and like.stride() == x.stride()
    source = replace(x.source, dtype=dtype, index=None if in_order else index)
    return DeferredLogits(source, like)


class _Defer(torch.autograd.Function):
    """Logits that are not computed, with the gradients of those of the layer."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, source: Source) -> Tensor:
        ctx.layer, ctx.own_weight = source.layer, weight  # whose attributes Megatron reads
        ctx.save_for_backward(hidden)
        return DeferredLogits(source, torch.empty(source.shape, dtype=source.dtype, device="meta"))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (hidden,) = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
            logits = call(ctx.layer, hidden, ctx.own_weight)
        inputs = [x for x in (hidden, ctx.own_weight) if x.requires_grad]
        grads = iter(torch.autograd.grad(logits, inputs, grad))
        return *(next(grads) if needs else None for needs in ctx.needs_input_grad[:2]), None


def _sum(logits: DeferredLogits) -> Tensor:
    """The sum of all logits, which are linear: from that of hidden states."""
    source = logits.source
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        total = source.hidden.sum((0, 1), keepdim=True)
        return call(source.layer, total, source.weight).sum().to(source.dtype) * source.scale


def defer(layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """The logits of a call of the layer, [s, b, vocab / tp], not computed."""
    source = Source(layer, hidden, weight, hidden.dtype)
    return _Defer.apply(hidden, layer.weight if weight is None else weight, source)


@cache  # one line in a process for each operation
def _log_why(operation: str) -> None:
    log_message(
        f"burst log-probabilities: logits were computed, because {operation} needs them; leave "
        "log_probs=1 out where that is in every step", logging.WARNING,
    )  # fmt: skip
