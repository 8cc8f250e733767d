"""Hops between hosts of a schedule that gathers or exchanges, and sums of gradients, as operations.

What `engine/relayed.py` does: pieces come by beside the kernels; gradients of what circulates are
added to what arrives and sent on; those that stay are summed over a round in float32.
"""

from dataclasses import dataclass, field
from functools import cached_property

from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.cost import AttentionShape, hop_bytes
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.operations import Compute, Op, Post, Wait
from megatron_burst.plan.schedule import Cargo, Circulate, Direction, Hop
from megatron_burst.plan.topology import Link

_SUM_BYTES = 4  # of an element of a sum that stays until its round is over


@dataclass(frozen=True)
class Relayed:
    """The hops of one rank's pass; operations are to be asked for in the order of the steps.

    Attributes:
        schedule: that has a relay.
        shape: sizes of the call on one rank.
        timer: how long kernels take.
    """

    schedule: GatherSchedule | A2ASchedule
    shape: AttentionShape
    timer: Timer
    _landing: dict[tuple[Cargo, int], list[tuple]] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether there is no other host."""
        return self.schedule.topology.inter_size == 1

    @cached_property
    def _hop_bytes(self) -> dict[Cargo, int]:
        return hop_bytes(self.shape, Direction.BACKWARD, self.schedule.circulate)

    def landing(self, index: int) -> tuple[tuple, ...]:
        """Hops that bring the visitor of a step."""
        return tuple(self._landing.get((Cargo.READ, index), ()))

    def await_visitor(self, index: int) -> list[Op]:
        """Kernels of a step wait for its visitor."""
        return [Wait(key) for key in self.landing(index)]

    def set_out(self, index: int, after: tuple[tuple, ...] = ()) -> list[Op]:
        """Send the rank's own piece, if it is to leave while a step is prepared.

        Args:
            index: number of the step.
            after: transfers that bring what the piece is made of.
        """
        ops: list[Op] = []
        for place, hop in self._reads(index, own=True):
            ops.append(Compute((("copy", self.timer.memory(2 * self._bytes(hop))),), index))
            ops.append(self._post(index, place, hop, after))
        return ops

    def pass_on(self, index: int) -> list[Op]:
        """Send on what came for a step, if it is to go on."""
        landing = self.landing(index)
        reads = self._reads(index, own=False)
        return [self._post(index, place, hop, landing) for place, hop in reads]

    def _reads(self, index: int, own: bool) -> list[tuple[int, Hop]]:
        hops = enumerate(self.schedule.relay.legs[index].reads)
        return [(n, hop) for n, hop in hops if own == (hop.sends == self.schedule.cp_rank)]

    def _post(self, index: int, place: int, hop: Hop, after: tuple[tuple, ...] = ()) -> Post:
        key = (index, hop.ring, hop.cargo, place)
        self._landing.setdefault((hop.cargo, hop.lands), []).append(key)
        link = self.schedule.topology.link(hop.source, self.schedule.cp_rank)
        return Post(key, link, self._bytes(hop), hop.source, hop.dest, after=after)

    def _bytes(self, hop: Hop) -> float:
        return (
            self._hop_bytes[hop.cargo] * len(self.schedule.rounds[hop.round]) / self.shape.heads_kv
        )

    def travels(self, of_keys: bool) -> bool:
        """Whether gradients of keys (else of queries) follow what circulates."""
        return not self.alone and of_keys == (self.schedule.circulate is Circulate.KV)

    def add(self, index: int, of_keys: bool, read_bytes: float) -> list[Op]:
        """Add what this host contributes in a step to gradients of keys or queries.

        Args:
            index: number of the step.
            of_keys: keys' gradients, else queries'.
            read_bytes: of the parts that are added.
        """
        leg = self.schedule.relay.legs[index]
        if not self.travels(of_keys):
            elements = self._elements(leg.round, of_keys)
            return [self._merge(read_bytes + elements * self._local_width(index), index)]
        ops, land = self._add(index, read_bytes), self._land_grads(index)
        return [*(ops + land if leg.fresh else land + ops), *self._join(index)]

    def add_beside(self, index: int, read_bytes: float, come: tuple) -> list[Op]:
        """The same for keys' gradients that travel, while kernels go on; `settle` is to follow.

        Args:
            index: number of the step.
            read_bytes: of the parts that are added.
            come: transfer that brings parts.
        """
        fresh = self.schedule.relay.legs[index].fresh
        arrived = () if fresh else tuple(self._landing.get((Cargo.GRAD, index), ()))
        return self._add(index, read_bytes, (come, *arrived))

    def _add(self, index: int, read_bytes: float, after: tuple[tuple, ...] = ()) -> list[Op]:
        """Form a sum that travels and send it on, once these transfers are over."""
        leg = self.schedule.relay.legs[index]
        elements = self._elements(leg.round, self.schedule.circulate is Circulate.KV)
        num_bytes = read_bytes + elements * self.shape.grad_bytes * (1 if leg.fresh else 2)
        leave = [self._post(index, place, hop, after) for place, hop in enumerate(leg.grads)]
        return [self._merge(num_bytes, index), *leave]

    def settle(self, turn: int) -> list[Op]:
        """Wait for the gradients that land in a step; join those that have come home."""
        return [*self._land_grads(turn), *self._join(turn)]

    def finish(self) -> list[Op]:
        """The last gradients come home."""
        return self.settle(len(self.schedule.relay.legs))

    def _land_grads(self, turn: int) -> list[Op]:
        return [Wait(key) for key in self._landing.get((Cargo.GRAD, turn), ())]

    def _join(self, turn: int) -> list[Op]:
        width = 2 * self.shape.grad_bytes + self.shape.itemsize
        of_keys = self.schedule.circulate is Circulate.KV
        return [
            self._merge(self._elements(coming.round, of_keys) * width, turn)
            for coming in self.schedule.relay.homecomings[turn]
        ]

    def _local_width(self, index: int) -> int:
        """Bytes read and written for an element of a sum that stays, beside its parts."""
        first, last = self.schedule.relay.is_first(index), self.schedule.relay.is_last(index)
        return (0 if first else _SUM_BYTES) + (self.shape.itemsize if last else _SUM_BYTES)

    def _elements(self, round_: int, of_keys: bool) -> float:
        """Of the gradients of a rank's share of a round."""
        shape, share = self.shape, len(self.schedule.rounds[round_]) / self.shape.heads_kv
        if of_keys:
            return share * shape.rows_kv * (shape.dim_qk + shape.dim_v)
        return share * shape.rows_q * shape.dim_qk

    def _merge(self, num_bytes: float, index: int) -> Compute:
        return Compute((("merge", self.timer.memory(num_bytes)),), index)


def carried(
    key: tuple, link: Link, num_bytes: float, ranks: tuple[int, ...], pulled: bool,
    after: tuple[tuple, ...] = (),
) -> Post:  # fmt: skip
    """A transfer among the ranks of a row; only inside a host are there copy engines for it."""
    return Post(key, link, num_bytes, None, None, pulled and link is Link.INTRA, ranks, after)
