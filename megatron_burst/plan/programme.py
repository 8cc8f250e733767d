"""What a rank does in a pass, as operations with their cost: schedules of every kind in one form.

All ranks of a group have equally many operations of the same kinds, in the same order; times and
bytes may differ. `simulate` runs them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.cost import AttentionShape, exchange_widths, hop_bytes
from megatron_burst.plan.gather import GatherSchedule, Round
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.mask import Span, Tile
from megatron_burst.plan.schedule import Cargo, Circulate, Direction, Schedule, Step
from megatron_burst.plan.topology import Link

AnySchedule = Schedule | GatherSchedule | A2ASchedule
_MERGE_BYTES = 10  # an fp32 sum is read and written, a 16-bit addend read


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
        source: cp rank that they come from; None: from all others.
        dest: cp rank that gets as much from this one; None: all others.
        pulled: by copy engine; else NCCL takes some multiprocessors.
    """

    key: tuple
    link: Link
    num_bytes: float
    source: int | None
    dest: int | None
    pulled: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when a transfer is over."""

    key: tuple


Op = Compute | Post | Wait


def programme_of(
    schedule: AnySchedule,
    shape: AttentionShape,
    timer: Timer,
    direction: Direction,
    pulled: bool = True,
) -> tuple[Op, ...]:
    """The operations of a schedule's rank.

    Args:
        schedule: of one rank and pass.
        shape: sizes of the call on one rank.
        timer: how long kernels take.
        direction: of the pass; the schedule's, where it has one.
        pulled: whether gathered or exchanged tensors go by copy engine.
    """
    if isinstance(schedule, Schedule):
        return _ring(schedule, shape, timer)
    if isinstance(schedule, GatherSchedule):
        ops = _gather(schedule, shape, timer, direction)
    else:
        ops = _a2a(schedule, shape, timer)
    return tuple(replace(op, pulled=pulled) if isinstance(op, Post) else op for op in ops)


def without_overlap(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same, but every transfer is waited for at once."""
    serial: list[Op] = []
    for op in ops:
        if not isinstance(op, Wait):
            serial.append(op)
        if isinstance(op, Post):
            serial.append(Wait(op.key))
    return tuple(serial)


def _ring(schedule: Schedule, shape: AttentionShape, timer: Timer) -> tuple[Op, ...]:
    sizes = hop_bytes(shape, schedule.direction, schedule.circulate)
    landing: dict[int, list[tuple]] = {}
    ops: list[Op] = [Compute((("copy", timer.memory(2 * sizes[Cargo.READ])),), 0)]
    for index, step in enumerate(schedule.steps):
        for hop in step.hops:
            key = (index, hop.ring, hop.cargo)
            link = schedule.topology.link(hop.source, schedule.cp_rank)
            ops.append(Post(key, link, sizes[hop.cargo], hop.source, hop.dest))
            landing.setdefault(hop.lands, []).append(key)
        tiles = [("attention", timer.tile(tile, shape, schedule.direction)) for tile in step.tiles]
        stays = _staying_bytes(schedule, step, shape)
        ops.append(Compute((*tiles, ("merge", timer.memory(stays))), index))
        ops += [Wait(key) for key in landing.pop(index, [])]
        travels = _travelling_bytes(schedule, step, shape)
        ops.append(Compute((("merge", timer.memory(travels)),), index))
    return tuple(ops)


def _staying_bytes(schedule: Schedule, step: Step, shape: AttentionShape) -> float:
    """Memory traffic of what is merged into results that stay with the rank."""
    queries = sum(len(tile.q) for tile in step.tiles) * shape.batch * shape.heads_q
    keys = sum(len(tile.kv) for tile in step.tiles) * shape.batch * shape.heads_kv
    if schedule.direction is Direction.FORWARD:
        return queries * shape.dim_v * _MERGE_BYTES
    if schedule.circulate is Circulate.KV:
        return queries * shape.dim_qk * _MERGE_BYTES
    return keys * (shape.dim_qk + shape.dim_v) * _MERGE_BYTES


def _travelling_bytes(schedule: Schedule, step: Step, shape: AttentionShape) -> float:
    """Memory traffic of sums of gradients that travel: zeroed or joined, and added to."""
    if schedule.direction is Direction.FORWARD:
        return 0.0
    grad = hop_bytes(shape, schedule.direction, schedule.circulate)[Cargo.GRAD]
    elements = grad / shape.grad_bytes
    work = 3 * grad * len(step.joins) + (grad if step.fresh else 0)
    return work + (elements * _MERGE_BYTES if step.tiles else 0)


