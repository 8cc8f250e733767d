"""Memory of attention calls besides inputs and outputs: the group's buffers, and what a backward
pass and its kernel allocate. Not what layers keep (`job/memory.py`)."""

from collections.abc import Iterable

from megatron_burst.schedule.mask import Tile
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import (
    AttendBackward,
    Buffer,
    Program,
    Ref,
    Space,
    uses_of,
)
from megatron_burst.schedule.spec import AttentionShape, Dtype
from megatron_burst.tools.simulate.kernels import Parts


def kept_bytes(programs: Iterable[Program]) -> int:
    """Bytes of the group's buffers, shared by all of these programs: slots, as many and as large
    as any of them needs for a use, and one memory as large as all other buffers of the most
    demanding one."""
    slots: dict[str, tuple[int, int]] = {}
    others = 0
    for program in programs:
        shared = 0
        sizes = ((buffer, _size(program, buffer)) for buffer in program.buffers.values())
        for (home, use), (count, size) in uses_of(sizes).items():
            if home is Space.SLOT:
                most, largest = slots.get(use, (0, 0))
                slots[use] = max(most, count), max(largest, size)
            else:
                shared += count * size
        others = max(others, shared)
    return sum(count * size for count, size in slots.values()) + others


def passing_bytes(program: Program, backend: str) -> int:
    """Peak bytes of a backward pass itself: the extra width of gradients summed in place, parts not
    yet added up, and the workspace of the kernel, FlashAttention-4's or cuDNN's.

    The most parts and the largest kernel are added, though they may not coincide: measured peaks
    are as high, for an unknown reason.
    """
    frees, sizes, parts, kernel = order(program).frees, Parts(program), 0, 0
    read = {ref.buffer for op in program.ops for ref in op.reads}
    alive: dict[str, int] = {}
    for op, freed in zip(program.ops, frees, strict=True):
        for ref in op.writes:
            buffer = program.buffers[ref.buffer]
            if buffer.space is Space.TEMP and ref.buffer in read:  # else it is a result
                alive[ref.buffer] = _size(program, buffer)
        parts = max(parts, sum(alive.values()))
        if isinstance(op, AttendBackward):
            tile = sizes.tile_of(op)
            own = _cudnn_bytes(program, op, *tile) if backend == "cudnn" else _workspace(*tile)
            kernel = max(kernel, own)
        for name in freed:
            alive.pop(name, None)
    return _wider_bytes(program) + parts + kernel


def _wider_bytes(program: Program) -> int:
    """Extra bytes of sums that are returned in the inputs' dtype."""
    wide, narrow = program.widths[Dtype.SUM], program.widths[Dtype.INPUT]
    results = (buffer for buffer in program.buffers.values() if buffer.space is Space.CALL)
    sums = (buffer for buffer in results if all(f.dtype is Dtype.SUM for f in buffer.fields))
    return sum(_size(program, buffer) * (wide - narrow) // wide for buffer in sums)


def _size(program: Program, buffer: Buffer) -> int:
    return program.num_bytes(Ref(buffer.name))


def _workspace(tile: Tile, shape: AttentionShape) -> int:
    """Bytes of a kernel's own in backward: float32 lse, delta, dq; with grouped heads dk and dv."""
    sums = len(tile.q) * shape.heads_q * (shape.dim_qk + 2)
    if shape.heads_q != shape.heads_kv:
        sums += len(tile.kv) * shape.heads_kv * (shape.dim_qk + shape.dim_v)
    return shape.batch * sums * 4


def _cudnn_bytes(program: Program, op: AttendBackward, tile: Tile, shape: AttentionShape) -> int:
    """The same of cuDNN's, and of copies: it returns new tensors, which are then copied to the
    group's buffers, and dO from another rank is copied, so that it lies in memory as O does."""
    own = cudnn_workspace(shape, len(tile.q), len(tile.kv))
    beside = Space.CALL, Space.TEMP
    written = {ref.buffer: ref for ref in op.writes}
    copied = sum(
        program.num_bytes(ref)
        for name, ref in written.items()
        if program.buffers[name].space not in beside
    )
    came = (program.buffers[ref.buffer] for ref in op.sides)
    douts = sum(
        field.elements * program.widths[field.dtype]
        for buffer in came
        for field in buffer.fields
        if field.name == "dout" and buffer.space not in beside
    )
    return own + shape.batch * len(tile.q) * douts + copied


def cudnn_workspace(shape: AttentionShape, rows: int, keys: int) -> int:
    """Bytes of cuDNN's own in backward: lse, delta and dq in float32; with grouped heads dk and dv
    of each query head in the inputs' dtype."""
    own = rows * (shape.dim_qk + 2) * 4
    if shape.heads_q != shape.heads_kv:
        own += keys * (shape.dim_qk + shape.dim_v) * shape.itemsize
    return shape.batch * shape.heads_q * own
