"""Buffers of a gathering call: keys that have come together, gradients on their way home."""

from math import prod

import torch
from torch import Tensor

from megatron_burst.comm.hop import Transfer
from megatron_burst.engine.call import Call
from megatron_burst.kernels.partial import sum_parts
from megatron_burst.plan.gather import GatherSchedule, Piece
from megatron_burst.plan.mask import Span, Tile
from megatron_burst.plan.schedule import Cargo

_SLOTS = 2  # one round is computed while the next one's keys arrive, or the last one's grads leave


class GatheredKeys:
    """Keys and values of all ranks, a round at a time, rows in the order of the whole sequence.

    K and V of a row lie side by side: [s, b, heads, d_qk + d_v].
    """

    def __init__(self, call: Call, schedule: GatherSchedule, k: Tensor, v: Tensor) -> None:
        self._call, self._schedule, self._own = call, schedule, (k, v)
        self._dims = k.shape[-1], v.shape[-1]
        widest = len(schedule.rounds[0].heads)
        shape = (schedule.num_rows, k.shape[0], widest, sum(self._dims))
        count = min(_SLOTS, len(schedule.rounds))
        self._slots = call.carrier.buffers(Cargo.READ, count, _bytes(shape, k.dtype), k.device)
        self._under_way: dict[int, Transfer] = {}

    def _buffer(self, index: int) -> Tensor:
        k = self._own[0]
        heads = len(self._schedule.rounds[index].heads)
        shape = (self._schedule.num_rows, k.shape[0], heads, sum(self._dims))
        return _view(self._slots[index % len(self._slots)], shape, k.dtype)

    def post(self, index: int) -> None:
        """Start to gather a round's keys, if there is such a round; its slot must be free."""
        if index >= len(self._schedule.rounds):
            return
        buffer, mine = self._buffer(index), self._schedule.cp_rank
        heads = self._schedule.rounds[index].heads.slice
        for piece in self._schedule.pieces_of(mine):
            keys = buffer[piece.whole.slice].transpose(0, 1).split(self._dims, dim=-1)
            for target, own in zip(keys, self._own, strict=True):
                target.copy_(own[:, piece.rows.slice, heads])
        sends = [
            (peer, buffer[piece.whole.slice])
            for peer in _others(mine, self._schedule.cp_size)
            for piece in self._schedule.pieces_of(mine)
        ]
        recvs = [
            (piece.owner, buffer[piece.whole.slice])
            for peer in _others(mine, self._schedule.cp_size)
            for piece in self._schedule.pieces_of(peer)
        ]
        self._under_way[index] = self._call.carrier.exchange(Cargo.READ, sends, recvs)

    def land(self, index: int) -> tuple[Tensor, Tensor]:
        """Wait for a round's keys; returns k [b, s, heads, d_qk] and v [b, s, heads, d_v]."""
        self._under_way.pop(index).wait()
        return self._buffer(index).transpose(0, 1).split(self._dims, dim=-1)


