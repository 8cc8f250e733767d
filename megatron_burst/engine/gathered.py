"""Keys of a gathering call: those of a host's ranks come together, of visiting shards too."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megatron_burst.comm.slots import Give, Take, UnderWay, size_in_bytes
from megatron_burst.engine.call import Call
from megatron_burst.engine.visiting import Guests, KeyVisitors
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.relay import Leg
from megatron_burst.plan.schedule import Cargo, Circulate


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
        gives = [Give(peer, piece.whole.slice) for peer in others for piece in reads[peer]]
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


class Keys:
    """Gathered keys, of visitors too if these are keys: those are prepared beside the kernels.

    Args:
        call: the call.
        schedule: of the pass.
        k: [b, n, h_kv, d_qk].
        v: [b, n, h_kv, d_v].
        left: pieces of other hosts: a forward pass fills them, a backward that recalls reads them.
    """

    def __init__(
        self, call: Call, schedule: GatherSchedule, k: Tensor, v: Tensor, left: Pieces | None = None
    ) -> None:
        self._schedule, self._left = schedule, left
        self._gathered = GatheredKeys(call, schedule, k, v)
        self._visitors: KeyVisitors | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        if schedule.circulate is Circulate.KV and not schedule.recalls:
            batch, rows, _, dim_qk = k.shape
            shapes = [(batch, rows, len(heads), dim_qk, v.shape[-1]) for heads in schedule.rounds]

            def own(round_: int) -> tuple[Tensor, Tensor]:
                heads = schedule.rounds[round_].slice
                return k[:, :, heads], v[:, :, heads]

            self._visitors = KeyVisitors(call, schedule.relay, own, shapes, k)
        self._guests = Guests(call, schedule.relay, self._visitors, k.device)

    def _begins(self, index: int) -> bool:
        steps = self._schedule.steps
        return index == 0 or steps[index].gather != steps[index - 1].gather

    def expect(self, index: int) -> None:
        """Let the keys of a step come beside the kernels that are queued next, if slots allow it;
        at once if no visitor has to come first."""
        if not self._gathered.in_one_slot:
            self._guests.expect(index, partial(self._gather, index))

    def receive(self, index: int) -> None:
        """Let the visitor of a step come and gather its keys; a single slot must have been read
        by then."""
        self._guests.receive(index, partial(self._gather, index))

    def _gather(self, index: int) -> None:
        visitor = self._visitors and self._visitors.views(index)
        leg = self._schedule.relay.legs[index]
        if self._left and leg.distance:
            piece = self._left.of(leg)
            if visitor:
                piece.copy_(visitor[0])
            visitor = (piece,)
        if self._begins(index):
            self._gathered.post(self._schedule.steps[index].gather, visitor)

    def land(self, index: int) -> tuple[Tensor, Tensor]:
        """k [b, s, heads, d_qk] and v [b, s, heads, d_v] of a step."""
        if self._begins(index):
            # a rank that is alone on its host sends and receives nothing that it could wait for
            self._guests.await_visitor(index)
            self._last = self._gathered.land(self._schedule.steps[index].gather)
        return self._last

    def finish(self) -> None:
        """Let the current stream wait for all that was done beside it."""
        self._guests.finish()
