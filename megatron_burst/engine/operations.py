"""Binds operations: a function for each kind, Op -> (Run -> Handle | None).

Binding looks up once what depends on the program alone: which buffer, rows and heads an operation
has, and how it computes. The bound function finds the tensors of a run and launches the work.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_burst.comm.transport import Handle
from megatron_burst.engine.memory import Fields, fields_at
from megatron_burst.engine.run import BoundProgram, Compiler, Run, are_neighbours, of_heads
from megatron_burst.engine.sample_mask import TileCalls
from megatron_burst.kernels.backends import attend_and_raise
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
GetFields = Callable[[Run], Fields]
GetRows = Callable[[Run], Tensor]


# ---- how a run gets the tensors of an operation ----


def ref_fields(compiler: Compiler, ref: Ref) -> GetFields:
    """The fields of a buffer, restricted to the rows and heads of a reference."""
    buffer = compiler.program.buffers[ref.buffer]
    ref, whole = _narrowed(ref, buffer), buffer_fields(compiler, buffer)
    if ref.rows is None and ref.heads is None:
        return whole
    rows = ref.rows and (ref.rows.start, len(ref.rows))
    heads = ref.heads and (ref.heads.start, len(ref.heads))
    axes = [(f.name, *((1, 2) if f.dim else (2, 1))) for f in buffer.fields]

    def narrow(run: Run) -> Fields:
        fields, views = whole(run), {}
        first, count = (rows[0] * run.unit, rows[1] * run.unit) if rows else (0, 0)
        for field, row_axis, head_axis in axes:
            x = fields.get(field)
            if x is None:  # a call omits tensors that no operation reads
                continue
            if count:
                x = x.narrow(row_axis, first, count)
            views[field] = x.narrow(head_axis, *heads) if heads else x
        return views

    return narrow if buffer.space is Space.TEMP else cached_view(compiler, ref, buffer, narrow)


def _narrowed(ref: Ref, buffer: Buffer) -> Ref:
    """The reference, with None for rows or heads that are all of the buffer's."""
    rows, heads = ref.rows, ref.heads
    if rows and len(rows) == buffer.rows:
        rows = None
    if heads and all(len(heads) == field.heads for field in buffer.fields):
        heads = None
    return Ref(ref.buffer, rows, heads)


def buffer_fields(compiler: Compiler, buffer: Buffer) -> GetFields:
    """All fields of a buffer."""
    if buffer.space not in (Space.CALL, Space.TEMP):
        make = lambda run: fields_at(run.bytes_of(buffer), run.layout(buffer).fields)  # noqa: E731
        return cached_view(compiler, Ref(buffer.name), buffer, make)
    name = buffer.name

    def get(run: Run) -> Fields:
        fields = run.fields.get(name)
        return run.make(name) if fields is None else fields

    return get


def cached_view[T](
    compiler: Compiler, key: Hashable, buffer: Buffer, make: Callable[[Run], T]
) -> Callable[[Run], T]:
    """What `make` derives from a buffer, computed once for as long as the buffer's memory lives."""
    name = compiler.name_of(key)

    def get(run: Run) -> T:
        view = run.views.get(name)
        return run.cache_view(name, buffer, make(run)) if view is None else view

    return get


def merged_fields(compiler: Compiler, refs: Sequence[Ref]) -> GetFields:
    """Fields of several references; of two with the same name, that of the first reference."""
    getters = [ref_fields(compiler, ref) for ref in reversed(refs)]
    if len(getters) == 1:
        return getters[0]

    def get_all(run: Run) -> Fields:
        fields: Fields = {}
        for get in getters:
            fields |= get(run)
        return fields

    return get_all


def is_allocated(compiler: Compiler, ref: Ref) -> Callable[[Run], bool]:
    """Whether a buffer has memory: a temp is allocated by the kernel that first writes it."""
    name, is_temp = ref.buffer, compiler.program.buffers[ref.buffer].space is Space.TEMP
    return lambda run: not is_temp or name in run.fields


