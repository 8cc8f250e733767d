"""What our Triton kernels share: tiles, bands, block sizes (not on the reading path).

An operand is (tensor, stride of b, stride of n, stride of h), for a statistic [b, h, n]
(tensor, stride of b, stride of h, stride of n). Tensors may have more than 2^31 elements, so a
tile's start is in int64, offsets inside it in int32.

Head dimensions that are not a power of two are split into two parts of `WIDTH` and `REST` columns,
128 + 64 for 192, or padded with zeros.

A block has "own" rows i (of queries or keys); "others" are the rows j of the other side. i and j
see each other if i + low <= j <= i + high, inside their segment or part. All count from the first
row of the tensors.

Timing candidates at the first call, as `triton.autotune` does, may choose differently on each
rank, and then gradients differ in their last bits. `benchmarks/kernels.py --sweep` finds entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_burst.kernels.masks.block_lists import lists_of
from megatron_burst.kernels.visible import Visible

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Sizes that vary between calls: kernels are not specialized on them (1, multiples of 16).
VARYING = [
    "n_q", "n_k", "left", "right", "count", "heads", "heads_kv", "group", "all_heads", "together",
]  # fmt: skip
_L2_SHARE = 0.5  # of the cache, for data that a section of heads rereads


def operand(x: Tensor) -> tuple:
    """A tensor [b, n, h, d] or a statistic [b, h, n] as kernels take it.

    The stride of an axis of size 1 is left out: its arbitrary value would recompile kernels.
    """
    steps = [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return x, *steps[:3]


def box(x: Tensor, rows: int, wanted: bool) -> TensorDescriptor | None:
    """TMA descriptor for blocks [rows, d] of a tensor [b, n, h, d]; None if TMA cannot load them.

    It describes a matrix whose rows hold all heads, and all sequences of a batch if these lie
    between rows, as in "sbhd". TMA fills rows after the last with zeros, but not columns after a
    head's last, so the head dimension must be a power of two. It reads units of 16 bytes.
    """
    _, *steps = operand(x)
    batch, num_rows, heads, dim = x.shape
    span = (batch - 1) * steps[0] + (heads - 1) * steps[2] + dim
    even = all(step * x.itemsize % 16 == 0 for step in steps) and x.data_ptr() % 16 == 0
    in_rows = num_rows == 1 or span <= steps[1]
    if not (wanted and even and in_rows and dim == padded(dim) and x.numel()):
        return None
    return TensorDescriptor(x, [num_rows, span], [steps[1] or span, 1], [rows, dim])


def statistics_box(x: Tensor, rows: int, wanted: bool) -> TensorDescriptor | None:
    """The same for blocks [1, rows] of statistics [b * h, n] without gaps.

    Blocks must begin at a multiple of 16 bytes, so packed rows cannot use it.
    """
    if not wanted or not x.numel():
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows])


def columns_of(dim_qk: int, dim_v: int) -> dict[str, int]:
    """Head dimensions, and the columns that they take, as constants of kernels."""
    width, rest = padded(dim_qk), 0
    half = width // 2
    if half >= 16 and half + padded(dim_qk - half) < width:
        width, rest = half, padded(dim_qk - half)
    return dict(DIM_QK=dim_qk, DIM_V=dim_v, WIDTH=width, REST=rest, WIDTH_V=padded(dim_v))


def padded(dim: int) -> int:
    """The columns that a head dimension takes: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))


