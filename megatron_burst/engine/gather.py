"""Runs a gather schedule: keys arrive a few heads ahead of the tiles that need them."""

from collections import Counter, defaultdict

import torch
from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.gathered import GatheredKeys, KeyGrads
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, merge_parts, sum_parts
from megatron_burst.plan.gather import Round
from megatron_burst.plan.mask import Mask, Span, Tile


def gather_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].

    Returns:
        out [b, n, h, dv] in q's dtype and lse [b, h, n] in the accumulation dtype.
    """
    schedule = call.forward
    out = _empty_rows_like(q, v.shape[-1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
    keys = GatheredKeys(call, schedule, k, v)
    keys.post(0)
    for index, round_ in enumerate(schedule.rounds):
        heads = _query_heads(round_, q, k)
        outputs = _Outputs(call, round_, q[:, :, heads], out[:, :, heads], lse[:, heads])
        own = tuple(x[:, :, round_.heads.slice] for x in (k, v))
        for tile in round_.before:
            outputs.compute(tile, *own)
        gathered = keys.land(index)
        keys.post_ahead(index + 1)
        for tile in round_.tiles:
            outputs.compute(tile, *gathered)
        keys.post(index + 1)
        outputs.merge()
    return out, lse


class _Outputs:
    """Results of a round: written where they belong, or merged there if rows have several."""

    def __init__(self, call: Call, round_: Round, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self._call, self._q, self._out, self._lse = call, q, out, lse
        self._tiles_of = Counter(tile.q for tile in (*round_.before, *round_.tiles))
        self._parts: dict[Span, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def compute(self, tile: Tile, k: Tensor, v: Tensor) -> None:
        """Compute a tile over keys [b, rows, heads, d]."""
        rows, keys = tile.q.slice, tile.kv.slice
        alone = self._tiles_of[tile.q] == 1
        part = self._call.backend.forward(
            self._q[:, rows], k[:, keys], v[:, keys], self._call.scale,
            tile.mask is Mask.CAUSAL,
            into=(self._out[:, rows], self._lse[:, :, rows]) if alone else None,
        )  # fmt: skip
        if not alone:
            self._parts[tile.q].append(part)

    def merge(self) -> None:
        """Merge what rows have of several tiles."""
        for span, parts in self._parts.items():
            merge_parts(self._out[:, span.slice], self._lse[:, :, span.slice], parts)


def gather_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype.

    Args:
        call: the call.
        q: [b, n, h, dqk].
        k: [b, n, h_kv, dqk].
        v: [b, n, h_kv, dv].
        out: [b, n, h, dv].
        lse: [b, h, n].
        dout: [b, n, h, dv].
    """
    schedule = call.backward
    dq, dk, dv = (_empty_rows_like(x, x.shape[-1]) for x in (q, k, v))
    keys, home = GatheredKeys(call, schedule, k, v), KeyGrads(call, schedule, dk, dv)
    side = QuerySide(q, dout, lse, None, out)
    keys.post(0)
    for index, round_ in enumerate(schedule.rounds):
        heads = _query_heads(round_, q, k)
        tiles = _BackwardTiles(call, round_, side.rows(slice(None), heads), dq[:, :, heads])
        own = tuple(x[:, :, round_.heads.slice] for x in (k, v))
        own_grads = [(tile, tiles.compute(tile, *own)) for tile in round_.before]
        gathered = keys.land(index)
        keys.post_ahead(index + 1)
        for tile, share in zip(round_.tiles, home.shares(index), strict=True):
            tiles.compute(tile, *gathered, into=home.split(share))
        keys.post(index + 1)
        home.sum_posted()
        home.post(index)
        own_grads += [(tile, tiles.compute(tile, *own)) for tile in round_.after]
        for tile, grads in own_grads:
            home.add_own(tile, *grads)
        tiles.sum()
    home.sum_posted()
    return dq, dk, dv


class _BackwardTiles:
    """Computes the tiles of a round; sums dq of rows that have several."""

    def __init__(self, call: Call, round_: Round, side: QuerySide, dq: Tensor) -> None:
        self._call, self._side, self._dq = call, side, dq
        every = (*round_.before, *round_.tiles, *round_.after)
        self._tiles_of = Counter(tile.q for tile in every)
        self._parts: dict[Span, list[Tensor]] = defaultdict(list)

    def compute(
        self, tile: Tile, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of a tile; written to `into` if given."""
        side, rows = self._side.rows(tile.q.slice), tile.q.slice
        k, v = k[:, tile.kv.slice], v[:, tile.kv.slice]
        dtype = accumulate_dtype(k.dtype) if self._call.backend.capability.wide_grads else k.dtype
        alone = self._tiles_of[tile.q] == 1
        dq = self._dq[:, rows] if alone else torch.empty_like(side.q, dtype=dtype)
        dk, dv = into or (torch.empty_like(x, dtype=dtype) for x in (k, v))
        self._call.backend.backward(
            side, k, v, self._call.scale, tile.mask is Mask.CAUSAL,
            into=(dq, dk, dv), deterministic=self._call.deterministic,
        )  # fmt: skip
        if not alone:
            self._parts[tile.q].append(dq)
        return dk, dv

    def sum(self) -> None:
        """Add up dq of rows that have several tiles."""
        for span, parts in self._parts.items():
            sum_parts(self._dq[:, span.slice], parts)


def _query_heads(round_: Round, q: Tensor, k: Tensor) -> slice:
    """The query heads that belong to a round's key heads."""
    group = q.shape[2] // k.shape[2]
    return slice(round_.heads.start * group, round_.heads.stop * group)


def _empty_rows_like(x: Tensor, dim: int) -> Tensor:
    """[b, n, h, dim] in x's dtype, with rows outermost in memory if they are in x."""
    batch, rows, heads, _ = x.shape
    if batch > 1 and x.stride(0) < x.stride(1):
        return x.new_empty(rows, batch, heads, dim).transpose(0, 1)
    return x.new_empty(batch, rows, heads, dim)