def raw_bytes(compiler: Compiler, ref: Ref) -> GetRows:
    """What is sent: a whole buffer as bytes, or rows of an interleaved one, uint8 [rows, b, n]."""
    buffer = compiler.program.buffers[ref.buffer]
    if not buffer.interleaved:
        assert ref.rows is None and ref.heads is None
        return cached_view(compiler, (ref, "bytes"), buffer, lambda run: run.bytes_of(buffer))
    rows = ref.rows

    def view(run: Run) -> Tensor:
        whole, unit = run.bytes_of(buffer).view(run.layout(buffer).rows), run.unit
        return whole if rows is None else whole.narrow(0, rows.start * unit, len(rows) * unit)

    return cached_view(compiler, (ref, "bytes"), buffer, view)


# ---- copies ----


def copy(compiler: Compiler, op: ops.Copy) -> BoundOp:
    if len(op.sources) == 1 and _same_rows(compiler, op.sources[0], op.target):
        rows, target_rows = raw_bytes(compiler, op.sources[0]), raw_bytes(compiler, op.target)
        return lambda run: target_rows(run).copy_(rows(run))
    sources, targets = merged_fields(compiler, op.sources), ref_fields(compiler, op.target)

    def bound(run: Run) -> None:
        target = targets(run)
        for name, x in sources(run).items():
            if name in target:
                copy_rows(target[name], x)

    return bound


def _same_rows(compiler: Compiler, source: Ref, target: Ref) -> bool:
    """Whether rows of both have the same bytes: all heads of the same interleaved fields."""
    first, second = (compiler.program.buffers[ref.buffer] for ref in (source, target))
    all_heads = source.heads is None and target.heads is None
    same = first.fields == second.fields and first.interleaved and second.interleaved
    return same and all_heads


def arrange(compiler: Compiler, op: ops.Arrange) -> BoundOp:
    select = _selecting(compiler, op)
    return lambda run: select(run, run.sample_mask.arrange_index(op.src_blocks, op.dst_chunks))


def restore(compiler: Compiler, op: ops.Restore) -> BoundOp:
    blocks, chunks = op.src_blocks, op.dst_chunks
    without_copies = sorted(chunks) == sorted(chunk for block in blocks for chunk in block)
    if without_copies and _same_rows(compiler, op.source, op.target):
        select = _selecting(compiler, op)
        return lambda run: select(run, run.sample_mask.restore_index(blocks, chunks)[0])
    sources, targets = ref_fields(compiler, op.source), ref_fields(compiler, op.target)

    def bound(run: Run) -> None:
        copies, source = run.sample_mask.restore_index(blocks, chunks), sources(run)
        for name, target in targets(run).items():
            sum_rows(target, source[name], copies)

    return bound


def _selecting(compiler: Compiler, op: ops.Arrange) -> Callable[[Run, Tensor], None]:
    """Copies rows of the source by an index: as raw bytes, or field by field."""
    if _same_rows(compiler, op.source, op.target):
        rows, target_rows = raw_bytes(compiler, op.source), raw_bytes(compiler, op.target)

        def select_bytes(run: Run, index: Tensor) -> None:
            torch.index_select(_wide(rows(run)), 0, index, out=_wide(target_rows(run)))

        return select_bytes
    sources, targets = ref_fields(compiler, op.source), ref_fields(compiler, op.target)

    def select_fields(run: Run, index: Tensor) -> None:
        source = sources(run)
        for name, target in targets(run).items():
            torch.index_select(source[name], 1, index, out=target)

    return select_fields


def _wide(rows: Tensor) -> Tensor:
    """Bytes viewed as the widest integers that divide a row."""
    integers, width = (torch.int64, torch.int32, torch.int16, torch.uint8), rows.shape[2]
    return rows.view(next(dtype for dtype in integers if width % dtype.itemsize == 0))


