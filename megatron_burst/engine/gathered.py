"""Buffers of a gathering call: keys that have come together, gradients on their way home."""

from torch import Tensor

from megatron_burst.comm.slots import Give, Take, UnderWay, size_in_bytes, view_as
from megatron_burst.engine.call import Call
from megatron_burst.kernels.partial import sum_parts
from megatron_burst.plan.gather import GatherSchedule, Leaf, Piece
from megatron_burst.plan.mask import Tile
from megatron_burst.plan.schedule import Cargo


class GatheredKeys:
    """Keys and values of all ranks, a round at a time, rows in the order of the whole sequence.

    K and V of a row lie side by side: [s, b, heads, d_qk + d_v]. Rows that no tile of this rank
    reads are not fetched and hold anything.
    """

    def __init__(self, call: Call, schedule: GatherSchedule, k: Tensor, v: Tensor) -> None:
        self._schedule, self._own = schedule, (k, v)
        self._dims = k.shape[-1], v.shape[-1]
        self._slots = call.carrier.slots(
            Cargo.READ,
            len(schedule.rounds),
            size_in_bytes(self._shape(0), k.dtype),
            k.device,
        )
        self._under_way: dict[int, tuple[Tensor, UnderWay]] = {}

    def _shape(self, index: int) -> tuple[int, ...]:
        heads = len(self._schedule.rounds[index].heads)
        return self._schedule.num_rows, self._own[0].shape[0], heads, sum(self._dims)

    def post_ahead(self, index: int) -> None:
        """Start to gather a round's keys while the round before is computed, if slots allow it."""
        if len(self._slots) > 1:
            self.post(index)

    def post(self, index: int) -> None:
        """Start to gather a round's keys, if there is such a round and it was not started yet; no
        kernel that reads the slot must be left to queue."""
        if index >= len(self._schedule.rounds) or index in self._under_way:
            return
        mine, heads = self._schedule.cp_rank, self._schedule.rounds[index].heads.slice
        slot = self._slots.view(index, self._shape(index), self._own[0].dtype)
        for piece in self._schedule.pieces_of(mine):
            keys = slot[piece.whole.slice].transpose(0, 1).split(self._dims, dim=-1)
            for target, own in zip(keys, self._own, strict=True):
                target.copy_(own[:, piece.rows.slice, heads])
        reads, others = self._schedule.reads[index], _others(mine, self._schedule.cp_size)
        gives = [
            Give(peer, piece.whole.slice)
            for peer in others
            for piece in reads[peer]
            if piece.owner == mine
        ]
        takes = [
            Take(peer, piece.whole.slice, slot[piece.whole.slice])
            for peer in others
            for piece in reads[mine]
            if piece.owner == peer
        ]
        self._under_way[index] = slot, self._slots.exchange(index, slot, gives, takes)

    def land(self, index: int) -> tuple[Tensor, Tensor]:
        """Wait for a round's keys; returns k [b, s, heads, d_qk] and v [b, s, heads, d_v]."""
        slot, under_way = self._under_way.pop(index)
        under_way.wait()
        return slot.transpose(0, 1).split(self._dims, dim=-1)


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
        come = max(
            sum(len(leaf.rows) for _, leaf in self._arrivals(index))
            for index in range(len(schedule.rounds))
        )
        sizes = [
            size_in_bytes(self._shape(0, rows), self._dtype) for rows in (schedule.share_rows, come)
        ]
        carrier, rounds = call.carrier, len(schedule.rounds)
        self._slots = carrier.slots(Cargo.GRAD, rounds, sizes[0], dk.device)
        (self._staging,) = carrier.buffers("staging", 1, sizes[1], dk.device)
        self._under_way: tuple[int, UnderWay] | None = None
        self._own: list[tuple[Tile, Tensor, Tensor]] = []

    def _shape(self, index: int, rows: int) -> tuple[int, ...]:
        return rows, self._batch, len(self._schedule.rounds[index].heads), sum(self._dims)

    def _arrivals(self, index: int) -> list[tuple[int, Leaf]]:
        """What comes from which other rank."""
        mine, leaves = self._schedule.cp_rank, self._schedule.leaves[index]
        return [
            (rank, leaf)
            for rank in _others(mine, self._schedule.cp_size)
            for leaf in leaves[rank]
            if leaf.piece.owner == mine
        ]

    def _slot(self, index: int) -> Tensor:
        rows = sum(len(tile.kv) for tile in self._schedule.rounds[index].tiles)
        return self._slots.view(index, self._shape(index, rows), self._dtype)

    def shares(self, index: int) -> list[Tensor]:
        """Where the tiles of a round put their shares: [rows of kv, b, heads, d_qk + d_v] each."""
        if len(self._slots) == 1:
            self.sum_posted()
        return self._shares(index)

    def _shares(self, index: int) -> list[Tensor]:
        lengths = [len(tile.kv) for tile in self._schedule.rounds[index].tiles]
        return list(self._slot(index).split(lengths))

    def split(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """A share as dk [b, rows, heads, d_qk] and dv [b, rows, heads, d_v]."""
        return share.transpose(0, 1).split(self._dims, dim=-1)

    def add_own(self, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        """Remember the share of a tile over the rank's own shard until the round is summed."""
        self._own.append((tile, dk, dv))

    def post(self, index: int) -> None:
        """Start to bring a round's shares to their owners; the round before must be summed."""
        leaves = self._schedule.leaves[index][self._schedule.cp_rank]
        gives = [Give(leaf.piece.owner, leaf.rows.slice) for leaf in leaves]
        takes = [Take(rank, leaf.rows.slice, view) for (rank, leaf), view in self._staged(index)]
        self._under_way = index, self._slots.exchange(index, self._slot(index), gives, takes)

    def _staged(self, index: int) -> list[tuple[tuple[int, Leaf], Tensor]]:
        arrivals = self._arrivals(index)
        lengths = [len(leaf.rows) for _, leaf in arrivals]
        staging = view_as(self._staging, self._shape(index, sum(lengths)), self._dtype)
        return list(zip(arrivals, staging.split(lengths), strict=True))

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
            parts += [self.split(view) for (_, leaf), view in staged if leaf.piece == piece]
            for target, own in zip(self._targets, zip(*parts, strict=True), strict=True):
                sum_parts(target[:, piece.rows.slice, heads], own)
        self._own = []

    def _local_parts(self, index: int, piece: Piece) -> list[tuple[Tensor, Tensor]]:
        """What this rank itself contributes to a piece of its own."""
        parts = [
            tuple(grad[:, piece.rows.moved(-tile.kv.start).slice] for grad in (dk, dv))
            for tile, dk, dv in self._own
            if tile.kv.holds(piece.rows)
        ]
        tiles = self._schedule.rounds[index].tiles
        for tile, share in zip(tiles, self._shares(index), strict=True):
            if tile.kv.holds(piece.whole):
                parts.append(self.split(share[piece.whole.moved(-tile.kv.start).slice]))
        return parts


def _others(mine: int, cp_size: int) -> list[int]:
    """The other ranks, beginning after this one, so that not all turn to the same rank at once."""
    return [(mine + distance) % cp_size for distance in range(1, cp_size)]
