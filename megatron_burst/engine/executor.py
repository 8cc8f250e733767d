"""Runs programs: one loop, a function an operation.

What depends on shapes alone (waits, streams, views of the group's buffers) is found once for each
program and kept with it; a run looks up the call's own tensors and calls kernels.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_burst.comm.carrier import Carrier
from megatron_burst.comm.slots import Give, Take, UnderWay
from megatron_burst.engine.memory import Dtypes, Fields, Layout, cut_out, fields_at, shape_of
from megatron_burst.kernels.backends import Backend, QuerySide
from megatron_burst.kernels.partial import delta_stand_in, merge_parts, row_delta, sum_parts
from megatron_burst.plan.mask import Mask
from megatron_burst.schedule import program as p
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import Buffer, Home, Op, Program, Ref, Stream, Transfer


@dataclass(frozen=True)
class Executor:
    """A program with all that runs it.

    Attributes:
        program: of this rank.
        backend: computes the tiles.
        carrier: carries data between ranks.
        scale: of the scores before the softmax.
        dtypes: of elements.
        deterministic: whether gradients must be bitwise the same every time.
    """

    program: Program
    backend: Backend
    carrier: Carrier
    scale: float
    dtypes: Dtypes
    deterministic: bool

    @cached_property
    def order(self):
        return order(self.program)

    @cached_property
    def waited_for(self) -> frozenset[int]:
        """Operations that another stream waits for."""
        return frozenset(i for waits in (*self.order.waits, self.order.joins) for i in waits)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """How buffers lie in their bytes, by name; of those that are bytes."""
        program = self.program
        return {
            name: Layout.of(buffer, program.batch, self.dtypes)
            for name, buffer in program.buffers.items()
            if buffer.home not in (Home.CALL, Home.PART)
        }

    @cached_property
    def uses(self) -> dict[tuple[Home, str], tuple[int, int]]:
        """How many buffers of a use the group must have, and of how many bytes."""
        found: dict[tuple[Home, str], tuple[int, int]] = {}
        for name, layout in self.layouts.items():
            buffer = self.program.buffers[name]
            if buffer.home is not Home.LEFT:
                count = buffer.count if buffer.home is not Home.HOP else buffer.number + 1
                before = found.get((buffer.home, buffer.use), (0, 0))
                most = max(before[0], count), max(before[1], layout.num_bytes)
                found[buffer.home, buffer.use] = most
        return found

    def run(self, given: Mapping[str, Fields], left: Mapping[str, Tensor] | None = None) -> "Run":
        """Run the program.

        Args:
            given: the call's own buffers: inputs, and outputs to be written.
            left: bytes of what forward has left.
        """
        device = next(iter(next(iter(given.values())).values())).device
        run = Run(self, dict(given), dict(left or {}), device)
        waits = _Waits(self, run, device)
        for index, op in enumerate(self.program.ops):
            with waits.queue(op):
                for earlier in self.order.waits[index]:
                    waits.wait(earlier)
                RUN[type(op)](run, op)
                waits.done(index, op)
            for name in self.order.frees[index]:
                run.fields.pop(name, None)
        for earlier in self.order.joins:
            waits.wait(earlier)
        return run


class Run:
    """One run of a program: its tensors.

    Attributes:
        fields: of the call's buffers, by name.
        left: bytes of buffers that forward leaves for backward.
        under_way: what the last transfer is waited for with.
    """

    def __init__(
        self, executor: Executor, given: dict[str, Fields], left: dict[str, Tensor],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.executor, self.program = executor, executor.program
        self.backend, self.layouts = executor.backend, executor.layouts
        self.fields, self.left, self.device = given, left, device
        self.under_way: UnderWay | None = None
        carrier, uses = executor.carrier, executor.uses
        self._flat = {
            key: carrier.buffers(key, count, size, device)
            for key, (count, size) in uses.items()
            if key[0] is not Home.SLOT
        }
        self._slots = {
            use: carrier.slots(use, count, size, device)
            for (home, use), (count, size) in uses.items()
            if home is Home.SLOT
        }
        self._filled: dict[str, Tensor] = {}  # slots of this call

    def of(self, ref: Ref) -> Fields:
        """The tensors of a part of a buffer."""
        fields = self.fields.get(ref.buffer)
        if fields is None:
            buffer = self.program.buffers[ref.buffer]
            if buffer.home in (Home.PART, Home.CALL):
                fields = self._made(buffer)
            else:
                fields = fields_at(self.bytes_of(buffer), self.layouts[ref.buffer].places)
            self.fields[ref.buffer] = fields
        return cut_out(fields, ref)

    def is_made(self, ref: Ref) -> bool:
        """Whether the buffer has memory: parts are made by whoever writes them first."""
        return ref.buffer in self.fields or self.program.buffers[ref.buffer].home is not Home.PART

    def _made(self, buffer: Buffer) -> Fields:
        options = {"device": self.device}
        return {
            field.name: torch.empty(
                shape_of(field, self.program.batch, buffer.rows),
                dtype=self.executor.dtypes[field.dtype], **options,
            )
            for field in buffer.fields
        }  # fmt: skip

    def bytes_of(self, buffer: Buffer) -> Tensor:
        """A whole buffer that is none of the allocator's parts."""
        size = self.layouts[buffer.name].num_bytes
        if buffer.home is Home.SLOT:
            if buffer.name not in self._filled:
                slots = self._slots[buffer.use]
                self._filled[buffer.name] = slots.view(buffer.number, (size,), torch.uint8)
            return self._filled[buffer.name]
        if buffer.home is Home.LEFT:
            if buffer.name not in self.left:
                self.left[buffer.name] = torch.empty(size, dtype=torch.uint8, device=self.device)
            return self.left[buffer.name]
        number = buffer.number if buffer.home is Home.HOP else buffer.number % buffer.count
        return self._flat[buffer.home, buffer.use][number][:size]

    def raw(self, ref: Ref) -> Tensor:
        """What travels: a whole buffer's bytes, or rows of one that is interleaved."""
        buffer = self.program.buffers[ref.buffer]
        flat = self.bytes_of(buffer)
        if not buffer.interleaved:
            assert ref.rows is None and ref.heads is None
            return flat
        rows = flat.view(self.layouts[buffer.name].rows)
        return rows if ref.rows is None else rows[ref.rows.slice]

    def start(self, transfer: Transfer) -> UnderWay:
        """Start a transfer behind what the current stream has queued."""
        if transfer.slot is None:
            sends = [(give.peer, self.raw(give.rows)) for give in transfer.gives]
            recvs = [(take.peer, self.raw(take.rows)) for take in transfer.takes]
            return self.executor.carrier.send(transfer.link, transfer.cargo, sends, recvs)
        buffer = self.program.buffers[transfer.slot.buffer]
        view = self.bytes_of(buffer).view(self.layouts[buffer.name].rows)
        gives = [Give(give.peer, give.rows.rows.slice) for give in transfer.gives]
        takes = [
            Take(take.peer, take.theirs.rows.slice, self.raw(take.rows)) for take in transfer.takes
        ]
        return self._slots[buffer.use].exchange(buffer.number, view, gives, takes)


