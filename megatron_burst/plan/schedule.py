"""What a schedule is: steps with their hops and tiles, as data to print, compare and execute."""

from dataclasses import dataclass

from megatron_burst.schedule.call import Cargo, Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Tile
from megatron_burst.schedule.topology import Link, Topology

HOME = -1  # the slot of the rank's own shard: its inputs, or the gradient that stays with it


@dataclass(frozen=True, slots=True)
class Hop:
    """One transfer as one rank sees it: a send and the receive that goes with it.

    Attributes:
        ring: whose communicator carries it.
        cargo: data to read, or a gradient being summed.
        dest: cp rank that receives what is sent.
        source: cp rank from which something is received.
        sends: owner of the shard that is sent.
        brings: owner of the shard that is received.
        from_slot: buffer that is sent.
        to_slot: buffer that is filled.
        lands: step at whose end both the send and the receive must be complete.
        round: group of heads that is carried, where a shard goes in pieces.
    """

    ring: Link
    cargo: Cargo
    dest: int
    source: int
    sends: int
    brings: int
    from_slot: int
    to_slot: int
    lands: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """Add one gradient buffer to another, after the hops that land in the step."""

    into: int
    source: int


@dataclass(frozen=True, slots=True)
class Step:
    """One compute slot of one rank: post the hops, run the tiles, land hops, add, join.

    Attributes:
        owner: cp rank whose shard visits; None in the last steps of backward, which only bring
            gradients home.
        slot: read buffer in which the visitor lies.
        hops: transfers posted before the step's tiles run.
        tiles: what is computed, in rows of the query shard and of the key shard.
        grad_slot: gradient buffer of the visitor; None in forward.
        fresh: whether that buffer starts here, from zero, rather than with what arrived.
        joins: sums of gradient buffers at the end of the step.
    """

    owner: int | None
    slot: int = HOME
    hops: tuple[Hop, ...] = ()
    tiles: tuple[Tile, ...] = ()
    grad_slot: int | None = None
    fresh: bool = False
    joins: tuple[Join, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does in one attention forward or backward."""

    topology: Topology
    cp_rank: int
    layout: Layout
    mask: Mask
    tokens: int  # rows on each rank
    direction: Direction
    circulate: Circulate
    steps: tuple[Step, ...]
    read_slots: int  # buffers for visitors
    grad_slots: int  # buffers for their gradients

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(hop for step in self.steps for hop in step.hops)
