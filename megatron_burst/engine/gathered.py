"""Buffers of a gathering call: keys that have come together, gradients on their way to holders."""

from dataclasses import dataclass

from torch import Tensor

from megatron_burst.comm.slots import Give, Take, UnderWay, size_in_bytes, view_as
from megatron_burst.engine.call import Call
from megatron_burst.engine.relayed import Sum
from megatron_burst.plan.gather import GatherSchedule, Leaf
from megatron_burst.plan.mask import Tile
from megatron_burst.plan.pieces import Piece
from megatron_burst.plan.relay import Leg
from megatron_burst.plan.schedule import Cargo


@dataclass(frozen=True, slots=True)
class Pieces:
    """Keys and values of other hosts that forward leaves for backward.

    Attributes:
        tensors: by round, then by how many hosts they have come: [n, b, heads, d_qk + d_v].
        hosts: of the group.
    """

    tensors: tuple[Tensor, ...]
    hosts: int

    @staticmethod
    def made_for(schedule: GatherSchedule, k: Tensor, v: Tensor) -> "Pieces":
        """Empty ones for a forward pass."""
        batch, rows, _, dim_qk = k.shape
        hosts = schedule.topology.inter_size
        return Pieces(
            tuple(
                k.new_empty(rows, batch, len(heads), dim_qk + v.shape[-1])
                for heads in schedule.rounds
                for _ in range(hosts - 1)
            ),
            hosts,
        )

    def of(self, leg: Leg) -> Tensor:
        """The piece of a step of either pass that works on another host's."""
        return self.tensors[leg.round * (self.hosts - 1) + leg.distance - 1]


class GatheredKeys:
    """Keys and values of all ranks of a host, a gather at a time, in the order of the sequence.

    K and V of a row lie side by side: [s, b, heads, d_qk + d_v]. Rows that no tile of this rank
    reads are not fetched and hold anything.

    Attributes:
        in_one_slot: a gather must have been read before the next one is posted.
    """

    def __init__(self, call: Call, schedule: GatherSchedule, k: Tensor, v: Tensor) -> None:
        self._schedule, self._own = schedule, (k, v)
        self._dims = k.shape[-1], v.shape[-1]
        self._steps = {step.gather: step for step in reversed(schedule.steps)}
        self._slots = call.carrier.slots(
            Cargo.READ,
            len(schedule.reads),
            size_in_bytes(self._shape(0), k.dtype),
            k.device,
        )
        self._under_way: dict[int, UnderWay] = {}
        self.in_one_slot = len(self._slots) == 1

    def _shape(self, gather: int) -> tuple[int, ...]:
        heads = len(self._steps[gather].heads)
        return self._schedule.num_rows, self._own[0].shape[0], heads, sum(self._dims)

    def post(self, gather: int, visitor: tuple[Tensor] | None) -> None:
        """Start a gather; its slot must be free.

        Args:
            gather: its number.
            visitor: rows [n, b, heads, d_qk + d_v] that this rank holds for the others; None: its
                own keys.
        """
        step, mine, others = self._steps[gather], self._schedule.cp_rank, self._schedule.others
        slot = self._slots.view(gather, self._shape(gather), self._own[0].dtype)
        for piece in step.keys:
            if piece.holder != mine:
                continue
            if visitor:
                slot[piece.whole.slice].copy_(visitor[0][piece.rows.slice])
                continue
            keys = slot[piece.whole.slice].transpose(0, 1).split(self._dims, dim=-1)
            for target, own in zip(keys, self._own, strict=True):
                target.copy_(own[:, piece.rows.slice, step.heads.slice])
        reads = self._schedule.reads[gather]
        gives = [
            Give(peer, piece.whole.slice)
            for peer in others
            for piece in reads[peer]
            if piece.holder == mine
        ]
        takes = [
            Take(peer, piece.whole.slice, slot[piece.whole.slice])
            for peer in others
            for piece in reads[mine]
            if piece.holder == peer
        ]
        self._under_way[gather] = self._slots.exchange(gather, slot, gives, takes)
        self._slot = slot

    def land(self, gather: int) -> tuple[Tensor, Tensor]:
        """Wait for the last gather; returns k [b, s, heads, d_qk] and v [b, s, heads, d_v]."""
        self._under_way.pop(gather).wait()
        return self._slot.transpose(0, 1).split(self._dims, dim=-1)