def to_ranks(compiler: Compiler, op: ops.ToRanks) -> BoundOp:
    sources, targets = merged_fields(compiler, op.sources), ref_fields(compiler, op.target)

    def bound(run: Run) -> None:
        source = sources(run)
        for name, target in targets(run).items():
            _copy_shards(_by_rank(target, op), _by_heads(source[name], op))

    return bound


def from_ranks(compiler: Compiler, op: ops.FromRanks) -> BoundOp:
    sources, targets = ref_fields(compiler, op.source), merged_fields(compiler, op.targets)

    def bound(run: Run) -> None:
        received = sources(run)
        for name, x in targets(run).items():
            target, source = _by_heads(x, op), _by_rank(received[name], op)
            if target.shape == source.shape:
                _copy_shards(target, source)
            else:
                sum_parts(x, [part.transpose(1, 2).flatten(2, 4) for part in source.unbind(2)])

    return bound


def _copy_shards(target: Tensor, source: Tensor) -> None:
    """target <- source, both as `_by_rank` has them."""
    if target.dim() < 7 or target.shape[2] > 1:  # statistics, or copies of KV heads
        target.copy_(source)
        return
    # a rank's heads side by side
    shards = target.view(*target.shape[:2], target.shape[3], -1, target.shape[-1])
    for target_rows, rows in zip(shards, source.squeeze(2).flatten(3, 4), strict=True):
        copy_rows(target_rows, rows)


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
    """`_by_rank` of a tensor with the heads of several ranks; K and V have no copies of heads."""
    axis, groups, shape = (2 if x.dim() == 4 else 1), op.ranks // op.copies, x.shape
    once = groups * op.heads_kv
    copies = 1 if shape[axis] == once else op.copies
    split = groups, op.heads_kv, copies, shape[axis] // (once * copies)
    x = x.view(*shape[:axis], *split, *shape[axis + 1 :])
    return x.permute((0, 2, 4, 1, 3, 5, 6) if axis == 2 else (0, 1, 3, 2, 4, 5))


def fill(compiler: Compiler, op: ops.Fill) -> BoundOp:
    target = ref_fields(compiler, op.target)

    def bound(run: Run) -> None:
        for name, x in target(run).items():
            x.fill_(-torch.inf if name == "lse" else 0)

    return bound


# ---- kernels ----


def visible(
    compiler: Compiler, op: ops.Attend | ops.AttendBackward
) -> Callable[[Run], Visible | TileCalls]:
    """Which keys the queries of a tile see. With documents it is known only at run time; slices may
    take several kernel calls."""
    band, positions = Visible(op.mask.left, op.mask.right), op.positions
    if not op.mask.documents:
        return lambda run: band
    return lambda run: run.sample_mask.visible(band, positions, run.unit, run.executor.backend)


def attend(compiler: Compiler, op: ops.Attend) -> BoundOp:
    q, kv = ref_fields(compiler, op.q), ref_fields(compiler, op.kv)
    into, has_memory = merged_fields(compiler, op.into), is_allocated(compiler, op.into[0])
    temp = op.into[0].buffer if len(op.into) == 1 else None
    get_visible, heads = visible(compiler, op), op.heads

    def bound(run: Run) -> None:
        keys, executor = kv(run), run.executor
        tensors, results = (q(run)["q"], keys["k"], keys["v"]), None
        if not temp or has_memory(run):
            target = into(run)
            results = target["out"], target["lse"]
        sink = of_heads(run.sink, heads) if op.joins_sinks else None
        largest = of_heads(run.largest, heads)
        results = _attend_tile(executor, tensors, get_visible(run), results, sink, largest)
        if largest is not None and not are_neighbours(heads):
            for head, score in zip(heads, largest, strict=True):
                run.largest[head] = score
        if temp and not has_memory(run):
            run.fields[temp] = dict(zip(("out", "lse"), results, strict=True))

    return bound


