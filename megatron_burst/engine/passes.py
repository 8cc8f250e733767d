"""The two passes of a call that autograd sees, and their programs.

    forward:  q, k, v -> out, lse, saved            backward: saved, out, dout -> dq, dk, dv

Each pass names the call's tensors as the buffers of its program, and runs that.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_burst.comm.detector import PassAnnouncer
from megatron_burst.comm.transport import Transport
from megatron_burst.engine.executor import Executor
from megatron_burst.engine.memory import Fields, empty_like_rows
from megatron_burst.engine.sample_mask import SampleMask
from megatron_burst.kernels.interface import Backend
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.program import Space
from megatron_burst.schedule.spec import Direction, Dtype, Spec

# Checkpoints' frames that run in this thread, outermost first, like a call stack; None while an
# attention function is being recorded. `recompute.keeping` sets it.
FRAMES: ContextVar[tuple[Any, ...] | None] = ContextVar("megatron_burst_frames", default=())


def recording() -> bool:
    """Whether an attention function is being recorded: what its graph saves besides inputs and
    outputs takes memory until recomputation."""
    return FRAMES.get() is None


def compact_copy(x: Tensor, *saved: Tensor) -> Tensor:
    """A copy of x if x is at most a quarter of storage that only x keeps alive, else x.

    V is a slice of the fused QKV projection, while rotary embedding copies Q and K out of it:
    saving V as it is keeps the whole projection until backward.
    """
    storage = x.untyped_storage()
    shared = any(storage.data_ptr() == y.untyped_storage().data_ptr() for y in saved)
    if shared or 4 * x.nbytes > storage.nbytes():
        return x
    return x.detach().clone(memory_format=torch.contiguous_format)


Tensors = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward of a call; backward takes what forward saved.

    Besides out, forward saves q, k, v and lse. An all-to-all saves the tensors it received instead,
    which take as much memory; a gather may also save K and V of other nodes.
    """

    spec: Spec  # resolved
    backend: Backend
    transport: Transport
    scale: float  # of the scores
    dtype: torch.dtype  # of q, k and v
    deterministic: bool = False  # whether gradients must be bitwise the same every time
    nan_guard: bool = False  # whether results are checked for NaN
    announcer: PassAnnouncer = dataclasses.field(default_factory=PassAnnouncer)
    # the same call if its results are kept, or if it has no backward: its forward saves no
    # received tensors
    for_recompute: "Passes | None" = None
    keep: Callable[..., Any] | None = None  # runs the call and keeps its results
    check: int | None = None  # one of so many calls is compared with the definition
    softcap: float = 0.0  # of the scores; 0: none

    def _executor(self, direction: Direction) -> Executor:
        spec, unit = self.spec.program_spec(self.transport.cp_rank, direction).in_units()
        sums, narrow = accumulate_dtype(self.dtype), spec.shape.grad_bytes == self.dtype.itemsize
        wire = self.dtype if narrow else sums
        return self._executor_type(
            program_of(spec), self.backend, self.transport, self.scale,
            {Dtype.INPUT: self.dtype, Dtype.SUM: sums, Dtype.WIRE: wire}, self.deterministic, unit,
            self.softcap,
        )  # fmt: skip

    @property
    def _executor_type(self) -> type[Executor]:
        if not self.nan_guard:
            return Executor
        from megatron_burst.checks.guard import GuardedExecutor

        return GuardedExecutor

    @cached_property
    def forward_executor(self) -> Executor:
        return self._executor(Direction.FORWARD)

    @cached_property
    def backward_executor(self) -> Executor:
        return self._executor(Direction.BACKWARD)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sample_mask: SampleMask | None = None,
        begin: Callable[[], object] = dict, sink: Tensor | None = None,
        largest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensors]:  # fmt: skip
        """Attention of this rank's queries over the keys of all ranks.

        Takes q [b, n, h, dqk], k [b, n_kv, h_kv, dqk] and v [b, n_kv, h_kv, dv]; the rest as
        `Executor.run`. Returns out [b, n, h, dv] in q's dtype or the accumulation dtype, lse
        [b, h, n] in the accumulation dtype, and what is saved for backward.
        """
        executor = self.forward_executor
        tensors = {"q": {"q": q}, "kv": {"k": k, "v": v}}
        results = partial(_results, executor, {"out": (q, v.shape[-1])})
        run = executor.run(tensors, None, sample_mask, results, begin, sink, largest)
        out, lse = run.fields["out"]["out"], run.fields["out"]["lse"]
        saved = tuple(run.saved[name] for name in executor.program.saved)
        if self._saves_inputs:
            saved = (q, k, compact_copy(v, q, k) if not self.spec.resends else v, lse, *saved)
        return out, lse, saved

    @property
    def _saves_inputs(self) -> bool:
        """Whether backward reads q, k, v and lse themselves."""
        return "kv" in self.backward_executor.program.buffers

    def backward(
        self, saved: Sequence[Tensor], out: Tensor, dout: Tensor,
        sample_mask: SampleMask | None = None, begin: Callable[[], object] = dict,
        delta: Tensor | None = None,
    ) -> Tensors:  # fmt: skip
        """Gradients of this rank's q, k and v, in their dtype or the accumulation dtype.

        Takes what forward saved, and out and dout [b, n, h, dv]; `delta` [b, h, n] is computed from
        these unless the caller has it.
        """
        executor, side = self.backward_executor, {"dout": dout, "out": out}
        shape, tensors, like = self.spec.shape, {}, (dout,) * 3
        if self._saves_inputs:
            q, k, v, lse, *saved = saved
            side |= {"q": q, "lse": lse}
            tensors, like = {"kv": {"k": k, "v": v}}, (q, k, v)
        dims = {"dq": shape.dim_qk, "dk": shape.dim_qk, "dv": shape.dim_v}
        rows = {name: (x, dim) for (name, dim), x in zip(dims.items(), like, strict=True)}
        tensors["side"] = side | ({} if delta is None else {"delta": delta})
        buffers = dict(zip(self.forward_executor.program.saved, saved, strict=True))
        run = executor.run(tensors, buffers, sample_mask, partial(_results, executor, rows), begin)
        return run.fields["dq"]["dq"], run.fields["dkv"]["dk"], run.fields["dkv"]["dv"]


def _results(executor: Executor, like: dict[str, tuple[Tensor, int]]) -> dict[str, Fields]:
    """Allocate results; rows are outermost in memory if they are in the tensor they mirror.

    `like`: by field, the tensor that it mirrors, and the head dimension.
    """
    results: dict[str, Fields] = {}
    x, _ = next(iter(like.values()))
    for name in ("out", "dq", "dkv"):
        buffer = executor.buffers.get(name)
        if buffer is None or buffer.space is not Space.CALL:
            continue
        fields = results[name] = {}
        for field in buffer.fields:
            dtype, heads = executor.dtypes[field.dtype], field.heads
            if field.name in like:
                mirrored, dim = like[field.name]
                fields[field.name] = empty_like_rows(mirrored, buffer.rows, heads, dim, dtype)
            else:
                sizes = executor.program.batch, heads, buffer.rows
                fields[field.name] = x.new_empty(sizes, dtype=dtype)
    return results