class _Waits:
    """Which queue an operation is given to, and how others wait for it."""

    def __init__(self, executor: Executor, run: Run, device: torch.device) -> None:
        self._executor, self._run = executor, run
        self._queues = executor.carrier.queues(device)
        self._transfers: dict[int, UnderWay] = {}
        self._marks: dict[int, object] = {}
        self._begin = self._queues.mark()
        self._begun: set[Hashable] = set()

    @contextmanager
    def queue(self, op: Op) -> Iterator[None]:
        """Within it an operation goes where it belongs."""
        name = (op.link, op.cargo) if isinstance(op, Transfer) else op.stream
        if name is Stream.COMPUTE:
            yield
            return
        with self._queues.on(name):
            if name not in self._begun:  # what the calls before left is the compute stream's
                self._queues.wait(self._begin)
                self._begun.add(name)
            yield

    def wait(self, earlier: int) -> None:
        """Let the current queue wait for an operation on another one."""
        if earlier in self._transfers:
            self._transfers[earlier].wait()
        else:
            self._queues.wait(self._marks[earlier])

    def done(self, index: int, op: Op) -> None:
        """An operation was given to the current queue."""
        if isinstance(op, Transfer):
            self._transfers[index] = self._run.under_way
            if not self._executor.carrier.overlaps:
                self._run.under_way.wait()
        elif index in self._executor.waited_for:
            self._marks[index] = self._queues.mark()


def _copy(run: Run, op: p.Copy) -> None:
    if len(op.sources) == 1 and _alike(run, op.sources[0], op.target):
        run.raw(op.target).copy_(run.raw(op.sources[0]))
        return
    targets = run.of(op.target)
    for name, x in _first_of(run, op.sources).items():
        if name in targets:
            targets[name].copy_(x)


