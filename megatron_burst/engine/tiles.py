"""The tiles of a call: results are written where they belong, or kept until merged or summed."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.relayed import Sum
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, merge_parts
from megatron_burst.plan.mask import Mask, Span, Tile, cut, is_alone


class Outputs:
    """Results of a round: written where they belong, or merged there if rows have several."""

    def __init__(
        self, call: Call, tiles: Sequence[Tile], q: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self._call, self._q, self._out, self._lse = call, q, out, lse
        self._tiles = tiles
        self._parts: list[tuple[Tile, Tensor, Tensor]] = []

    def compute(self, tile: Tile, k: Tensor, v: Tensor) -> None:
        """Compute a tile over keys [b, rows, heads, d]."""
        rows, keys = tile.q.slice, tile.kv.slice
        alone = is_alone(tile, self._tiles)
        part = self._call.backend.forward(
            self._q[:, rows], k[:, keys], v[:, keys], self._call.scale,
            tile.mask is Mask.CAUSAL,
            into=(self._out[:, rows], self._lse[:, :, rows]) if alone else None,
        )  # fmt: skip
        if not alone:
            self._parts.append((tile, *part))

    def merge(self) -> None:
        """Merge what rows have of several tiles."""
        for span in cut((tile.q for tile in self._tiles), self._q.shape[1]):
            parts = []
            for tile, out, lse in self._parts:
                if tile.q.holds(span):
                    rows = span.moved(-tile.q.start).slice
                    parts.append((out[:, rows], lse[:, :, rows]))
            if parts:
                rows = span.slice
                merge_parts(self._out[:, rows], self._lse[:, :, rows], parts)


class BackwardTiles:
    """Computes the tiles of a step; dq of rows that have one tile only is written in place.

    Args:
        call: the call.
        tiles: of the step.
        side: its queries.
        dq: where dq goes if nothing else is added to it; None: it is.
    """

    def __init__(
        self, call: Call, tiles: Sequence[Tile], side: QuerySide, dq: Tensor | None
    ) -> None:
        self._call, self._tiles, self._side, self._dq = call, tiles, side, dq
        self._parts: list[tuple[Tile, Tensor]] = []
        self._written: list[Span] = []

    def compute(
        self, tile: Tile, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of a tile; written to `into` if given."""
        side, rows = self._side.rows(tile.q.slice), tile.q.slice
        k, v = k[:, tile.kv.slice], v[:, tile.kv.slice]
        alone = self._dq is not None and is_alone(tile, self._tiles)
        if alone or into:
            wide = self._call.backend.capability.wide_grads
            dtype = accumulate_dtype(k.dtype) if wide else k.dtype
            dq = self._dq[:, rows] if alone else torch.empty_like(side.q, dtype=dtype)
            into = dq, *(into or (torch.empty_like(x, dtype=dtype) for x in (k, v)))
        dq, dk, dv = self._call.backend.backward(
            side, k, v, self._call.scale, tile.mask is Mask.CAUSAL,
            into=into, deterministic=self._call.deterministic,
        )  # fmt: skip
        if alone:
            self._written.append(tile.q)
        else:
            self._parts.append((tile, dq))
        return dk, dv

    def sums(self) -> list[Sum]:
        """What is to be summed, for all query rows that are not complete."""
        spans = cut((tile.q for tile in self._tiles), self._side.q.shape[1])
        left = [span for span in spans if not any(done.holds(span) for done in self._written)]
        return sums_of([(tile.q, (dq,)) for tile, dq in self._parts], 1, left)


def sums_of(
    parts: Sequence[tuple[Span, Sequence[Tensor]]], count: int, spans: Iterable[Span]
) -> list[Sum]:
    """What the rows of each span have of gradients over some rows each.

    Args:
        parts: rows, and `count` tensors [b, these rows, h, d].
        count: of tensors that are summed.
        spans: each part holds or does not touch each.
    """
    return [
        (
            span,
            [
                [grads[i][:, span.moved(-of.start).slice] for of, grads in parts if of.holds(span)]
                for i in range(count)
            ],
        )
        for span in spans
    ]