def _attend_tile(
    executor: BoundProgram, tensors: tuple[Tensor, Tensor, Tensor], seen: Visible | TileCalls,
    into: tuple[Tensor, Tensor] | None, sink: Tensor | None, largest: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of one tile's q, k and v, by one kernel call or several."""
    backend, scale, options = executor.backend, executor.scale, dict(executor.score_options)
    if not isinstance(seen, Visible):
        results = seen.forward(backend, *tensors, scale, into, largest=largest, **options)
    else:
        if sink is not None and backend.capability.sinks:
            options["sink"], sink = sink, None
        forward = attend_and_raise(backend, largest)
        results = forward(*tensors, scale, seen, into=into, **options)
    if sink is not None:
        merge_parts(*results, [results], sink)
    return results


def attend_backward(compiler: Compiler, op: ops.AttendBackward) -> BoundOp:
    sides, kv = merged_fields(compiler, op.sides), ref_fields(compiler, op.kv)
    dq, dkv = ref_fields(compiler, op.dq), ref_fields(compiler, op.dkv)
    has_dq, has_dkv = is_allocated(compiler, op.dq), is_allocated(compiler, op.dkv)
    get_visible = visible(compiler, op)

    def bound(run: Run) -> None:
        fields, keys, into = sides(run), kv(run), None
        backend, scale = run.executor.backend, run.executor.scale
        if has_dq(run) or has_dkv(run):
            key_grads = dkv(run)
            into = dq(run)["dq"], key_grads["dk"], key_grads["dv"]
        side = QuerySide(*map(fields.get, ("q", "dout", "lse", "delta", "out")))
        tensors = side, keys["k"], keys["v"]
        seen, options = get_visible(run), {"deterministic": run.executor.deterministic}
        options |= run.executor.score_options
        if isinstance(seen, Visible):
            grads = backend.backward(*tensors, scale, seen, into=into, **options)
        else:
            grads = seen.backward(backend, *tensors, scale, into=into, **options)
        if into is None:
            run.fields[op.dq.buffer] = {"dq": grads[0]}
            run.fields[op.dkv.buffer] = {"dk": grads[1], "dv": grads[2]}

    return bound


def merge(compiler: Compiler, op: ops.Merge) -> BoundOp:
    into, parts = merged_fields(compiler, op.into), [ref_fields(compiler, r) for r in op.parts]

    def bound(run: Run) -> None:
        target, sources = into(run), [get(run) for get in parts]
        merge_parts(target["out"], target["lse"], [(x["out"], x["lse"]) for x in sources])

    return bound


def add(compiler: Compiler, op: ops.Add) -> BoundOp:
    into, parts = ref_fields(compiler, op.into), [ref_fields(compiler, ref) for ref in op.parts]

    def bound(run: Run) -> None:
        sources = [get(run) for get in parts]
        for name, target in into(run).items():
            addends = [x[name] for x in sources if name in x]
            if not sources:
                target.zero_()
            elif len(addends) == len(sources):
                # torch's own copy takes a third of the CPU time of a Triton launch
                target.copy_(addends[0]) if len(addends) == 1 else sum_parts(target, addends)

    return bound


def delta(compiler: Compiler, op: ops.Delta) -> BoundOp:
    side = ref_fields(compiler, op.side)

    def bound(run: Run) -> None:
        fields = side(run)
        rows = fields.get("delta")  # a call with sinks has computed it
        if rows is None:
            rows = row_delta(fields["dout"], fields["out"])
        run.fields[op.into.buffer] = {"delta": rows}

    return bound


def fill_surrogate_out(compiler: Compiler, op: ops.SurrogateOut) -> BoundOp:
    sides = merged_fields(compiler, op.sides)

    def bound(run: Run) -> None:
        side = sides(run)
        run.fields[op.into.buffer] = {"out": surrogate_out(side["dout"], side["delta"])}

    return bound


# ---- transfers ----


def transfer(compiler: Compiler, op: ops.Transfer) -> BoundOp:
    """Rows that no rank needs are not sent. Their receiver zeroes them: they are gradients that are
    zero, or rows that no query sees, but that a kernel may multiply by a weight of 0."""
    recvs = [(recv, raw_bytes(compiler, recv.rows)) for recv in op.recvs]
    if op.slot is not None:
        return _slot_transfer(compiler, op, recvs)
    sends = [(send, raw_bytes(compiler, send.rows)) for send in op.sends]

    def bound(run: Run) -> Handle:
        needed_recvs = _needed(run, recvs)
        outgoing = [(send.peer, rows(run)) for send, rows in _needed(run, sends)]
        incoming = [(recv.peer, rows(run)) for recv, rows in needed_recvs]
        if run.failure:
            for _, tensor in outgoing:
                tensor.fill_(_NAN)
        if len(needed_recvs) < len(recvs):
            _zero_unneeded(run, recvs, needed_recvs)
        if not (outgoing or incoming):
            return run.queues.record()
        return run.executor.transport.send(op.link, op.cargo, outgoing, incoming)

    return bound


def _needed[T: (ops.Send, ops.Recv)](
    run: Run, endpoints: list[tuple[T, GetRows]]
) -> list[tuple[T, GetRows]]:
    """The sends or receives whose rows some rank needs; all ranks know it from their slices."""
    if run.sample_mask is None:
        return endpoints
    is_seen = run.sample_mask.is_seen
    return [(end, rows) for end, rows in endpoints if not end.needed_by or is_seen(end.needed_by)]


def _zero_unneeded(
    run: Run, recvs: list[tuple[ops.Recv, GetRows]], needed: list[tuple[ops.Recv, GetRows]]
) -> None:
    """Zero what is not received, on the transfer's own queue."""
    for recv, rows in recvs:
        if (recv, rows) not in needed:
            rows(run).zero_()


def _slot_transfer(
    compiler: Compiler, op: ops.Transfer, recvs: list[tuple[ops.Recv, GetRows]]
) -> BoundOp:
    """Ranks of a node read, or are sent, parts of each other's slots."""
    buffer, slot = compiler.program.buffers[op.slot.buffer], raw_bytes(compiler, op.slot)
    use, number = buffer.use, buffer.number
    sends = [(send, slot) for send in op.sends]

    def prepare(run: Run, sends: list, recvs: list) -> Any:
        sent = [(send.peer, send.rows.rows.scaled(run.unit).slice) for send, _ in sends]
        read = [(recv.peer, recv.remote_rows.rows.scaled(run.unit).slice) for recv, _ in recvs]
        return run.slots[use].prepare(number, slot(run), sent, read)

    # by identity: equal operations must not share what `prepare` returns, which holds an event
    key = "slot transfer", id(op)
    prepared_whole = cached_view(compiler, key, buffer, lambda run: prepare(run, sends, recvs))

    def bound(run: Run) -> Handle:
        needed_sends, needed_recvs = _needed(run, sends), _needed(run, recvs)
        is_whole = len(needed_sends) == len(sends) and len(needed_recvs) == len(recvs)
        prepared = prepared_whole(run) if is_whole else prepare(run, needed_sends, needed_recvs)
        if run.failure:
            slot(run).fill_(_NAN)
        if len(needed_recvs) < len(recvs):
            _zero_unneeded(run, recvs, needed_recvs)
        if needed_sends or needed_recvs:
            targets = [rows(run) for _, rows in needed_recvs]
            return run.slots[use].transfer(number, prepared, targets, run.queues)
        zeroed = run.queues.record()  # before a barrier that other ranks wait for
        if op.pulled:
            run.slots[use].transfer(number, prepared, [], run.queues)
        return zeroed

    return bound


COMPILE: Mapping[type, Callable[[Compiler, Any], BoundOp]] = {
    ops.Copy: copy, ops.Arrange: arrange, ops.Restore: restore,
    ops.ToRanks: to_ranks, ops.FromRanks: from_ranks,
    ops.Fill: fill, ops.Attend: attend, ops.AttendBackward: attend_backward, ops.Merge: merge,
    ops.Add: add, ops.Delta: delta,
    ops.SurrogateOut: fill_surrogate_out, ops.Transfer: transfer,
}  # fmt: skip
