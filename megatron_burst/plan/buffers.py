"""What an attention call needs in memory beside its inputs and outputs."""

from collections.abc import Iterable
from functools import lru_cache

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.schedule.call import Direction
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import (
    NUMBERED,
    AttendBackward,
    Buffer,
    Dtype,
    Home,
    Program,
    Ref,
)

_MOST_NODES = 4  # more of them need no more buffers; a test compares


@lru_cache(maxsize=4096)
def buffer_bytes(call: AttentionCall) -> int:
    """Memory that a rank needs beside q, k, v, out and their gradients, in the backward pass.

    What its group keeps from call to call, and what there is at the fullest moment of backward.
    The forward pass needs less, except for its output in float32 where results are merged.
    """
    if call.arranged.inter_size > _MOST_NODES:
        return buffer_bytes(call.resolved(Direction.BACKWARD).on_nodes(_MOST_NODES))
    programs = [call.program(0, direction) for direction in Direction]
    return kept_bytes(programs) + passing_bytes(programs[-1])


def kept_bytes(programs: Iterable[Program]) -> int:
    """Of buffers of the group, which serve all of these programs: as many, and as large, as the
    one wants that wants most."""
    uses: dict[tuple[Home, str], tuple[int, int]] = {}
    for program in programs:
        for buffer in program.buffers.values():
            if buffer.home is Home.HOP or buffer.home in NUMBERED:
                count = buffer.number + 1 if buffer.home is Home.HOP else buffer.count
                most, size = uses.get((buffer.home, buffer.use), (0, 0))
                uses[buffer.home, buffer.use] = max(most, count), max(size, _size(program, buffer))
    return sum(count * size for count, size in uses.values())


def left_bytes(program: Program) -> int:
    """Of what forward leaves for backward."""
    return sum(_size(program, program.buffers[name]) for name in program.left)


def passing_bytes(program: Program) -> int:
    """Of what a backward pass itself has at its fullest: what gradients that are summed where they
    are returned are wider than those that are, parts that nobody has added up yet, and what a
    kernel needs for its own.

    The most parts and the largest kernel count together, though one may follow the other: the
    peaks that were measured are as high, for a reason that is not known.
    """
    frees, parts, kernel = order(program).frees, 0, 0
    read = {ref.buffer for op in program.ops for ref in op.reads}
    alive: dict[str, int] = {}
    for op, freed in zip(program.ops, frees, strict=True):
        for ref in op.writes:
            buffer = program.buffers[ref.buffer]
            if buffer.home is Home.PART and ref.buffer in read:  # else it is a result
                alive[ref.buffer] = _size(program, buffer)
        parts = max(parts, sum(alive.values()))
        if isinstance(op, AttendBackward):
            kernel = max(kernel, _kernel_bytes(program, op))
        for name in freed:
            alive.pop(name, None)
    return _wider_bytes(program) + parts + kernel


def _wider_bytes(program: Program) -> int:
    """Of sums that are returned in the inputs' dtype, beside what is returned."""
    wide, narrow = program.widths[Dtype.SUM], program.widths[Dtype.INPUT]
    sums = [
        buffer
        for buffer in program.buffers.values()
        if buffer.home is Home.CALL and all(f.dtype is Dtype.SUM for f in buffer.fields)
    ]
    return sum(_size(program, buffer) * (wide - narrow) // wide for buffer in sums)


def _size(program: Program, buffer: Buffer) -> int:
    return program.num_bytes(Ref(buffer.name))


def _kernel_bytes(program: Program, op: AttendBackward) -> int:
    """What a backward kernel needs: lse, delta and dq in float32; with grouped heads dk and dv."""
    side = next(ref for ref in op.sides if _heads(program, ref, "q"))
    shape = {f.name: f for f in program.buffers[op.kv.buffer].fields}
    heads_q, heads_kv = _heads(program, side, "q"), _heads(program, op.kv, "k")
    rows_q, rows_kv = (program.buffers[ref.buffer].rows if ref.rows is None else len(ref.rows)
                       for ref in (side, op.kv))  # fmt: skip
    sums = rows_q * heads_q * (shape["k"].dim + 2)
    if heads_q != heads_kv:
        sums += rows_kv * heads_kv * (shape["k"].dim + shape["v"].dim)
    return program.batch * sums * 4


def _heads(program: Program, ref: Ref, name: str) -> int:
    """Heads of a field of a part of a buffer; 0 if it has no such field."""
    for field in program.buffers[ref.buffer].fields:
        if field.name == name:
            return len(ref.heads) if ref.heads else field.heads
    return 0