def heads_together(x: Tensor, num_bytes: int) -> int:
    """How many heads, of which kernels read `num_bytes` each, fit the L2 cache together."""
    if not x.is_cuda:
        return 1
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    return max(1, int(cache * _L2_SHARE) // max(1, num_bytes))


@triton.jit
def tile_of_program(blocks, heads, together, LAST_FIRST: tl.constexpr):
    """(block of rows, head): heads in sections that fit the L2 cache, longest causal blocks first.

    A section's heads all do one block before any does the next, so that the last programs are the
    shortest.
    """
    section = tl.program_id(0) // (together * blocks)
    within = tl.program_id(0) % (together * blocks)
    here = tl.minimum(together, heads - section * together)
    block = within // here
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, section * together + within % here


@triton.jit
def _elements(x, batch, head, first, AT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [ROWS, WIDTH] into an operand, starting at a row and a column."""
    start = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[3]
    start += tl.cast(first, tl.int64) * x[2]
    return start + tl.arange(0, ROWS)[:, None] * x[2] + (AT + tl.arange(0, WIDTH))[None, :]


@triton.jit
def load_rows(
    x, box, batch, head, first, length, AT: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] of an operand, zeros beyond its columns and, unless INSIDE, beyond its rows."""
    if box is not None:
        return box.load([first, batch * x[1] + head * x[3]])
    pointers = _elements(x, batch, head, first, AT, ROWS, WIDTH)
    columns = (AT + tl.arange(0, WIDTH) < DIM)[None, :]
    rows = (first + tl.arange(0, ROWS) < length)[:, None]
    if INSIDE and AT + WIDTH <= DIM:
        return tl.load(pointers)
    elif INSIDE:
        return tl.load(pointers, mask=columns, other=0.0)
    elif AT + WIDTH <= DIM:
        return tl.load(pointers, mask=rows, other=0.0)
    else:
        return tl.load(pointers, mask=rows & columns, other=0.0)


@triton.jit
def store_rows(
    x, values, batch, head, first, length, AT: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store [ROWS, WIDTH], rounded to the operand's dtype, within its rows and columns."""
    inside = (first + tl.arange(0, ROWS) < length)[:, None]
    inside = inside & (AT + tl.arange(0, WIDTH) < DIM)[None, :]
    pointers = _elements(x, batch, head, first, AT, ROWS, WIDTH)
    tl.store(pointers, values.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def statistics(x, batch, head, first, ROWS: tl.constexpr):
    """Pointers [ROWS] into a statistic."""
    start = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[2]
    start += tl.cast(first, tl.int64) * x[3]
    return start + tl.arange(0, ROWS) * x[3]


def bounds_of(visible: Visible, rows: int, keys: int) -> tuple[dict[str, int], dict[str, bool]]:
    """Bounds of a call, as kernels take them: their values, and which exist."""
    band = visible.within(rows, keys)
    values = {"left": band.left or 0, "right": band.right or 0}
    return values, {"LEFT": band.left is not None, "RIGHT": band.right is not None}


def table_of(own: Tensor, others: Tensor, size: int, count: int) -> Tensor:
    """Where blocks of segments lie, [count, 4] int32: first row, end of own, begin, end of others.

    No block has rows of two segments. Surplus blocks are empty. `own` and `others`, int32 [n + 1],
    are where segments begin; a block has `size` own rows.
    """
    blocks = (own.diff() + (size - 1)) // size
    ends = blocks.cumsum(0)
    index = torch.arange(count, device=own.device)
    segment = torch.searchsorted(ends, index, right=True)
    there = segment < blocks.numel()
    segment = segment.clamp(max=blocks.numel() - 1)
    first = own[segment] + (index - (ends - blocks)[segment]) * size
    places = first, own[segment + 1], others[segment], others[segment + 1]
    return (torch.stack(places, dim=1) * there.unsqueeze(1)).to(torch.int32)


@triton.jit
def place_of(table, block, rows, others, SIZE: tl.constexpr):
    """(first row, end of own rows, begin, end of others) of a block."""
    if table is not None:
        at = table + block * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return block * SIZE, rows, 0, others


@triton.jit
def rows_between(
    first, begin, end, low, high, LOW: tl.constexpr, HIGH: tl.constexpr, PADDED: tl.constexpr,
    SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(start, clear, edge, stop): the others that a block of own rows sees, in whole steps.

    All of the block see all others from `clear` to `edge`; before and after that a mask is needed.
    If PADDED, rows beyond `end` need none.
    """
    start, clear, edge, stop = begin, begin, end, end
    if LOW:
        start = begin + tl.maximum(tl.minimum(first + low, end) - begin, 0) // STEP * STEP
        clear = begin + tl.cdiv(tl.maximum(first + SIZE - 1 + low - begin, 0), STEP) * STEP
    if HIGH:
        edge = tl.minimum(end, first + 1 + high)
        stop = tl.maximum(tl.minimum(end, first + SIZE + high), begin)
    if HIGH or not PADDED:
        edge = begin + tl.maximum(edge - begin, 0) // STEP * STEP
    clear = tl.minimum(clear, stop)
    return start, clear, tl.maximum(edge, clear), stop


@triton.jit
def steps_of(lists, block):
    """(number of a block, steps without a mask, steps with one, its first record, the others of its
    first step), from `lists_of`."""
    at = lists + block * 4
    record = lists + tl.load(at + 1)
    return tl.load(at), tl.load(at + 2), tl.load(at + 3), record, tl.load(record)


@triton.jit
def next_step(record, first, STEP: tl.constexpr):
    """(record, the others of its first step) of the next step."""
    first += STEP
    is_new = first >= tl.load(record + 1)
    record += tl.where(is_new, 8, 0)
    return record, tl.where(is_new, tl.load(record), first)


@triton.jit
def part_of(record):
    """(begin, end of rows, begin, end of keys, low, high) of a record."""
    rows, keys = tl.load(record + 2), tl.load(record + 4)
    ends = tl.load(record + 3), tl.load(record + 5)
    return rows, ends[0], keys, ends[1], tl.load(record + 6), tl.load(record + 7)


@triton.jit
def seen_of(
    first_row, first_key, band, part, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[ROWS, KEYS] of a tile: which rows and keys exist and see each other.

    `band` is (end of rows, end of keys, low, high), `part` that of a record; None: the band.
    """
    key = (first_key + tl.arange(0, KEYS))[None, :]
    row = (first_row + tl.arange(0, ROWS))[:, None]
    if part is not None:
        seen = (row >= part[0]) & (row < part[1]) & (key >= part[2]) & (key < part[3])
        return seen & (key >= row + part[4]) & (key <= row + part[5])
    seen = (key < band[1]) & (row < band[0])
    if LEFT:
        seen = seen & (key >= row + band[2])
    if RIGHT:
        seen = seen & (key <= row + band[3])
    return seen


@triton.jit
def capped(products, scale, softcap):
    """softcap * tanh(s / softcap) of scores s = scale * products, in powers of two as `scale` is.

    Scores far below the cap are those of the series: the difference from 1 would lose them.
    """
    scores = products * scale
    share = scores / (softcap * LOG2_E)
    shrunk = tl.exp2(-2.0 * LOG2_E * tl.abs(share))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    large = tl.where(share < 0, -size, size) * (softcap * LOG2_E)
    square = share * share
    small = scores * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(tl.abs(share) < 0.05, small, large)


@triton.jit
def slope_of(scores, softcap):
    """The derivative of capped scores, in powers of two, by those before."""
    share = scores / (softcap * LOG2_E)
    return 1.0 - share * share


class KernelPass(Enum):
    """Which kernel."""

    FORWARD = "forward"
    KEY_GRADS = "key grads"
    QUERY_GRADS = "query grads"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a kernel's blocks."""

    rows: int  # query rows
    keys: int
    warps: int  # of a program
    stages: int  # blocks in flight or in use at a time
    tma: bool = False  # whether blocks are loaded by TMA (Hopper and later)

    def options(self) -> dict[str, int]:
        """As launch options."""
        return dict(ROWS=self.rows, KEYS=self.keys, num_warps=self.warps, num_stages=self.stages)


def places_of(
    visible: Visible, blocks: Blocks, own: int, device: torch.device, of_keys: bool = False
) -> tuple[int, Tensor | None, Tensor | None]:
    """How many blocks `own` rows have, `table_of` segments or `lists_of` parts, if there are some;
    `of_keys`: whether own rows are keys."""
    sizes = (blocks.keys, blocks.rows) if of_keys else (blocks.rows, blocks.keys)
    if visible.segments is None:
        parts = visible.parts
        lists = None if parts is None else lists_of(parts, of_keys, sizes, own, device)
        return triton.cdiv(own, sizes[0]), None, lists
    starts = visible.segments.cu_q, visible.segments.cu_k
    count = own // sizes[0] + starts[0].numel() - 1  # an upper bound, without synchronizing
    return count, table_of(*(starts[::-1] if of_keys else starts), sizes[0], count), None


# For 16-bit inputs: largest head dimension -> forward, key grads, query grads.
def _row(*blocks: Blocks) -> dict[KernelPass, Blocks]:
    return dict(zip(KernelPass, blocks, strict=True))


_HOPPER = {
    64: _row(Blocks(64, 128, 4, 2, True), Blocks(64, 64, 4, 3, True), Blocks(64, 128, 4, 3, True)),
    128: _row(Blocks(64, 64, 4, 3, True), Blocks(64, 64, 4, 2, True), Blocks(128, 64, 8, 3, True)),
    256: _row(Blocks(128, 64, 8, 2, True), Blocks(32, 64, 8, 2, True), Blocks(128, 32, 8, 2, True)),
}
_AMPERE = {
    64: _row(Blocks(128, 64, 4, 3), Blocks(32, 128, 4, 3), Blocks(128, 32, 4, 3)),
    128: _row(Blocks(128, 64, 8, 2), Blocks(32, 128, 8, 2), Blocks(128, 32, 8, 2)),
    256: _row(Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)),
}
_SMALL = {  # 99 KB of shared memory
    64: _row(Blocks(128, 64, 4, 2), Blocks(32, 64, 4, 2), Blocks(64, 32, 4, 2)),
    128: _row(Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 1), Blocks(64, 32, 4, 1)),
    256: _row(Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1)),
}
_BY_ARCH = {(8, 0): _AMPERE, (9, 0): _HOPPER, (10, 0): _HOPPER, (10, 3): _HOPPER}
_WIDE = {  # float32, three products for one
    64: _row(Blocks(64, 32, 4, 1), Blocks(32, 64, 8, 1), Blocks(64, 32, 4, 1)),
    128: _row(Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1)),
    256: _row(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}


Chooser = Callable[[KernelPass, Tensor, int, int], Blocks]


def blocks_for(which: KernelPass, q: Tensor, dim_qk: int, dim_v: int) -> Blocks:
    """The table's entry for a kernel, the GPU of q, its dtype and the larger head dimension."""
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    return blocks_of(which, arch, q.itemsize, max(dim_qk, dim_v))


def blocks_of(which: KernelPass, arch: tuple[int, int], itemsize: int, dim: int) -> Blocks:
    """The table's entry for a compute capability, by default one that fits any GPU."""
    table = _WIDE if itemsize > 2 else _BY_ARCH.get(arch, _SMALL)
    return next(table[size][which] for size in sorted(table) if dim <= size)
