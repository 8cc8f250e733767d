"""Pieces that go from host to host while the ranks of each host work together on what is there.

A round is a group of heads. In each of its N steps the ranks of a host work with the shards of one
host: each rank has the piece (its shard's heads of the round) of the rank at its own place there.
Pieces go round the column of equal places in N-1 hops. A rank's own piece of the next round sets
out behind the last hop of the round before, so the slow link always has something to carry, and a
step needs no more than the piece of its own round.

The gradient of a travelling piece follows: each host adds its sum, and the last hop of N-1 brings
the total home, where what the home host itself contributed has waited. It never leaves.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.plan.ring import SlotPool
from megatron_burst.plan.schedule import HOME, Hop
from megatron_burst.schedule.call import Cargo, Direction
from megatron_burst.schedule.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Leg:
    """What one step has to do with other hosts.

    Attributes:
        round: number of its group of heads.
        distance: how many hosts the visiting piece has come; 0: it is the rank's own.
        slot: buffer of the visiting piece; HOME for the rank's own.
        reads: hops that start while the step is prepared: one that sends a copy of the rank's own
            piece, and one that sends on what lands then.
        grad_slot: buffer in which the gradient of the visiting piece is summed; HOME: where it
            stays for good.
        fresh: whether that sum starts here, rather than with what has arrived.
        grads: hops that start when the step's gradients are in that sum.
    """

    round: int
    distance: int
    slot: int
    reads: tuple[Hop, ...] = ()
    grad_slot: int = HOME
    fresh: bool = True
    grads: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True)
class Homecoming:
    """The gradient of a rank's own piece is complete: what waited and what came."""

    round: int
    waiting: int
    arrived: int


@dataclass(frozen=True, slots=True)
class Relay:
    """What one rank passes from host to host in one pass.

    Attributes:
        legs: of each step.
        homecomings: after the sum of each step, and after all of them.
        read_slots: buffers for pieces.
        grad_slots: buffers for their gradients.
    """

    legs: tuple[Leg, ...]
    homecomings: tuple[tuple[Homecoming, ...], ...]
    read_slots: int
    grad_slots: int

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(hop for leg in self.legs for hop in (*leg.reads, *leg.grads))

    def is_first(self, index: int) -> bool:
        """Whether a step is the first of its round."""
        return index == 0 or self.legs[index - 1].round != self.legs[index].round

    def is_last(self, index: int) -> bool:
        """Whether a step is the last of its round."""
        return index == len(self.legs) - 1 or self.is_first(index + 1)


@lru_cache(maxsize=1024)
def relay(
    topology: Topology, cp_rank: int, num_rounds: int, direction: Direction, recalls: bool = False
) -> Relay:
    """The hops between hosts of one rank, and its steps in order.

    Each round begins with the host's own shards. In backward the last one ends with them, so that
    the last gradients from elsewhere come home behind their tiles. An only round does not: its
    first piece would have nothing to come behind. Where pieces are there already, every round ends
    with the host's own: so no two of them leave gradients one right after the other.

    Args:
        topology: hosts are its rows.
        cp_rank: whose hops.
        num_rounds: groups of heads.
        direction: in forward there are no gradients.
        recalls: whether the pieces are still there from forward; then only gradients travel.
    """
    hosts = topology.inter_size
    backward = direction is Direction.BACKWARD
    order: list[tuple[int, int]] = []
    for round_ in range(num_rounds):
        ends_at_home = recalls or 0 < round_ == num_rounds - 1
        hosts_in_turn = (*range(1, hosts), 0) if backward and ends_at_home else range(hosts)
        order += [(round_, away) for away in hosts_in_turn]
    programme = _Programme(topology, cp_rank, order)
    if not recalls:
        programme.lay_reads()
    if backward:
        programme.lay_grads()
    return programme.relay()