def _alike(run: Run, source: Ref, target: Ref) -> bool:
    """Whether both are rows of the same kind."""
    one, other = (run.program.buffers[ref.buffer] for ref in (source, target))
    whole = source.heads is None and target.heads is None
    return one.interleaved and other.interleaved and one.fields == other.fields and whole


def _first_of(run: Run, refs: Sequence[Ref]) -> Fields:
    """Fields by name; of several with one name the first."""
    found: Fields = {}
    for ref in refs:
        found = run.of(ref) | found
    return found


def _to_ranks(run: Run, op: p.ToRanks) -> None:
    sources = _first_of(run, op.sources)
    for name, target in run.of(op.target).items():
        _by_rank(target, op.ranks).copy_(_by_heads(sources[name], op.ranks))


def _from_ranks(run: Run, op: p.FromRanks) -> None:
    source = run.of(op.source)
    for target in op.targets:
        for name, x in run.of(target).items():
            _by_heads(x, op.ranks).copy_(_by_rank(source[name], op.ranks))


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Rows of several ranks: [b, ranks, n, part, d], or [b, ranks, part, n] of statistics."""
    return (
        x.unflatten(1, (ranks, -1)) if x.dim() == 4 else x.unflatten(2, (ranks, -1)).transpose(1, 2)
    )


def _by_heads(x: Tensor, ranks: int) -> Tensor:
    """The same of heads of several ranks."""
    return (
        x.unflatten(2, (ranks, -1)).transpose(1, 2) if x.dim() == 4 else x.unflatten(1, (ranks, -1))
    )


def _fill(run: Run, op: p.Fill) -> None:
    for name, x in run.of(op.target).items():
        x.fill_(-torch.inf if name == "lse" else 0)


def _attend(run: Run, op: p.Attend) -> None:
    kv = run.of(op.kv)
    args = run.of(op.q)["q"], kv["k"], kv["v"], run.executor.scale, op.mask is Mask.CAUSAL
    if len(op.into) == 1 and not run.is_made(op.into[0]):
        out, lse = run.backend.forward(*args, into=None)
        run.fields[op.into[0].buffer] = {"out": out, "lse": lse}
        return
    into = _first_of(run, op.into)
    run.backend.forward(*args, into=(into["out"], into["lse"]))


def _attend_backward(run: Run, op: p.AttendBackward) -> None:
    found, kv = _first_of(run, op.sides), run.of(op.kv)
    side = QuerySide(*map(found.get, ("q", "dout", "lse", "delta", "out")))
    made, into = (run.is_made(op.dq), run.is_made(op.dkv)), None
    if any(made):
        into = run.of(op.dq)["dq"], *(run.of(op.dkv)[name] for name in ("dk", "dv"))
    dq, dk, dv = run.backend.backward(
        side, kv["k"], kv["v"], run.executor.scale, op.mask is Mask.CAUSAL,
        into=into, deterministic=run.executor.deterministic,
    )  # fmt: skip
    if into is None:
        run.fields[op.dq.buffer] = {"dq": dq}
        run.fields[op.dkv.buffer] = {"dk": dk, "dv": dv}


def _merge(run: Run, op: p.Merge) -> None:
    into = _first_of(run, op.into)
    parts = [run.of(part) for part in op.parts]
    merge_parts(into["out"], into["lse"], [(part["out"], part["lse"]) for part in parts])


def _add(run: Run, op: p.Add) -> None:
    parts = [run.of(part) for part in op.parts]
    for name, target in run.of(op.into).items():
        if not parts:
            target.zero_()
        elif all(name in part for part in parts):
            sum_parts(target, [part[name] for part in parts])


def _delta(run: Run, op: p.Delta) -> None:
    side = run.of(op.side)
    run.fields[op.into.buffer] = {"delta": row_delta(side["dout"], side["out"])}


def _stand_in(run: Run, op: p.StandIn) -> None:
    side = _first_of(run, op.sides)
    run.fields[op.into.buffer] = {"out": delta_stand_in(side["dout"], side["delta"])}


def _transfer(run: Run, op: Transfer) -> None:
    run.under_way = run.start(op)


RUN: Mapping[type, Callable[[Run, Op], None]] = {
    p.Copy: _copy, p.ToRanks: _to_ranks, p.FromRanks: _from_ranks, p.Fill: _fill,
    p.Attend: _attend, p.AttendBackward: _attend_backward, p.Merge: _merge, p.Add: _add,
    p.Delta: _delta, p.StandIn: _stand_in, Transfer: _transfer,
}  # fmt: skip
