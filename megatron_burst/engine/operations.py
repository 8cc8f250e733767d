"""One function per operation: from a program's operation to what a run calls.

Binding looks up once what depends on shapes alone; what it returns takes the run, which has the
tensors.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_burst.comm.transport import Handle
from megatron_burst.engine.memory import Fields, fields_at
from megatron_burst.engine.run import Compiler, Run
from megatron_burst.engine.sample_mask import TileCalls
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.partial import (
    copy_rows,
    merge_parts,
    row_delta,
    sum_parts,
    sum_rows,
    surrogate_out,
)
from megatron_burst.kernels.visible import Visible
from megatron_burst.schedule import program as ops
from megatron_burst.schedule.program import Buffer, Ref, Space

_NAN = 0xFF  # each byte of a NaN, in every dtype
BoundOp = Callable[[Run], Any]
Part = Callable[[Run], Fields]
Source = Callable[[Run], Tensor]


def part(binder: Compiler, ref: Ref) -> Part:
    """How a run gets the tensors of some rows and heads of a buffer."""
    buffer = binder.program.buffers[ref.buffer]
    ref, all_of = _narrowed(ref, buffer), whole(binder, buffer)
    if ref.rows is None and ref.heads is None:
        return all_of
    rows = ref.rows and (ref.rows.start, len(ref.rows))
    heads = ref.heads and (ref.heads.start, len(ref.heads))
    axes = [(f.name, *((1, 2) if f.dim else (2, 1))) for f in buffer.fields]

    def some(run: Run) -> Fields:
        fields, found = all_of(run), {}
        first, count = (rows[0] * run.unit, rows[1] * run.unit) if rows else (0, 0)
        for field, of_rows, of_heads in axes:
            x = fields.get(field)
            if x is None:  # a call omits tensors that no operation reads
                continue
            if count:
                x = x.narrow(of_rows, first, count)
            found[field] = x.narrow(of_heads, *heads) if heads else x
        return found

    return some if buffer.space is Space.TEMP else cached_view(binder, ref, buffer, some)


def _narrowed(ref: Ref, buffer: Buffer) -> Ref:
    """The same, with None for rows or heads that are all of them."""
    rows, heads = ref.rows, ref.heads
    if rows and len(rows) == buffer.rows:
        rows = None
    if heads and all(len(heads) == field.heads for field in buffer.fields):
        heads = None
    return Ref(ref.buffer, rows, heads)


def whole(binder: Compiler, buffer: Buffer) -> Part:
    """How a run gets the tensors of a buffer."""
    if buffer.space not in (Space.CALL, Space.TEMP):
        make = lambda run: fields_at(run.bytes_of(buffer), run.layout(buffer).fields)  # noqa: E731
        return cached_view(binder, Ref(buffer.name), buffer, make)
    name = buffer.name

    def found(run: Run) -> Fields:
        fields = run.fields.get(name)
        return run.make(name) if fields is None else fields

    return found


def cached_view[T](
    binder: Compiler, what: Hashable, buffer: Buffer, make: Callable[[Run], T]
) -> Callable[[Run], T]:
    """Something derived once from a buffer that lives as long as the run, or longer."""
    name = binder.name_of(what)

    def found(run: Run) -> T:
        view = run.views.get(name)
        return run.cache_view(name, buffer, make(run)) if view is None else view

    return found


def merged_fields(binder: Compiler, refs: Sequence[Ref]) -> Part:
    """Fields of several buffers by name; the first of each name."""
    parts = [part(binder, ref) for ref in reversed(refs)]
    if len(parts) == 1:
        return parts[0]

    def found(run: Run) -> Fields:
        fields: Fields = {}
        for of in parts:
            fields |= of(run)
        return fields

    return found


def is_allocated(binder: Compiler, ref: Ref) -> Callable[[Run], bool]:
    """Whether a buffer has memory: a part is allocated by the kernel that first writes it."""
    name, apart = ref.buffer, binder.program.buffers[ref.buffer].space is not Space.TEMP
    return lambda run: apart or name in run.fields


def raw_bytes(binder: Compiler, ref: Ref) -> Source:
    """What is sent: a whole buffer as bytes, or rows of an interleaved one: [rows, b, bytes]."""
    buffer = binder.program.buffers[ref.buffer]
    if not buffer.interleaved:
        assert ref.rows is None and ref.heads is None
        return cached_view(binder, (ref, "bytes"), buffer, lambda run: run.bytes_of(buffer))
    rows = ref.rows

    def view(run: Run) -> Tensor:
        every, unit = run.bytes_of(buffer).view(run.layout(buffer).rows), run.unit
        return every if rows is None else every.narrow(0, rows.start * unit, len(rows) * unit)

    return cached_view(binder, (ref, "bytes"), buffer, view)


def copy(binder: Compiler, op: ops.Copy) -> BoundOp:
    if len(op.sources) == 1 and _same_rows(binder, op.sources[0], op.target):
        rows, target_rows = raw_bytes(binder, op.sources[0]), raw_bytes(binder, op.target)
        return lambda run: target_rows(run).copy_(rows(run))
    sources, targets = merged_fields(binder, op.sources), part(binder, op.target)

    def bound(run: Run) -> None:
        target = targets(run)
        for name, x in sources(run).items():
            if name in target:
                copy_rows(target[name], x)

    return bound


def _same_rows(binder: Compiler, source: Ref, target: Ref) -> bool:
    """Whether both are rows of the same kind."""
    one, other = (binder.program.buffers[ref.buffer] for ref in (source, target))
    whole = source.heads is None and target.heads is None
    return one.interleaved and other.interleaved and one.fields == other.fields and whole


def arrange(binder: Compiler, op: ops.Arrange) -> BoundOp:
    select = _selecting(binder, op)
    return lambda run: select(run, run.documents.arrange_index(op.src_blocks, op.dst_chunks))


def restore(binder: Compiler, op: ops.Restore) -> BoundOp:
    each_once = sorted(op.dst_chunks) == sorted(
        number for block in op.src_blocks for number in block
    )
    if each_once and _same_rows(binder, op.source, op.target):
        select = _selecting(binder, op)
        return lambda run: select(run, run.documents.restore_index(op.src_blocks, op.dst_chunks)[0])
    sources, targets = part(binder, op.source), part(binder, op.target)

    def bound(run: Run) -> None:
        copies, source = run.documents.restore_index(op.src_blocks, op.dst_chunks), sources(run)
        for name, target in targets(run).items():
            sum_rows(target, source[name], copies)

    return bound


def _selecting(binder: Compiler, op: ops.Arrange) -> Callable[[Run, Tensor], None]:
    """Copies rows of the source by an index: as raw bytes, or field by field."""
    if _same_rows(binder, op.source, op.target):
        rows, target_rows = raw_bytes(binder, op.source), raw_bytes(binder, op.target)

        def raw_rows(run: Run, index: Tensor) -> None:
            source, target = (_wide(of(run)) for of in (rows, target_rows))
            torch.index_select(source, 0, index, out=target)

        return raw_rows
    sources, targets = part(binder, op.source), part(binder, op.target)

    def fields(run: Run, index: Tensor) -> None:
        source = sources(run)
        for name, target in targets(run).items():
            torch.index_select(source[name], 1, index, out=target)

    return fields


def _wide(rows: Tensor) -> Tensor:
    """Bytes viewed as the widest integers that divide a row."""
    integers, width = (torch.int64, torch.int32, torch.int16, torch.uint8), rows.shape[2]
    return rows.view(next(dtype for dtype in integers if width % dtype.itemsize == 0))


def to_ranks(binder: Compiler, op: ops.ToRanks) -> BoundOp:
    sources, targets = merged_fields(binder, op.sources), part(binder, op.target)

    def bound(run: Run) -> None:
        source = sources(run)
        for name, target in targets(run).items():
            _copy_shards(_by_rank(target, op), _by_heads(source[name], op))

    return bound


def from_ranks(binder: Compiler, op: ops.FromRanks) -> BoundOp:
    source, targets = part(binder, op.source), merged_fields(binder, op.targets)

    def bound(run: Run) -> None:
        came = source(run)
        for name, x in targets(run).items():
            ours, theirs = _by_heads(x, op), _by_rank(came[name], op)
            if ours.shape == theirs.shape:
                _copy_shards(ours, theirs)
            else:
                sum_parts(x, [one.transpose(1, 2).flatten(2, 4) for one in theirs.unbind(2)])

    return bound


def _copy_shards(target: Tensor, source: Tensor) -> None:
    """target <- source, both as `_by_rank` has them."""
    if target.dim() < 7 or target.shape[2] > 1:  # statistics, or copies of KV heads
        target.copy_(source)
        return
    # a rank's heads side by side
    every = target.view(*target.shape[:2], target.shape[3], -1, target.shape[-1])
    for rows, theirs in zip(every, source.squeeze(2).flatten(3, 4), strict=True):
        copy_rows(rows, theirs)


def _by_rank(x: Tensor, op: ops.ToRanks | ops.FromRanks) -> Tensor:
    """Rows of several ranks: [b, ranks / copies, copies, n, KV heads, query heads of each, d];
    statistics have n last."""
    # one view takes a fifth of the CPU time of two `unflatten`, which is Python
    batch, rows, heads = x.shape[:3] if x.dim() == 4 else (x.shape[0], x.shape[2], x.shape[1])
    ranks = op.ranks // op.copies, op.copies, rows // op.ranks
    heads = op.heads_kv, heads // op.heads_kv
    if x.dim() == 4:
        return x.view(batch, *ranks, *heads, x.shape[3])
    return x.view(batch, *heads, *ranks).permute(0, 3, 4, 1, 2, 5)


def _by_heads(x: Tensor, op: ops.ToRanks | ops.FromRanks) -> Tensor:
    """The same for heads of several ranks; keys and values are there once, without copies."""
    axis, groups, shape = (2 if x.dim() == 4 else 1), op.ranks // op.copies, x.shape
    once = groups * op.heads_kv
    copies = 1 if shape[axis] == once else op.copies
    split = groups, op.heads_kv, copies, shape[axis] // (once * copies)
    x = x.view(*shape[:axis], *split, *shape[axis + 1 :])
    return x.permute((0, 2, 4, 1, 3, 5, 6) if axis == 2 else (0, 1, 3, 2, 4, 5))


def fill(binder: Compiler, op: ops.Fill) -> BoundOp:
    target = part(binder, op.target)

    def bound(run: Run) -> None:
        for name, x in target(run).items():
            x.fill_(-torch.inf if name == "lse" else 0)

    return bound


def visible(
    binder: Compiler, op: ops.Attend | ops.AttendBackward
) -> Callable[[Run], Visible | TileCalls]:
    """Which keys the queries of a kernel call see; with documents, known only at run time. For
    slices it may take several calls."""
    band, places = Visible(op.mask.left, op.mask.right), op.positions
    if not op.mask.documents:
        return lambda run: band
    return lambda run: run.documents.visible(band, places, run.unit, run.executor.backend)


def attend(binder: Compiler, op: ops.Attend) -> BoundOp:
    q, kv, into = part(binder, op.q), part(binder, op.kv), merged_fields(binder, op.into)
    sees, made = visible(binder, op), is_allocated(binder, op.into[0])
    own = op.into[0].buffer if len(op.into) == 1 else None

    def bound(run: Run) -> None:
        keys, backend, scale = kv(run), run.executor.backend, run.executor.scale
        tensors, results = (q(run)["q"], keys["k"], keys["v"]), None
        if not own or made(run):
            target = into(run)
            results = target["out"], target["lse"]
        sink, seen = run.sink_of(op.sinks), sees(run)
        native = {"sink": sink} if sink is not None and backend.capability.sinks else {}
        if isinstance(seen, Visible):
            results = backend.forward(*tensors, scale, seen, into=results, **native)
        else:
            results, native = seen.forward(backend, *tensors, scale, results), {}
        if own and not made(run):
            run.fields[own] = dict(zip(("out", "lse"), results, strict=True))
        if sink is not None and not native:
            merge_parts(*results, [results], sink)

    return bound


def attend_backward(binder: Compiler, op: ops.AttendBackward) -> BoundOp:
    sides, kv = merged_fields(binder, op.sides), part(binder, op.kv)
    dq, dkv = part(binder, op.dq), part(binder, op.dkv)
    dq_made, dkv_made = is_allocated(binder, op.dq), is_allocated(binder, op.dkv)
    sees = visible(binder, op)

    def bound(run: Run) -> None:
        fields, keys, into = sides(run), kv(run), None
        backend, scale = run.executor.backend, run.executor.scale
        deterministic = run.executor.deterministic
        if dq_made(run) or dkv_made(run):
            of_keys = dkv(run)
            into = dq(run)["dq"], of_keys["dk"], of_keys["dv"]
        side = QuerySide(*map(fields.get, ("q", "dout", "lse", "delta", "out")))
        tensors = side, keys["k"], keys["v"]
        seen, how = sees(run), {"into": into, "deterministic": deterministic}
        if isinstance(seen, Visible):
            grads = backend.backward(*tensors, scale, seen, **how)
        else:
            grads = seen.backward(backend, *tensors, scale, **how)
        if into is None:
            run.fields[op.dq.buffer] = {"dq": grads[0]}
            run.fields[op.dkv.buffer] = {"dk": grads[1], "dv": grads[2]}

    return bound


def merge(binder: Compiler, op: ops.Merge) -> BoundOp:
    into, parts = merged_fields(binder, op.into), [part(binder, ref) for ref in op.parts]

    def bound(run: Run) -> None:
        target, found = into(run), [of(run) for of in parts]
        merge_parts(target["out"], target["lse"], [(x["out"], x["lse"]) for x in found])

    return bound


def add(binder: Compiler, op: ops.Add) -> BoundOp:
    into, parts = part(binder, op.into), [part(binder, ref) for ref in op.parts]

    def bound(run: Run) -> None:
        found = [of(run) for of in parts]
        for name, target in into(run).items():
            some = [x[name] for x in found if name in x]
            if not found:
                target.zero_()
            elif len(some) == len(found):
                # torch's own copy takes a third of the CPU time of a Triton launch
                target.copy_(some[0]) if len(some) == 1 else sum_parts(target, some)

    return bound


def delta(binder: Compiler, op: ops.Delta) -> BoundOp:
    side = part(binder, op.side)

    def bound(run: Run) -> None:
        fields = side(run)
        found = fields.get("delta")  # a call with sinks has it
        if found is None:
            found = row_delta(fields["dout"], fields["out"])
        run.fields[op.into.buffer] = {"delta": found}

    return bound


def fill_surrogate_out(binder: Compiler, op: ops.SurrogateOut) -> BoundOp:
    sides = merged_fields(binder, op.sides)

    def bound(run: Run) -> None:
        side = sides(run)
        run.fields[op.into.buffer] = {"out": surrogate_out(side["dout"], side["delta"])}

    return bound


def transfer(binder: Compiler, op: ops.Transfer) -> BoundOp:
    """What no rank needs is not sent. There the receiver has zeros: gradients that are zero, or
    rows that nobody reads, but a kernel may multiply by a weight of 0."""
    every_take = [(take, raw_bytes(binder, take.rows)) for take in op.recvs]
    if op.slot is not None:
        return _slot_transfer(binder, op, every_take)
    every_give = [(give, raw_bytes(binder, give.rows)) for give in op.sends]

    def bound(run: Run) -> Handle:
        gives, takes = _needed(run, every_give), _needed(run, every_take)
        given = [(give.peer, of(run)) for give, of in gives]
        taken = [(take.peer, of(run)) for take, of in takes]
        if run.failure:
            for _, rows in given:
                rows.fill_(_NAN)
        if len(takes) < len(every_take):
            _clear_rest(run, every_take, takes)
        if not (given or taken):
            return run.queues.record()
        return run.executor.transport.send(op.link, op.cargo, given, taken)

    return bound


def _needed[T: (ops.Send, ops.Recv)](
    run: Run, ends: list[tuple[T, Source]]
) -> list[tuple[T, Source]]:
    """Those of the ends of a transfer, each with its rows, that some rank needs. All ranks find the
    same from their slices."""
    if run.documents is None:
        return ends
    return [
        (end, of)
        for end, of in ends
        if end.needed_by is None or run.documents.is_seen(end.needed_by)
    ]


def _clear_rest(
    run: Run, every: list[tuple[ops.Recv, Source]], taken: list[tuple[ops.Recv, Source]]
) -> None:
    """Zero what is not received, on the transfer's own queue."""
    received = {id(of) for _, of in taken}
    for _, of in every:
        if id(of) not in received:
            of(run).zero_()


