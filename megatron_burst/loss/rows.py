"""The tokens that a loss computes, in blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_AT_ONCE = 1024  # converted at a time
_UNEVEN = 17 / 16  # of a fullest block to the mean, above which ranks help each other


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of a piece whose hidden states one rank has."""

    rank: int
    of_piece: slice
    of_all: slice


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens in blocks: a single one, or one per rank if ranks hold parts of the sequence."""

    labels: Tensor  # [blocks, n] int64, or [blocks, n, k] if each token has several classes
    valid: Tensor  # [blocks, n], false where a token is left out
    block: int  # the one whose hidden states this rank holds
    order: Tensor | None  # [blocks, n] int64: the token among those of all ranks; None: identity
    tokens: int  # per rank, including those that are not computed
    shares: tuple[int, ...] | None = None  # rows that each rank has; None: those of its block
    sound: Tensor | None = None  # 1, or NaN if no loss of these tokens would be right
    failure: Exception | None = None  # of this rank, which has no data then

    @classmethod
    def lacking(cls, labels: Sequence[int], block: int, counts: Sequence[int] | None,
                failure: Exception) -> "Rows":  # fmt: skip
        """Rows of a rank that failed to make them: what its collectives need. `labels`: their
        shape, [blocks, tokens] or [blocks, tokens, k]."""
        blocks, tokens, *classes = labels
        counts, shares = _spread_evenly(counts, tokens, blocks)
        count = sum(counts) // blocks
        empty = torch.empty(blocks, count, dtype=torch.int64, device="meta")
        order = None if count == tokens else empty
        labels_of_rows = empty.new_empty(blocks, count, *classes)
        return cls(labels_of_rows, empty, block, order, tokens, shares, failure=failure)

    @classmethod
    def of(cls, labels: Tensor, valid: Tensor, block: int, counts: Sequence[int] | None,
           sound: Tensor | None = None) -> "Rows":  # fmt: skip
        """The rows to compute of [blocks, tokens]; `counts`: valid ones of each block, or more;
        None: all."""
        blocks, tokens = valid.shape
        counts, shares = _spread_evenly(counts, tokens, blocks)
        if sum(counts) == blocks * tokens:
            return cls(labels, valid, block, None, tokens, sound=sound)
        first = valid.int().argsort(dim=1, descending=True, stable=True)
        chosen = [first[i, :count] + i * tokens for i, count in enumerate(counts)]
        order = torch.cat(chosen).view(blocks, -1)
        labels, valid = labels.flatten(0, 1)[order], valid.flatten()[order]
        return cls(labels, valid, block, order, tokens, shares, sound)

    @property
    def count(self) -> int:
        """Rows per block."""
        return self.labels.shape[1]

    def own(self, piece: slice) -> slice:
        """A piece of this rank's block, among all rows."""
        first = self.block * self.count
        return slice(first + piece.start, first + piece.stop)

    def parts(self, piece: slice) -> Iterator[Share]:
        """Which ranks have the hidden states of a piece's rows, [blocks * some]."""
        assert self.shares is not None
        some = piece.stop - piece.start
        for block in range(len(self.labels)):
            start, end = (block * self.count + i for i in (piece.start, piece.stop))
            low = 0
            for rank, share in enumerate(self.shares):
                begin, stop = max(start, low), min(end, low + share)
                low += share
                if begin < stop:
                    shift = block * some - start
                    yield Share(rank, slice(begin + shift, stop + shift), slice(begin, stop))

    def take(self, hidden: Tensor, rows: slice) -> Tensor:
        """Some of this rank's rows [some, h], contiguous; zero where a token is left out: a NaN
        there would reach the weight's gradient, as 0 * NaN is NaN."""
        valid, first = self.valid.flatten()[rows].unsqueeze(1), self.block * self.tokens
        own = slice(rows.start - first, rows.stop - first)
        if self.order is None and hidden.is_contiguous():
            return torch.where(valid, hidden.view(-1, hidden.shape[-1])[own], 0)
        if self.order is None:
            index = torch.arange(own.start, own.stop, device=hidden.device)
        else:
            index = self.order.flatten()[rows] - first
        # all indices in one call: a view of strided tokens would be copied entirely
        return hidden[_places(index, hidden.shape[:-1])].masked_fill_(~valid, 0)

    def spread(self, values: Tensor) -> Tensor:
        """[blocks, n, ...] as [blocks, tokens, ...], 0 where a token is left out."""
        values = torch.where(self._valid_like(values), values, 0)
        if self.order is not None:
            full = values.new_zeros(len(values) * self.tokens, *values.shape[2:])
            full.index_copy_(0, self.order.flatten(), values.flatten(0, 1))
            values = full.unflatten(0, (len(values), self.tokens))
        if self.sound is None or not values.is_floating_point():
            return values
        return values * self.sound

    def collect(self, values: Tensor) -> Tensor:
        """[blocks, tokens, ...] as [blocks, n, ...], 0 where a token is left out."""
        if self.order is not None:
            values = values.flatten(0, 1)[self.order]
        values = torch.where(self._valid_like(values), values, 0)
        return values if self.sound is None else values * self.sound

    def _valid_like(self, values: Tensor) -> Tensor:
        return self.valid.view(*self.valid.shape, *(1,) * (values.dim() - 2))

    def put(self, full: Tensor, rows: slice, values: Tensor) -> None:
        """Write some of this rank's rows [some, h] to their places in full [tokens, h]."""
        first = self.block * self.tokens
        if self.order is None:
            full[rows.start - first : rows.stop - first] = values
            return
        indices = (self.order.flatten()[rows] - first).split(_ROWS_AT_ONCE)
        for index, part in zip(indices, values.split(_ROWS_AT_ONCE), strict=True):
            full.index_copy_(0, index, part.to(full.dtype))


def _places(index: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """`torch.unravel_index`, which would wait for the GPU."""
    places = []
    for size in reversed(shape):
        places.append(index % size)
        index = index // size
    return tuple(reversed(places))


def wrong_classes(labels: Tensor, vocab: int) -> Tensor:
    """Which labels name no class of a vocabulary."""
    return (labels < 0) | (labels >= vocab)


def wrong_ids(ids: Tensor, vocab: int, ignore_index: int) -> Tensor:
    """Which of [..., k] ids that are not ignored name no class, or one that another place names."""
    values, places = ids.sort(stable=True)
    again = values[..., 1:] == values[..., :-1]
    twice = torch.zeros_like(ids, dtype=torch.bool).scatter_(-1, places[..., 1:], again)
    return (wrong_classes(ids, vocab) | twice) & (ids != ignore_index)


def _spread_evenly(counts: Sequence[int] | None, tokens: int, blocks: int
                   ) -> tuple[list[int], tuple[int, ...] | None]:  # fmt: skip
    """Rows to compute of each block, which make equal parts; and if the blocks themselves are not
    these parts, the rows of each block again."""
    if counts is None:
        return [tokens] * blocks, None
    most, rows = max(counts), list(counts)
    if most * blocks <= sum(counts) * _UNEVEN:
        return [most] * blocks, None
    missing = -sum(counts) % blocks  # as many tokens that are left out are computed too
    for block, count in enumerate(rows):
        rows[block] += min(missing, tokens - count)
        missing -= rows[block] - count
    return rows, tuple(rows)
