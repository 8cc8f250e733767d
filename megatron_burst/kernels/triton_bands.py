"""Which keys a block of rows sees, and which rows a block of keys, in the Triton kernels.

A block has "own" rows i (of queries or keys); "others" are the rows j of the other side. i and j
see each other if i + low <= j <= i + high, inside their segment. All count from the first row of
the tensors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.kernels.visible import Segments, Visible


def bounds_of(visible: Visible, rows: int, keys: int) -> tuple[dict[str, int], dict[str, bool]]:
    """Bounds of a call, as kernels take them: their values, and which exist."""
    band = visible.within(rows, keys)
    values = {"left": band.left or 0, "right": band.right or 0}
    return values, {"LEFT": band.left is not None, "RIGHT": band.right is not None}


def num_blocks(rows: int, size: int, segments: Segments | None) -> int:
    """Number of blocks of `size` rows; with segments an upper bound, without synchronizing."""
    if segments is None:
        return triton.cdiv(rows, size)
    return rows // size + segments.cu_q.numel() - 1


def table_of(own: Tensor, others: Tensor, size: int, count: int) -> Tensor:
    """Where blocks of segments lie, [count, 4] int32: first row, end of own, begin, end of others.

    No block has rows of two segments. Surplus blocks are empty.

    Args:
        own: where segments begin in the rows that are split into blocks, int32 [n + 1].
        others: where they begin among the others.
        size: rows of a block.
        count: number of blocks, at least as many as needed.
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
def range_of(
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
def seen_of(
    first_row, first_key, band, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[ROWS, KEYS] of a tile: which rows and keys exist and see each other.

    `band` is (end of rows, end of keys, low, high).
    """
    key = (first_key + tl.arange(0, KEYS))[None, :]
    row = (first_row + tl.arange(0, ROWS))[:, None]
    seen = (key < band[1]) & (row < band[0])
    if LEFT:
        seen = seen & (key >= row + band[2])
    if RIGHT:
        seen = seen & (key <= row + band[3])
    return seen
