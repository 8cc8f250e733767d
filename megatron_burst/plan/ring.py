"""The nested ring: who sends what to whom, when, into which buffer, and what is computed meanwhile.

N rows of L ranks (`Topology.grid`). In step `round * L + place` the rank at (n, l) works with the
shard of the rank at (n - round, l - place). Data that is only read ("read") goes round the intra
ring within a round; at the start of a round the shard of the next round leaves on the inter ring
and has the whole round to arrive.

The gradient of a travelling shard ("grad") follows one step behind. Its way home takes P - 1 hops:
what the owner's own row contributes ends one place before the owner and waits there; the sums of
the other rows are joined row by row at that same place, a whole round of flight each; the total
comes back to that place, is joined with what waits, and makes one intra hop home. What the owner
itself contributes never leaves it. So N(L-1) intra and N-1 inter hops, like the data that is read.

Every rank runs the same programme relative to its place; a hop is one send and one receive.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_burst.plan.schedule import HOME, Hop, Join, Schedule, Step
from megatron_burst.schedule.call import Cargo, Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Tile, tiles
from megatron_burst.schedule.topology import Link, Topology


@lru_cache(maxsize=1024)
def ring_schedule(
    topology: Topology,
    cp_rank: int,
    *,
    layout: Layout,
    mask: Mask,
    tokens: int,
    direction: Direction,
    circulate: Circulate = Circulate.KV,
) -> Schedule:
    """The nested ring schedule of one rank; a flat ring where the topology has one row.

    Source: BurstEngine (arXiv 2509.19836) for the double ring; the way home is our own.

    Raises:
        BurstError: if the layout cannot hold that many rows.
    """
    programme = _Programme(topology, cp_rank)
    programme.lay_read_ring()
    if direction is Direction.BACKWARD:
        programme.lay_grad_ring()

    def live(owner: int) -> tuple[Tile, ...]:
        pair = (owner, cp_rank) if circulate is Circulate.Q else (cp_rank, owner)
        return tiles(layout, mask, *pair, topology.cp_size, tokens)

    steps = tuple(programme.step(number, live) for number in range(programme.num_steps))
    return Schedule(
        topology, cp_rank, layout, mask, tokens, direction, circulate, steps,
        programme.read_pool.size, programme.grad_pool.size,
    )  # fmt: skip


@dataclass(slots=True)
class SlotPool:
    """Hands out the lowest free buffer; a buffer is free again after its last reader."""

    size: int = 0
    _free: list[int] = field(default_factory=list)
    _due: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def take(self) -> int:
        """Index of a buffer that is free, a new one where none is."""
        if self._free:
            self._free.sort()
            return self._free.pop(0)
        self.size += 1
        return self.size - 1

    def free_after(self, slot: int, step: int) -> None:
        """Give a buffer back at the end of a step; the shard's home is never given back."""
        if slot != HOME:
            self._due[step].append(slot)

    def end_of(self, step: int) -> None:
        """Free the buffers whose last reader was that step."""
        self._free += self._due.pop(step, [])


