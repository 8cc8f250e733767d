"""Parts of a score matrix as our Triton kernels take them: which steps each block of rows makes.

For a block of own rows (queries, or keys for the gradients of keys) a record is some others
[first, stop), in whole steps, of one part. Records that all of the block see come first, so that a
kernel has two loops, one without a mask. Both run over the records' steps without a break: a new
record costs a load, not a new start of what is loaded ahead.
"""

from bisect import bisect_right

import numpy as np
import torch
from torch import Tensor

from megatron_burst.kernels.masks.parts import FAR, Parts, listed, on_device, transposed, trimmed

HEADER, RECORD = 4, 8  # int32 of a block, of a record
_MANY = 4  # records for each block and part; with more, parts are regrouped first


def lists_of(
    parts: Parts, of_keys: bool, sizes: tuple[int, int], own: int, device: torch.device
) -> Tensor:
    """The lists of all blocks, int32 on the device; made once for each kernel.

    For each block, longest first: its number, where its records begin, its steps without a mask and
    those with one. Then the records: first, stop, and their part, as of `Parts`. One more record
    may be read. `sizes`: own rows of a block, and others of a step; `own`: number of own rows;
    `of_keys`: whether these are keys.
    """
    key = of_keys, sizes, own
    if key not in parts.kept:
        parts.kept[key] = on_device(_lists(parts, of_keys, sizes, own), device)
    return parts.kept[key]


def _lists(parts: Parts, of_keys: bool, sizes: tuple[int, int], own: int) -> np.ndarray:
    size, step = sizes
    count = -(-own // size)
    table = few_parts(transposed(parts.table) if of_keys else parts.table, size, own)
    block, masked, first, stop, part = records_of(table, sizes, own)
    steps = -(-(stop - first) // step)
    order = np.argsort(block * 2 + masked, kind="stable")
    records = np.zeros((len(order) + 1, RECORD), dtype=np.int32)
    records[:-1, 0], records[:-1, 1] = first[order], stop[order]
    records[:-1, 2:] = (transposed(table) if of_keys else table)[part[order]]
    clear, edge = (
        np.bincount(block[some], weights=steps[some], minlength=count).astype(np.int32)
        for some in (~masked, masked)
    )
    number = np.bincount(block, minlength=count)
    begins = HEADER * count + RECORD * (np.cumsum(number) - number)
    header = np.stack((np.arange(count), begins, clear, edge), 1).astype(np.int32)
    longest = np.argsort(-(clear + edge), kind="stable")
    return np.concatenate((header[longest].ravel(), records.ravel()))


def few_parts(table: np.ndarray, size: int, own: int) -> np.ndarray:
    """The parts, or the same pairs in others if many parts have the same blocks of own rows."""
    blocks = -(-own // size)
    if len(table) and _blocks_of(table, size)[1].sum() > _MANY * (blocks + len(table)):
        return regrouped(table)
    return table


def _blocks_of(table: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The first block of own rows that each part has, and how many it has."""
    first = table[:, 0] // size
    return first, (table[:, 1] - 1) // size + 1 - first


def records_of(table: np.ndarray, sizes: tuple[int, int], own: int) -> tuple[np.ndarray, ...]:
    """(block, whether it needs a mask, first, stop, part) of all records, in no order; rows of the
    table are own rows."""
    size, step = sizes
    part, block = listed(*_blocks_of(table, size))
    own_begin, own_end, begin, end, low, high = table.T[:, part]
    top, bottom = block * size, np.minimum(block * size + size, own)
    whole = (own_begin <= top) & (own_end >= bottom)
    top, bottom = np.maximum(own_begin, top), np.minimum(own_end, bottom)
    # some see [start, stop), all see [clear, edge)
    start, stop = np.maximum(begin, top + low) // step * step, np.minimum(end, bottom + high)
    clear = -(-np.maximum(begin, bottom - 1 + low) // step) * step
    edge = np.minimum(end, top + high + 1) // step * step
    some = whole & (clear < edge)
    clear, edge = np.where(some, clear, stop), np.where(some, edge, stop)
    records = [
        (block, np.full(len(block), masked), first, last, part)
        for masked, first, last in ((False, clear, edge), (True, start, clear), (True, edge, stop))
    ]
    block, masked, first, stop, part = (np.concatenate(x) for x in zip(*records, strict=True))
    there = first < stop
    return block[there], masked[there], first[there], stop[there], part[there]


def regrouped(parts: np.ndarray) -> np.ndarray:
    """The same pairs in parts with the most others for each row, so that a row is in few of them.

    Where all rows of a part see all its others, that is cut off as a rectangle. Then rectangles are
    cut where one begins or ends, and those with adjacent others are one.
    """
    begin, end, first, last, low, high = parts.T
    clear, edge = np.maximum(begin, last - 1 - high), np.minimum(end, first - low + 1)
    clear, edge = np.where(clear < edge, clear, end), np.where(clear < edge, edge, end)
    pieces = [parts.copy() for _ in range(3)]
    edges = (begin, clear), (clear, edge), (edge, end)
    for piece, (top, bottom) in zip(pieces, edges, strict=True):
        piece[:, 0], piece[:, 1] = top, bottom
    before, within, behind = map(trimmed, pieces)
    return np.concatenate((_stacked(within), before, behind))


def _stacked(parts: np.ndarray) -> np.ndarray:
    """Rectangles that do not overlap, row by row: adjacent others at a row are one."""
    events = sorted(
        [(begin, True, first, last) for begin, _, first, last, *_ in parts.tolist()]
        + [(end, False, first, last) for _, end, first, last, *_ in parts.tolist()]
    )
    starts: list[int] = []  # of what is seen at the present row, ascending
    stops: list[int] = []
    since: list[int] = []  # the row from which on it is
    rectangles: list[tuple[int, ...]] = []

    def end_run(at: int, row: int) -> tuple[int, int]:
        begin, first, last = since.pop(at), starts.pop(at), stops.pop(at)
        if begin < row:
            rectangles.append((begin, row, first, last, -FAR, FAR))
        return first, last

    for row, begins, first, last in events:
        at = bisect_right(starts, first)
        if begins:
            if at < len(starts) and starts[at] == last:
                last = end_run(at, row)[1]
            if at and stops[at - 1] == first:
                at -= 1
                first = end_run(at, row)[0]
            pieces = [(first, last)]
        else:
            at -= 1
            whole = end_run(at, row)
            pieces = [(whole[0], first), (last, whole[1])]
        for piece in reversed(pieces):
            if piece[0] < piece[1]:
                starts.insert(at, piece[0])
                stops.insert(at, piece[1])
                since.insert(at, row)
    return trimmed(np.array(rectangles, dtype=np.int64).reshape(-1, 6))