class KeyGrads:
    """Gradients of gathered keys on their way to the ranks that hold these keys.

    A share is in the dtype in which the kernel returns it (or in the wire's), is rounded once, and
    all shares of a row are summed in the accumulation dtype in one pass: no error grows with the
    number of ranks.

    Attributes:
        in_one_slot: a step must be collected before the next one's tiles are computed.
        device: of the gradients.
    """

    def __init__(self, call: Call, schedule: GatherSchedule, k: Tensor, v: Tensor) -> None:
        self._schedule = schedule
        self._dims, self._batch = (k.shape[-1], v.shape[-1]), k.shape[0]
        self._dtype = call.grad_dtype if call.backend.capability.wide_grads else k.dtype
        steps = range(len(schedule.steps))
        come = max(sum(len(leaf.rows) for _, leaf in self._arrivals(index)) for index in steps)
        sizes = [
            size_in_bytes(self._shape(0, rows), self._dtype) for rows in (schedule.share_rows, come)
        ]
        self.device = k.device
        self._slots = call.carrier.slots(Cargo.GRAD, len(steps), sizes[0], k.device)
        self.in_one_slot = len(self._slots) == 1
        (self._staging,) = call.carrier.buffers("staging", 1, sizes[1], k.device)
        self._under_way: UnderWay | None = None
        self._own: list[tuple[Tile, Tensor, Tensor]] = []

    def _shape(self, index: int, rows: int) -> tuple[int, ...]:
        return rows, self._batch, len(self._schedule.steps[index].heads), sum(self._dims)

    def _arrivals(self, index: int) -> list[tuple[int, Leaf]]:
        """What comes from which other rank."""
        mine, leaves = self._schedule.cp_rank, self._schedule.steps[index].leaves
        return [
            (rank, leaf)
            for rank in self._schedule.others
            for leaf in leaves[rank]
            if leaf.piece.holder == mine
        ]

    def _slot(self, index: int) -> Tensor:
        rows = sum(len(tile.kv) for tile in self._schedule.steps[index].tiles)
        return self._slots.view(index, self._shape(index, rows), self._dtype)

    def shares(self, index: int) -> list[Tensor]:
        """Where the tiles of a step put their shares: [rows of kv, b, heads, d_qk + d_v] each."""
        lengths = [len(tile.kv) for tile in self._schedule.steps[index].tiles]
        return list(self._slot(index).split(lengths)) if lengths else []

    def split(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """A share as dk [b, rows, heads, d_qk] and dv [b, rows, heads, d_v]."""
        return share.transpose(0, 1).split(self._dims, dim=-1)

    def add_own(self, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        """Remember the share of a tile over the rank's own shard until the step is summed."""
        self._own.append((tile, dk, dv))

    def post(self, index: int) -> None:
        """Start to bring a step's shares to their holders; the step before must be collected."""
        leaves = self._schedule.steps[index].leaves[self._schedule.cp_rank]
        gives = [Give(leaf.piece.holder, leaf.rows.slice) for leaf in leaves]
        takes = [Take(rank, leaf.rows.slice, view) for (rank, leaf), view in self._staged(index)]
        self._under_way = self._slots.exchange(index, self._slot(index), gives, takes)

    def _staged(self, index: int) -> list[tuple[tuple[int, Leaf], Tensor]]:
        arrivals = self._arrivals(index)
        lengths = [len(leaf.rows) for _, leaf in arrivals]
        staging = view_as(self._staging, self._shape(index, sum(lengths)), self._dtype)
        return list(zip(arrivals, staging.split(lengths) if lengths else (), strict=True))

    def collect(self, index: int) -> list[Sum]:
        """Wait for the shares that were posted; what is to be summed, for each piece held here."""
        self._under_way.wait()
        staged, found = self._staged(index), []
        for piece in self._schedule.steps[index].keys:
            if piece.holder != self._schedule.cp_rank:
                continue
            parts = self._local_parts(index, piece)
            parts += [self.split(view) for (_, leaf), view in staged if leaf.piece == piece]
            found.append((piece.rows, [[dk for dk, _ in parts], [dv for _, dv in parts]]))
        self._own = []
        return found

    def _local_parts(self, index: int, piece: Piece) -> list[tuple[Tensor, Tensor]]:
        """What this rank itself contributes to a piece that it holds."""
        parts = [
            tuple(grad[:, piece.rows.moved(-tile.kv.start).slice] for grad in (dk, dv))
            for tile, dk, dv in self._own
            if tile.kv.holds(piece.rows)
        ]
        tiles = self._schedule.steps[index].tiles
        for tile, share in zip(tiles, self.shares(index), strict=True):
            if tile.kv.holds(piece.whole):
                parts.append(self.split(share[piece.whole.moved(-tile.kv.start).slice]))
        return parts