def _gather(
    schedule: GatherSchedule, shape: AttentionShape, timer: Timer, direction: Direction
) -> tuple[Op, ...]:
    forward = direction is Direction.FORWARD
    ops: list[Op] = _read_round(schedule, 0, shape, timer)
    for index, round_ in enumerate(schedule.rounds):
        heads = _round_shape(shape, len(round_.heads))
        run = _tile_runner(timer, heads, direction)
        ops += [Compute(run(round_.before), index), Wait(("read", index))]
        ops += _read_round(schedule, index + 1, shape, timer)
        ops.append(Compute(run(round_.tiles), index))
        if not forward:
            ops += _sum_round(schedule, index - 1, shape, timer)
            ops.append(_leave(schedule, index, shape))
            ops.append(Compute(run(round_.after), index))
        ops.append(Compute((("merge", timer.memory(_merged(round_, heads, forward))),), index))
    if not forward:
        ops += _sum_round(schedule, len(schedule.rounds) - 1, shape, timer)
    return tuple(ops)


def _tile_runner(timer: Timer, shape: AttentionShape, direction: Direction) -> Callable:
    def run(tiles: Sequence[Tile]) -> tuple[tuple[str, float], ...]:
        return tuple(("attention", timer.tile(tile, shape, direction)) for tile in tiles)

    return run


def _round_shape(shape: AttentionShape, heads_kv: int) -> AttentionShape:
    group = shape.heads_q // shape.heads_kv
    return replace(shape, heads_kv=heads_kv, heads_q=heads_kv * group)


def _merged(round_: Round, shape: AttentionShape, forward: bool) -> float:
    """Memory traffic of joining the parts of rows that have several tiles."""
    every = (*round_.before, *round_.tiles, *round_.after)
    tiles_of = Counter(tile.q for tile in every)
    rows = sum((n + 1) * len(span) for span, n in tiles_of.items() if n > 1)
    dim = shape.dim_v if forward else shape.dim_qk
    return rows * shape.batch * shape.heads_q * dim * shape.itemsize


def _read_round(
    schedule: GatherSchedule, index: int, shape: AttentionShape, timer: Timer
) -> list[Op]:
    if index >= len(schedule.rounds):
        return []
    row = shape.batch * len(schedule.rounds[index].heads) * (shape.dim_qk + shape.dim_v)
    row *= shape.itemsize
    pieces = schedule.reads[index][schedule.cp_rank]
    come = sum(len(piece.rows) for piece in pieces) * row
    own = Compute((("copy", timer.memory(2 * shape.tokens * row)),), index)
    return [own, Post(("read", index), Link.INTRA, come, None, None)]


def _leave(schedule: GatherSchedule, index: int, shape: AttentionShape) -> Post:
    row = shape.batch * len(schedule.rounds[index].heads) * (shape.dim_qk + shape.dim_v)
    come = _arriving_rows(schedule, index) * row * shape.itemsize
    return Post(("grad", index), Link.INTRA, come, None, None)


def _arriving_rows(schedule: GatherSchedule, index: int) -> int:
    """Rows of others' gradients of this rank's keys."""
    mine = schedule.cp_rank
    return sum(
        len(leaf.rows)
        for rank, leaves in enumerate(schedule.leaves[index])
        for leaf in leaves
        if rank != mine and leaf.piece.owner == mine
    )


def _sum_round(
    schedule: GatherSchedule, index: int, shape: AttentionShape, timer: Timer
) -> list[Op]:
    if index < 0:
        return []
    row = shape.batch * len(schedule.rounds[index].heads) * (shape.dim_qk + shape.dim_v)
    rows = _arriving_rows(schedule, index) + 2 * shape.tokens  # and read its own, write the sum
    work = timer.memory(rows * row * shape.itemsize)
    return [Wait(("grad", index)), Compute((("merge", work),), index)]


def _a2a(schedule: A2ASchedule, shape: AttentionShape, timer: Timer) -> tuple[Op, ...]:
    widths = exchange_widths(shape)
    there, back = widths[schedule.direction]
    sizes = [len(heads) / shape.heads_kv * shape.batch * shape.tokens for heads in schedule.rounds]
    share = 1 - 1 / schedule.cp_size

    def post(index: int) -> list[Op]:
        if index >= len(sizes):
            return []
        num_bytes = sizes[index] * there
        copy = Compute((("copy", timer.memory(2 * num_bytes)),), index)
        return [copy, Post(("there", index), Link.INTRA, num_bytes * share, None, None)]

    def collect(index: int) -> list[Op]:
        if index < 0:
            return []
        copy = Compute((("copy", timer.memory(2 * sizes[index] * back)),), index)
        return [Wait(("back", index)), copy]

    rows = Span(0, schedule.num_rows)
    every = Tile(rows, rows, schedule.mask)
    ops = post(0)
    for index, heads in enumerate(schedule.rounds):
        mine = _round_shape(shape, len(heads) // schedule.cp_size)
        ops += [Wait(("there", index)), *post(index + 1)]
        ops.append(Compute((("attention", timer.tile(every, mine, schedule.direction)),), index))
        ops += collect(index - 1)
        ops.append(Post(("back", index), Link.INTRA, sizes[index] * back * share, None, None))
    return tuple(ops + collect(len(sizes) - 1))