class _Programme:
    """Lays the hops of one rank; thrown away once they are laid."""

    def __init__(self, topology: Topology, cp_rank: int, order: Sequence[tuple[int, int]]) -> None:
        self.topology, self.order = topology, order
        self.row, self.column = topology.coord(cp_rank)
        self.hosts = topology.inter_size
        self.at = {step: index for index, step in enumerate(order)}
        self.reads: dict[int, list[Hop]] = defaultdict(list)
        self.grads: dict[int, list[Hop]] = defaultdict(list)
        self.homecomings: dict[int, list[Homecoming]] = {}
        self.slot: dict[tuple[int, int], int] = {}
        self.grad_slot: dict[tuple[int, int], int] = {}
        self.read_pool, self.grad_pool = SlotPool(), SlotPool()

    def hop(self, cargo: Cargo, step: tuple[int, int], slots: tuple[int, int], lands: int) -> Hop:
        """A hop that moves what a step works on one host further."""
        round_, away = step
        place = self.topology.rank_at
        return Hop(
            ring=Link.INTER,
            cargo=cargo,
            dest=place(self.row + 1, self.column),
            source=place(self.row - 1, self.column),
            sends=place(self.row - away, self.column),
            brings=place(self.row - 1 - away, self.column),
            from_slot=slots[0],
            to_slot=slots[1],
            lands=lands,
            round=round_,
        )

    def lay_reads(self) -> None:
        leaving = defaultdict(list)  # hops by the step that is prepared when they start
        for round_, away in self.order:
            if away < self.hosts - 1:
                leaving[self._leaves(round_, away)].append((round_, away))
        for index in range(len(self.order)):
            for step in sorted(leaving[index], key=lambda step: step[1]):  # its own piece first
                round_, away = step
                needed = self.at[round_, away + 1]
                source = self.slot[step] if away else self.read_pool.take()
                target = self.slot[round_, away + 1] = self.read_pool.take()
                self.reads[index].append(self.hop(Cargo.READ, step, (source, target), needed))
                # kernels of a step may read its piece until the step after the next is prepared
                used = max(needed, self.at[step] + 1) if away else needed
                self.read_pool.free_after(source, used)
                if away + 1 == self.hosts - 1:
                    self.read_pool.free_after(target, needed + 1)
            self.read_pool.end_of(index)

    def _leaves(self, round_: int, away: int) -> int:
        """The step during whose preparation a hop starts: as soon as its piece is there; a rank's
        own one, as soon as the last hop of the round before has landed."""
        if away:
            return self.at[round_, away]
        return self.at[round_ - 1, self.hosts - 1] if round_ else 0

    def lay_grads(self) -> None:
        waiting: dict[int, int] = {}
        coming: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (round, buffer) by turn
        for index, step in enumerate(self.order):
            round_, away = step
            if away <= 1 and self.hosts > 1:
                self.grad_slot[step] = self.grad_pool.take()
            if away == 0:
                waiting[round_] = self.grad_slot.get(step, HOME)
            else:
                source, target = self.grad_slot[step], self.grad_pool.take()
                lands = self._arrives(round_, away, index)
                self.grads[index].append(self.hop(Cargo.GRAD, step, (source, target), lands))
                self.grad_pool.free_after(source, lands)
                if away < self.hosts - 1:
                    self.grad_slot[round_, away + 1] = target
                else:
                    self.grad_pool.free_after(target, lands)
                    coming[lands].append((round_, target))
            for round_home, _ in coming[index]:
                self.grad_pool.free_after(waiting[round_home], index)
            self.grad_pool.end_of(index)
        self.homecomings = {
            index: [Homecoming(round_, waiting[round_], target) for round_, target in some]
            for index, some in coming.items()
        }

    def _arrives(self, round_: int, away: int, index: int) -> int:
        """The step before whose sum a gradient is needed; the last ones, after all of them."""
        if away < self.hosts - 1:
            return self.at[round_, away + 1]
        return min(len(self.order), max(self.at[round_, 0], index + 2))

    def relay(self) -> Relay:
        legs = tuple(
            Leg(
                round=step[0],
                distance=step[1],
                slot=self.slot.get(step, HOME),
                reads=tuple(self.reads[index]),
                grad_slot=self.grad_slot.get(step, HOME),
                fresh=step[1] <= 1,
                grads=tuple(self.grads[index]),
            )
            for index, step in enumerate(self.order)
        )
        turns = range(len(self.order) + 1)
        homecomings = tuple(tuple(self.homecomings.get(turn, ())) for turn in turns)
        return Relay(legs, homecomings, self.read_pool.size, self.grad_pool.size)
