"""Gradients of gathered keys: brought to the ranks that hold these keys, summed there, sent on."""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from megatron_burst.comm.aside import Aside
from megatron_burst.comm.slots import Give, Take, UnderWay, size_in_bytes, view_as
from megatron_burst.engine.call import Call
from megatron_burst.engine.relayed import LocalSums, Sum, TravellingSums
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.gather_tiles import Leaf
from megatron_burst.plan.mask import Tile
from megatron_burst.plan.pieces import Piece
from megatron_burst.plan.schedule import Cargo, Circulate


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
        come = max(step.arriving_rows for step in schedule.steps)
        sizes = [
            size_in_bytes(self._shape(0, rows), self._dtype) for rows in (schedule.share_rows, come)
        ]
        self.device = k.device
        self._slots = call.carrier.slots(Cargo.GRAD, len(schedule.steps), sizes[0], k.device)
        self.in_one_slot = len(self._slots) == 1
        (self._staging,) = call.carrier.buffers("staging", 1, sizes[1], k.device)
        self._under_way: UnderWay | None = None
        self._own: dict[int, list[tuple[Tile, Tensor, Tensor]]] = defaultdict(list)

    def _shape(self, index: int, rows: int) -> tuple[int, ...]:
        return rows, self._batch, len(self._schedule.steps[index].heads), sum(self._dims)

    def _arrivals(self, index: int) -> list[tuple[int, Leaf]]:
        """What comes from which other rank."""
        leaves = self._schedule.steps[index].leaves
        return [(rank, leaf) for rank in self._schedule.others for leaf in leaves[rank]]

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

    def add_own(self, index: int, tile: Tile, dk: Tensor, dv: Tensor) -> None:
        """Remember the share of a tile over the rank's own shard until its step is summed."""
        self._own[index].append((tile, dk, dv))

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
        staged, own, found = self._staged(index), self._own.pop(index, []), []
        for piece in self._schedule.steps[index].keys:
            if piece.holder != self._schedule.cp_rank:
                continue
            parts = self._local_parts(index, piece, own)
            parts += [self.split(view) for (_, leaf), view in staged if leaf.piece == piece]
            found.append((piece.rows, [[dk for dk, _ in parts], [dv for _, dv in parts]]))
        return found

    def _local_parts(
        self, index: int, piece: Piece, own: Sequence[tuple[Tile, Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """What this rank itself contributes to a piece that it holds."""
        parts = [
            tuple(grad[:, piece.rows.moved(-tile.kv.start).slice] for grad in (dk, dv))
            for tile, dk, dv in own
            if tile.kv.holds(piece.rows)
        ]
        tiles = self._schedule.steps[index].tiles
        for tile, share in zip(tiles, self.shares(index), strict=True):
            if tile.kv.holds(piece.whole):
                parts.append(self.split(share[piece.whole.moved(-tile.kv.start).slice]))
        return parts


class KeySums:
    """Sums of the keys' gradients of each step, formed while the next one is computed.

    Those that travel on are formed beside its kernels, so that they set out at once.
    """

    def __init__(
        self,
        call: Call,
        schedule: GatherSchedule,
        shares: KeyGrads,
        sums: LocalSums | TravellingSums,
    ) -> None:
        self._shares, self._sums, self._call = shares, sums, call
        travels = schedule.circulate is Circulate.KV and schedule.topology.inter_size > 1
        self._beside = travels and not shares.in_one_slot
        self._last = len(schedule.steps) - 1
        self._asides: tuple[Aside, Aside] | None = None
        self._read: list[Sum] = []  # lives until the kernels' stream knows that it has been read

    def expect(self, index: int) -> None:
        """The sums of a step may be formed from here on, beside the kernels that are queued next;
        in a single slot they have to be, before it is filled again."""
        if index < 0:
            return
        if self._beside:
            device = self._shares.device
            self._asides = self._call.carrier.beside(device), self._call.carrier.beside(device)
        elif self._shares.in_one_slot:
            self._add(index)

    def add(self, index: int) -> None:
        """Form the sums of a step, unless that was done, and let them go on."""
        if index < 0 or self._shares.in_one_slot:
            return
        if not self._beside:
            self._add(index)
            return
        adding, _ = self._asides
        with adding:
            self._read = self._shares.collect(index)
            self._sums.add(index, self._read)

    def settle(self, index: int) -> None:
        """Let the kernels' stream wait for the sums of a step, though not for what comes home."""
        if index < 0 or not self._beside:
            return
        adding, coming_home = self._asides
        with coming_home:
            self._sums.come_home(index)
        adding.wait()
        self._read = []

    def _add(self, index: int) -> None:
        self._sums.add(index, self._shares.collect(index))
        self._sums.come_home(index)

    def finish(self) -> None:
        """Form the last sums and wait for all that comes home."""
        if self._asides:
            with self._call.carrier.beside(self._shares.device) as everything:
                pass
            everything.wait()
        self._add(self._last)
        self._sums.finish()