def _slot_transfer(
    binder: Compiler, op: ops.Transfer, every_take: list[tuple[ops.Recv, Source]]
) -> BoundOp:
    """Ranks of a node read, or are sent, parts of each other's slots."""
    buffer, slot = binder.program.buffers[op.slot.buffer], raw_bytes(binder, op.slot)
    use, number = buffer.use, buffer.number
    every_give = [(give, slot) for give in op.sends]

    def made(run: Run, gives: list[tuple[ops.Send, Source]], takes: list[tuple[ops.Recv, Source]]):
        given = [(give.peer, give.rows.rows.scaled(run.unit).slice) for give, _ in gives]
        taken = [(take.peer, take.remote_rows.rows.scaled(run.unit).slice) for take, _ in takes]
        return run.slots[use].prepare(number, slot(run), given, taken)

    every = cached_view(binder, object(), buffer, lambda run: made(run, every_give, every_take))

    def bound(run: Run) -> Handle:
        gives, takes = _needed(run, every_give), _needed(run, every_take)
        all_are = len(gives) == len(every_give) and len(takes) == len(every_take)
        ends = every(run) if all_are else made(run, gives, takes)
        if run.failure:
            slot(run).fill_(_NAN)
        if len(takes) < len(every_take):
            _clear_rest(run, every_take, takes)
        some = gives or takes
        done = cleared = None if some else run.queues.record()  # before a barrier that others await
        if some or op.pulled:
            into = [of(run) for _, of in takes]
            done = run.slots[use].transfer(number, ends, into, run.queues)
        return done if some else cleared

    return bound


COMPILE: Mapping[type, Callable[[Compiler, Any], BoundOp]] = {
    ops.Copy: copy, ops.Arrange: arrange, ops.Restore: restore,
    ops.ToRanks: to_ranks, ops.FromRanks: from_ranks,
    ops.Fill: fill, ops.Attend: attend, ops.AttendBackward: attend_backward, ops.Merge: merge,
    ops.Add: add, ops.Delta: delta,
    ops.SurrogateOut: fill_surrogate_out, ops.Transfer: transfer,
}  # fmt: skip
