"""Parts of a score matrix as FlashAttention-4's block sparsity takes them: for each block of
queries the blocks of keys that it sees whole, and those that it sees in part, with bits of pairs.

What parts say of blocks is found on the CPU; blocks are listed on the GPU, without waiting for it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_burst.kernels.masks.block_lists import few_parts, records_of
from megatron_burst.kernels.masks.parts import Parts, listed, on_device

SIZE = 128  # rows and keys of a block
_MOST_BLOCKS = 1 << 23  # of a tile: what they are sorted by has 8 bytes for each
_MOST_EDGES = 1 << 15  # blocks that are seen in part: 2 KB for each
_WHOLE = 3  # for each of these, which takes as long as 3 in forward, so many must be seen whole
_AT_A_TIME = 2048  # blocks whose bits are found together: 8 MB a temporary tensor


class Lists(NamedTuple):
    """Blocks that each block of own rows sees: int32 [1, 1, own], how many, and [1, 1, own, most],
    the numbers of these, ascending."""

    some_count: Tensor
    some: Tensor
    whole_count: Tensor
    whole: Tensor


@dataclass(frozen=True, eq=False)
class BlockSparse:
    """The blocks of a tile, on the device."""

    some: Tensor  # bool [blocks of rows, blocks of keys]: seen in part
    whole: Tensor  # the same of those seen whole
    # int32 [1 + blocks]: the number of blocks of keys; then for each block of rows, for each of
    # keys, where its `bits` begin
    places: Tensor
    # int32, 128 rows of 4 for each block seen in part: bit j of word i of a row says whether it
    # sees key 32 i + j
    bits: Tensor
    most_of_rows: tuple[int, int]  # at most how many a block of rows sees, in part and whole
    most_of_keys: tuple[int, int]  # the same for a block of keys

    @cached_property
    def of_rows(self) -> Lists:
        """For each block of rows its blocks of keys."""
        return _lists(self.some, self.whole, self.most_of_rows)

    @cached_property
    def of_keys(self) -> Lists:
        """For each block of keys its blocks of rows."""
        return _lists(self.some.T, self.whole.T, self.most_of_keys)


def is_worth(parts: Parts, rows: int, keys: int) -> bool:
    """Whether nearly all blocks are seen whole or not at all, and lists of them stay small."""
    if _blocks(rows) * _blocks(keys) > _MOST_BLOCKS:
        return False
    key = "are blocks worth it", rows, keys
    if key not in parts.kept:  # each layer asks
        spans = _spans(parts, rows)
        some = _number(spans.some)
        parts.kept[key] = some <= _MOST_EDGES and some * _WHOLE <= _number(spans.whole)
    return parts.kept[key]


def block_sparse_of(parts: Parts, rows: int, keys: int, device: torch.device) -> BlockSparse:
    """The blocks of a tile of so many rows and keys, made once."""
    key = "block sparse", rows, keys
    if key not in parts.kept:
        parts.kept[key] = _made(_spans(parts, rows), (_blocks(rows), _blocks(keys)), device)
    return parts.kept[key]


class _Spans(NamedTuple):
    """Blocks of keys [first, stop) that a block of rows sees: int64 [spans, 3] of (rows, first,
    stop). `parts` are those of `some`, as of `Parts`."""

    whole: np.ndarray
    some: np.ndarray
    parts: np.ndarray


def _spans(parts: Parts, rows: int) -> _Spans:
    """Made once."""
    key = "spans of blocks", rows
    if key not in parts.kept:
        table = few_parts(parts.table, SIZE, rows)
        block, masked, first, stop, part = records_of(table, (SIZE, SIZE), rows)
        spans = np.stack((block, first // SIZE, _blocks(stop)), 1)
        parts.kept[key] = _Spans(spans[~masked], spans[masked], table[part[masked]])
    return parts.kept[key]


def _blocks(length: Any) -> Any:
    """How many blocks have so many rows: of an int, or of each in an array."""
    return -(-length // SIZE)


def _number(spans: np.ndarray) -> int:
    """Of blocks, counting one for each part that has pairs in it."""
    return int((spans[:, 2] - spans[:, 1]).sum())


def _made(spans: _Spans, shape: tuple[int, int], device: torch.device) -> BlockSparse:
    rows, first, stop = spans.some.T
    index, others = listed(first, stop - first)
    table = np.column_stack((rows[index], others, spans.parts[index])).astype(np.int32)
    edges, whole = on_device(table, device), _seen(spans.whole, shape, device)
    some = torch.zeros(shape, dtype=torch.bool, device=device)
    at = edges[:, 0].long(), edges[:, 1].long()
    some.index_put_(at, some.new_ones(()))
    numbers = (some.flatten().cumsum(0, dtype=torch.int32) - 1).clamp(min=0)
    width = SIZE * SIZE // 32
    places = torch.cat((numbers.new_full((1,), shape[1]), numbers * width))
    bits = torch.zeros(max(len(edges), 1), width, dtype=torch.int32, device=device)
    of_edges = numbers.view(shape)[at]
    for number, of in zip(of_edges.split(_AT_A_TIME), edges.split(_AT_A_TIME), strict=True):
        bits.index_add_(0, number, _bits_of(of).flatten(1))  # parts share no pair
    most = [_most(each, shape) for each in (spans.some, spans.whole)]
    return BlockSparse(some, whole, places, bits.flatten(), *zip(*most, strict=True))


def _seen(spans: np.ndarray, shape: tuple[int, int], device: torch.device) -> Tensor:
    """bool [blocks of rows, blocks of keys]: those of the spans, none of which overlap."""
    steps = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32, device=device)
    rows, *ends = on_device(spans.T.copy(), device)
    for end, step in zip(ends, (1, -1), strict=True):
        steps.index_put_((rows, end), steps.new_full((), step), accumulate=True)
    return steps.cumsum(1)[:, :-1] > 0


def _most(spans: np.ndarray, shape: tuple[int, int]) -> tuple[int, int]:
    """At most how many blocks of keys a block of rows sees, and of rows one of keys."""
    lengths = spans[:, 2] - spans[:, 1]
    of_rows = np.bincount(spans[:, 0], weights=lengths, minlength=1).max()
    steps = np.bincount(spans[:, 1], minlength=shape[1] + 1)
    steps -= np.bincount(spans[:, 2], minlength=shape[1] + 1)
    return min(max(int(of_rows), 1), shape[1]), min(max(int(steps.cumsum().max()), 1), shape[0])


def _bits_of(edges: Tensor) -> Tensor:
    """The bits of one part of each block: int32 [edges, 128, 4]."""
    block, other, begin, end, first, last, low, high = edges.unsqueeze(2).unbind(1)
    row = block * SIZE + torch.arange(SIZE, dtype=torch.int32, device=edges.device)
    there = (row >= begin) & (row < end)
    left = torch.maximum(first, row + low) - other * SIZE
    right = torch.minimum(last, row + high + 1).where(there, 0) - other * SIZE
    word = torch.arange(0, SIZE, 32, device=edges.device)
    left, right = ((x.unsqueeze(2) - word).clamp(0, 32) for x in (left, right))
    ones = torch.ones((), dtype=torch.int64, device=edges.device)
    return ((ones << torch.maximum(left, right)) - (ones << left)).to(torch.int32)


def _lists(some: Tensor, whole: Tensor, most: tuple[int, int]) -> Lists:
    """Of own rows in the first axis."""
    lists: list[Tensor] = []
    for seen, longest in zip((some, whole), most, strict=True):
        order = seen.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        lists += [seen.sum(1, dtype=torch.int32), order[:, :longest].to(torch.int32)]
    # where there is one of an axis, `contiguous` leaves its stride as it was
    return Lists(*(x.reshape(-1).view(1, 1, *x.shape) for x in lists))