class KeyGrads:
    """Gradients of gathered keys: each tile's share goes to the keys' owners, who add them up.

    A share is in the dtype in which the kernel returns it (or in the wire's), is rounded once, and
    all shares of a row are summed in the accumulation dtype in one pass: no error grows with the
    number of ranks.
    """

    def __init__(self, call: Call, schedule: GatherSchedule, dk: Tensor, dv: Tensor) -> None:
        self._call, self._schedule, self._targets = call, schedule, (dk, dv)
        self._dims = dk.shape[-1], dv.shape[-1]
        self._batch = dk.shape[0]
        self._dtype = call.grad_dtype if call.backend.capability.wide_grads else dk.dtype
        rounds = range(len(schedule.rounds))
        heads = len(schedule.rounds[0].heads)
        mine = max(sum(len(tile.kv) for tile in schedule.rounds[i].tiles) for i in rounds)
        theirs = max(sum(len(piece.rows) for *_, piece in self._arrivals(i)) for i in rounds)
        self._shares = self._take("shares", min(_SLOTS, len(rounds)), mine, heads, dk.device)
        (self._staging,) = self._take("staging", 1, theirs, heads, dk.device)
        self._under_way: tuple[int, Transfer] | None = None
        self._own: list[tuple[Tile, Tensor, Tensor]] = []

    def _take(self, use: str, count: int, rows: int, heads: int, device: torch.device) -> list:
        num_bytes = _bytes((rows, self._batch, heads, sum(self._dims)), self._dtype)
        return self._call.carrier.buffers((Cargo.GRAD, use), count, num_bytes, device)

    def _rows(self, buffer: Tensor, index: int, rows: int) -> Tensor:
        heads = len(self._schedule.rounds[index].heads)
        return _view(buffer, (rows, self._batch, heads, sum(self._dims)), self._dtype)

    def _arrivals(self, index: int) -> list[tuple[int, int, Piece]]:
        """(rank, number of its tile, own piece) of every share that comes from another rank."""
        mine = self._schedule.cp_rank
        all_tiles = self._schedule.gathered_tiles[index]
        return [
            (rank, number, piece)
            for rank in _others(mine, self._schedule.cp_size)
            for number, tile in enumerate(all_tiles[rank])
            for piece in self._schedule.pieces_of(mine)
            if tile.kv.holds(piece.whole)
        ]

    def shares(self, index: int) -> list[Tensor]:
        """Where the tiles of a round put their shares: [rows of kv, b, heads, d_qk + d_v] each."""
        tiles = self._schedule.rounds[index].tiles
        lengths = [len(tile.kv) for tile in tiles]
        buffer = self._shares[index % len(self._shares)]
        return list(self._rows(buffer, index, sum(lengths)).split(lengths))

    def split(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """A share as dk [b, rows, heads, d_qk] and dv [b, rows, heads, d_v]."""
        return share.transpose(0, 1).split(self._dims, dim=-1)

    def add_own(self, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        """Remember the share of a tile over the rank's own shard until the round is summed."""
        self._own.append((tile, dk, dv))

    def post(self, index: int) -> None:
        """Start to send a round's shares to their owners; the round before must be summed."""
        sends = []
        for tile, share in zip(self._schedule.rounds[index].tiles, self.shares(index), strict=True):
            sends += [
                (piece.owner, share[_relative(piece.whole, tile.kv)])
                for piece in self._schedule.pieces
                if piece.owner != self._schedule.cp_rank and tile.kv.holds(piece.whole)
            ]
        recvs = [(rank, view) for (rank, _, _), view in self._staged(index)]
        self._under_way = (index, self._call.carrier.exchange(Cargo.GRAD, sends, recvs))

    def _staged(self, index: int) -> list[tuple[tuple[int, int, Piece], Tensor]]:
        arrivals = self._arrivals(index)
        lengths = [len(piece.rows) for *_, piece in arrivals]
        views = self._rows(self._staging, index, sum(lengths)).split(lengths) if lengths else ()
        return list(zip(arrivals, views, strict=True))

    def sum_posted(self) -> None:
        """Wait for the shares of the round under way, if any, and add them up."""
        if self._under_way is None:
            return
        index, transfer = self._under_way
        transfer.wait()
        self._under_way = None
        staged, heads = self._staged(index), self._schedule.rounds[index].heads.slice
        for piece in self._schedule.pieces_of(self._schedule.cp_rank):
            parts = self._local_parts(index, piece)
            parts += [self.split(view) for (*_, other), view in staged if other == piece]
            for target, own in zip(self._targets, zip(*parts, strict=True), strict=True):
                sum_parts(target[:, piece.rows.slice, heads], own)
        self._own = []

    def _local_parts(self, index: int, piece: Piece) -> list[tuple[Tensor, Tensor]]:
        """What this rank itself contributes to a piece of its own."""
        parts = [
            tuple(grad[:, _relative(piece.rows, tile.kv)] for grad in (dk, dv))
            for tile, dk, dv in self._own
            if tile.kv.holds(piece.rows)
        ]
        tiles = self._schedule.rounds[index].tiles
        for tile, share in zip(tiles, self.shares(index), strict=True):
            if tile.kv.holds(piece.whole):
                parts.append(self.split(share[_relative(piece.whole, tile.kv)]))
        return parts


def _others(mine: int, cp_size: int) -> list[int]:
    """The other ranks, beginning after this one, so that not all turn to the same rank at once."""
    return [(mine + distance) % cp_size for distance in range(1, cp_size)]


def _relative(rows: Span, base: Span) -> slice:
    return slice(rows.start - base.start, rows.stop - base.start)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _view(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return buffer[: _bytes(shape, dtype)].view(dtype).view(shape)
