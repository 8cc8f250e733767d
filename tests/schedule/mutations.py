"""Programs with one fault, on rank 1, which no check may pass.

Each function yields the fault, the passes, and which operation waits for which; None: what `order`
derives from the faulty program, so that nothing is unordered and the fault shows in what is
computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_burst.schedule.mask import Mask, Span
from megatron_burst.schedule.order import Order
from megatron_burst.schedule.program import (
    Add,
    Attend,
    AttendBackward,
    Merge,
    Op,
    Program,
    Ref,
    Space,
    Stream,
    ToRanks,
    Transfer,
)

Passes = Sequence[Sequence[Program]]
Orders = Sequence[Sequence[Order]]
Mutant = tuple[str, Passes, Orders | None]
RANK = 1


def _put(every: Sequence, turn: int, new) -> list[list]:
    """The passes with another program, or order, for the rank."""
    copies = [list(ranks) for ranks in every]
    copies[turn][RANK] = new
    return copies


def _without(items: tuple, item) -> tuple:
    return tuple(other for other in items if other != item)


def _ops(passes: Passes, kinds=object) -> Iterator[tuple[int, int, Op]]:
    for turn, programs in enumerate(passes):
        for index, op in enumerate(programs[RANK].ops):
            if isinstance(op, kinds):
                yield turn, index, op


def _with_ops(passes: Passes, turn: int, index: int, *new: Op) -> list[list]:
    """The passes with other operations replacing one."""
    program = passes[turn][RANK]
    ops = (*program.ops[:index], *new, *program.ops[index + 1 :])
    return _put(passes, turn, replace(program, ops=ops))


def _opens_behind(program: Program, index: int, other: int) -> bool:
    """Whether heads are packed into a pulled slot, which orders the two already: a slot opens with
    the barrier of the round before it, and that came behind the other, a kernel's or a copy's."""
    op, buffers = program.ops[index], program.buffers
    if not isinstance(op, ToRanks) or isinstance(program.ops[other], Transfer):
        return False
    use = buffers[op.target.buffer].use
    barriers = [
        place for place, op in enumerate(program.ops[:index])
        if isinstance(op, Transfer) and op.pulled and buffers[op.slot.buffer].use == use
    ]  # fmt: skip
    return bool(barriers) and other < barriers[-1]


def no_wait(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, ranks in enumerate(orders):
        claim = ranks[RANK]
        for index, waits in enumerate(claim.waits):
            for other in waits:
                if _opens_behind(passes[turn][RANK], index, other):
                    continue
                less = list(claim.waits)
                less[index] = _without(waits, other)
                new = replace(claim, waits=tuple(less))
                yield f"{turn}:{index} without {other}", passes, _put(orders, turn, new)
        for other in claim.joins:
            new = replace(claim, joins=_without(claim.joins, other))
            yield f"{turn}: end without {other}", passes, _put(orders, turn, new)


def no_operation(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, index, _ in _ops(passes):
        yield f"{turn}: without {index}", _with_ops(passes, turn, index), None


def summed_twice(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, index, op in _ops(passes, (Add, Merge)):
        into = op.into if isinstance(op, Merge) else (op.into,)
        if set(into) & set(op.parts):
            yield f"{turn}: {index} twice", _with_ops(passes, turn, index, op, op), None


def no_part(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, index, op in _ops(passes, (Add, Merge)):
        for part in op.parts:
            if passes[turn][RANK].buffers[part.buffer].space is Space.TEMP:
                new = replace(op, parts=_without(op.parts, part))
                yield f"{turn}:{index} less {part}", _with_ops(passes, turn, index, new), None


def swapped_transfers(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    """Swap two transfers of one communicator that follow each other."""
    for turn, first, op in _ops(passes, Transfer):
        program = passes[turn][RANK]
        later = [index for t, index, other in _ops(passes, Transfer)
                 if t == turn and index > first
                 and (other.link, other.cargo) == (op.link, op.cargo)][:1]  # fmt: skip
        for second in later:
            ops = list(program.ops)
            ops[first], ops[second] = ops[second], ops[first]
            new = replace(program, ops=tuple(ops))
            yield f"{turn}: {first} for {second}", _put(passes, turn, new), None


def early_reuse(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    """Give a hop buffer the memory of another one."""
    for turn, programs in enumerate(passes):
        program = programs[RANK]
        for name, buffer in program.buffers.items():
            if buffer.space is Space.POOL and buffer.number:
                moved = replace(buffer, number=buffer.number - 1)
                new = replace(program, buffers={**program.buffers, name: moved})
                yield f"{turn}: {name} at {moved.number}", _put(passes, turn, new), orders


def _shorter(program: Program, ref: Ref) -> Iterator[Ref]:
    """The buffer with other rows."""
    rows = ref.rows or Span(0, program.buffers[ref.buffer].rows)
    if rows.start:
        yield replace(ref, rows=rows.shifted(-1))
    if len(rows) > 1:
        yield replace(ref, rows=Span(rows.start, rows.stop - 1))


def wrong_rows(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, index, op in _ops(passes):
        for name in ("q", "kv", "dq", "dkv", "into", "target"):
            ref = getattr(op, name, None)
            for other in _shorter(passes[turn][RANK], ref) if isinstance(ref, Ref) else ():
                new = replace(op, **{name: other})
                yield f"{turn}:{index} {name} {other}", _with_ops(passes, turn, index, new), None


def wrong_message(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, index, op in _ops(passes, Transfer):
        for number, take in enumerate(op.recvs):
            for name in ("rows", "remote_rows"):
                ref = getattr(take, name)
                if ref.rows is None:
                    continue
                moved = replace(ref, rows=ref.rows.shifted(-1 if ref.rows.start else 1))
                takes = list(op.recvs)
                takes[number] = replace(take, **{name: moved})
                new = replace(op, recvs=tuple(takes))
                yield f"{turn}:{index} takes {moved}", _with_ops(passes, turn, index, new), None


def wrong_mask(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    for turn, index, op in _ops(passes, (Attend, AttendBackward)):
        q = op.q if isinstance(op, Attend) else op.sides[0]
        rows = len(q.rows) if q.rows else passes[turn][RANK].buffers[q.buffer].rows
        if rows > 1:  # a single row sees all keys either way
            new = replace(op, mask=Mask.FULL if op.mask.causal else Mask.CAUSAL)
            yield f"{turn}:{index} {new.mask}", _with_ops(passes, turn, index, new), None


def wrong_sinks(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    """Let sinks join twice or never, and those and the largest scores be of other heads."""
    for turn, index, op in _ops(passes, Attend):
        others = tuple(head + 1 for head in op.heads)
        for new in (replace(op, joins_sinks=not op.joins_sinks), replace(op, heads=others)):
            yield f"{turn}:{index} sinks {new.heads}", _with_ops(passes, turn, index, new), None


def freed_part(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    """Free a part one operation before its last use."""
    for turn, ranks in enumerate(orders):
        claim, ops = ranks[RANK], passes[turn][RANK].ops
        for index, names in enumerate(claim.frees):
            for name in names:
                uses = [i for i, op in enumerate(ops)
                        if name in [ref.buffer for ref in (*op.reads, *op.writes)]]  # fmt: skip
                frees = list(claim.frees)
                frees[index] = _without(names, name)
                frees[uses[-1] - 1] = (*frees[uses[-1] - 1], name)
                new = replace(claim, frees=tuple(frees))
                yield f"{turn}: {name} after {uses[-1] - 1}", passes, _put(orders, turn, new)


def part_beside(passes: Passes, orders: Orders) -> Iterator[Mutant]:
    """Write a part on a stream other than the one that allocates it."""
    for turn, index, op in _ops(passes):
        homes = {passes[turn][RANK].buffers[ref.buffer].space for ref in op.writes}
        if Space.TEMP in homes:
            new = replace(op, stream=Stream.SIDE)
            yield f"{turn}: {index} beside", _with_ops(passes, turn, index, new), None


MUTATIONS = (
    no_wait, no_operation, summed_twice, no_part, swapped_transfers, early_reuse, wrong_rows,
    wrong_message, wrong_mask, wrong_sinks, freed_part, part_beside,
)  # fmt: skip
