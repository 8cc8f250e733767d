"""The tiles of a gathering call: results are written where they belong, or kept until merged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.relayed import Sum
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, merge_parts
from megatron_burst.plan.gather import GatherStep
from megatron_burst.plan.mask import Mask, Span, Tile, cut


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
        alone = _is_alone(tile, self._tiles)
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
        step: whose tiles.
        side: its queries.
        dq: where dq goes if nothing else is added to it; None: it is.
    """

    def __init__(self, call: Call, step: GatherStep, side: QuerySide, dq: Tensor | None) -> None:
        self._call, self._step, self._side, self._dq = call, step, side, dq
        self._parts: list[tuple[Tile, Tensor]] = []
        self._written: list[Span] = []

    def compute(
        self, tile: Tile, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of a tile; written to `into` if given."""
        side, rows = self._side.rows(tile.q.slice), tile.q.slice
        k, v = k[:, tile.kv.slice], v[:, tile.kv.slice]
        dtype = accumulate_dtype(k.dtype) if self._call.backend.capability.wide_grads else k.dtype
        alone = self._dq is not None and _is_alone(tile, self._step.every_tile)
        dq = self._dq[:, rows] if alone else torch.empty_like(side.q, dtype=dtype)
        dk, dv = into or (torch.empty_like(x, dtype=dtype) for x in (k, v))
        self._call.backend.backward(
            side, k, v, self._call.scale, tile.mask is Mask.CAUSAL,
            into=(dq, dk, dv), deterministic=self._call.deterministic,
        )  # fmt: skip
        if alone:
            self._written.append(tile.q)
        else:
            self._parts.append((tile, dq))
        return dk, dv

    def sums(self) -> list[Sum]:
        """What is to be summed, for all query rows that are not complete."""
        tiles = (tile.q for tile in self._step.every_tile)
        return [
            (
                span,
                [
                    [
                        dq[:, span.moved(-tile.q.start).slice]
                        for tile, dq in self._parts
                        if tile.q.holds(span)
                    ]
                ],
            )
            for span in cut(tiles, self._side.q.shape[1])
            if not any(written.holds(span) for written in self._written)
        ]


def _is_alone(tile: Tile, tiles: Sequence[Tile]) -> bool:
    """Whether no other of the tiles has any of its query rows."""
    return not any(
        tile is not other and tile.q.start < other.q.stop and other.q.start < tile.q.stop
        for other in tiles
    )