class _Programme:
    """Lays the hops of one rank's steps; thrown away once the schedule is made."""

    def __init__(self, topology: Topology, cp_rank: int) -> None:
        self.topology = topology
        self.row, self.column = topology.coord(cp_rank)
        self.num_steps = topology.cp_size
        self.hops: dict[int, list[Hop]] = defaultdict(list)
        self.joins: dict[int, list[Join]] = defaultdict(list)
        self.slot: dict[int, int] = {}
        self.grad_slot: dict[int, int] = {}
        self.fresh: set[int] = set()
        self.read_pool, self.grad_pool = SlotPool(), SlotPool()

    def step(self, number: int, live: Callable[[int], tuple[Tile, ...]]) -> Step:
        """What was laid for a step; `live` tells the tiles between this rank and an owner."""
        visited = number < self.topology.cp_size
        owner = self.owner_at(self.row, self.column, number) if visited else None
        return Step(
            owner=owner,
            slot=self.slot.get(number, HOME),
            hops=tuple(self.hops[number]),
            tiles=() if owner is None else live(owner),
            grad_slot=self.grad_slot.get(number),
            fresh=number in self.fresh,
            joins=tuple(self.joins[number]),
        )

    def span_of(self, round_: int) -> tuple[int, int]:
        """First and last step of a round."""
        places = self.topology.intra_size
        return round_ * places, (round_ + 1) * places - 1

    def owner_at(self, row: int, column: int, step: int) -> int:
        """Whose shard visits a place of the grid in a step."""
        round_, place = divmod(step, self.topology.intra_size)
        return self.topology.rank_at(row - round_, column - place)

    def post(
        self, step: int, ring: Link, cargo: Cargo, carried: int, slots: tuple[int, int], lands: int
    ) -> None:
        """Add a hop that moves what was worked on in step `carried` one place along a ring."""
        down, right = (1, 0) if ring is Link.INTER else (0, 1)
        n, m = self.row, self.column
        self.hops[step].append(
            Hop(
                ring=ring,
                cargo=cargo,
                dest=self.topology.rank_at(n + down, m + right),
                source=self.topology.rank_at(n - down, m - right),
                sends=self.owner_at(n, m, carried),
                brings=self.owner_at(n - down, m - right, carried),
                from_slot=slots[0],
                to_slot=slots[1],
                lands=lands,
            )
        )

    def lay_read_ring(self) -> None:
        held: int | None = HOME
        for round_ in range(self.topology.inter_size):
            first, last = self.span_of(round_)
            assert held is not None  # the row before took it for this one
            next_round = None
            if round_ < self.topology.inter_size - 1:
                next_round = self.read_pool.take()
                self.post(first, Link.INTER, Cargo.READ, first, (held, next_round), last)
            for step in range(first, last + 1):
                self.slot[step] = held
                leaves_row = step == first and next_round is not None
                self.read_pool.free_after(held, last if leaves_row else step)
                if step < last:
                    arriving = self.read_pool.take()
                    self.post(step, Link.INTRA, Cargo.READ, step, (held, arriving), step)
                    held = arriving
                self.read_pool.end_of(step)
            held = next_round

    def lay_grad_ring(self) -> None:
        waiting = row_sum = None  # what waits for the total; the sum over the other rows so far
        self.grad_slot[0] = HOME
        for round_ in range(self.topology.inter_size):
            first, last = self.span_of(round_)
            if row_sum is not None:
                older = self.grad_pool.take()
                self.post(first, Link.INTER, Cargo.GRAD, first - 1, (row_sum, older), last)
                self.grad_pool.free_after(row_sum, last)
                self.grad_pool.free_after(older, last)
                row_sum = older
            slot = self._lay_grad_row(max(first, 1), last)
            if row_sum is not None and slot is not None:
                self.joins[last].append(Join(slot, row_sum))
            if round_ == 0:
                waiting = slot
            else:
                row_sum = slot
        self._lay_way_home(waiting, row_sum)

    def _lay_grad_row(self, first: int, last: int) -> int | None:
        """One row's sum: starts in its first step, grows by one rank a step; returns its buffer."""
        slot = None
        for step in range(first, last + 1):
            came, slot = slot, self.grad_pool.take()
            if came is None:
                self.fresh.add(step)
            else:
                self.post(step, Link.INTRA, Cargo.GRAD, step - 1, (came, slot), step)
                self.grad_pool.free_after(came, step)
            self.grad_slot[step] = slot
            self.grad_pool.end_of(step)
        return slot

    def _lay_way_home(self, waiting: int | None, row_sum: int | None) -> None:
        step, places = self.topology.cp_size, self.topology.intra_size
        total = waiting
        if row_sum is not None:
            total = self.grad_pool.take()
            self.post(step, Link.INTER, Cargo.GRAD, step - 1, (row_sum, total), step)
            self.joins[step].append(Join(HOME, total) if waiting is None else Join(total, waiting))
            self.grad_pool.free_after(row_sum, step)
            self.grad_pool.end_of(step)
            step += 1
        if total is not None and places > 1:
            own = self.grad_pool.take()
            self.post(step, Link.INTRA, Cargo.GRAD, places - 1, (total, own), step)
            self.joins[step].append(Join(HOME, own))
            step += 1
        self.num_steps = step
