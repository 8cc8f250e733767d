"""What a rank does in a pass, one thing after the other: kernels, transfers, waits.

All ranks of a group have equally many operations of the same kinds, in the same order; times and
bytes may differ. `programme` makes them from a schedule, `simulate` runs them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.mask import Tile
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.topology import Link


@dataclass(frozen=True, slots=True)
class Compute:
    """Kernels one behind the other.

    Attributes:
        parts: (what it is, seconds).
        round: to which round or step it belongs.
    """

    parts: tuple[tuple[str, float], ...]
    round: int


@dataclass(frozen=True, slots=True)
class Post:
    """Start a transfer that runs beside what follows.

    Attributes:
        key: its name, for `Wait`.
        link: over which it comes.
        num_bytes: that come.
        source: cp rank that they come from; None: from the others of `ranks`.
        dest: cp rank that gets as much from this one; None: the others of `ranks`.
        pulled: by copy engine; else NCCL takes some multiprocessors.
        ranks: cp ranks that take part where no source is named; empty: all of the group.
        after: transfers of this rank that must be over before this one starts; kernels go on.
    """

    key: tuple
    link: Link
    num_bytes: float
    source: int | None
    dest: int | None
    pulled: bool = False
    ranks: tuple[int, ...] = ()
    after: tuple[tuple, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when a transfer is over."""

    key: tuple


Op = Compute | Post | Wait


def without_overlap(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same, but every transfer is waited for at once."""
    serial: list[Op] = []
    for op in ops:
        if not isinstance(op, Wait):
            serial.append(op)
        if isinstance(op, Post):
            serial.append(Wait(op.key))
    return tuple(serial)


def tile_runner(timer: Timer, shape: AttentionShape, direction: Direction) -> Callable:
    """A function from tiles, and of how many key heads they are, to the parts of a `Compute`.

    A pass has few kinds of tiles.
    """

    @cache
    def seconds(tile: Tile, heads_kv: int) -> float:
        return timer.tile(tile, part_of_heads(shape, heads_kv), direction)

    def run(tiles: Sequence[Tile], heads_kv: int) -> tuple[tuple[str, float], ...]:
        return tuple(("attention", seconds(tile, heads_kv)) for tile in tiles)

    return run


def part_of_heads(shape: AttentionShape, heads_kv: int) -> AttentionShape:
    """The same call with so many key heads and the query heads that belong to them."""
    group = shape.heads_q // shape.heads_kv
    return replace(shape, heads_kv=heads_kv, heads_q=heads_kv * group)
