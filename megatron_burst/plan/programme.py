"""A schedule of any kind as operations with their cost, which `simulate` runs."""

from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.cost import AttentionShape, hop_bytes
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.operations import Compute, Op, Post, Wait
from megatron_burst.plan.programme_a2a import a2a_operations
from megatron_burst.plan.programme_gather import gather_operations
from megatron_burst.plan.schedule import Cargo, Circulate, Direction, Schedule, Step

AnySchedule = Schedule | GatherSchedule | A2ASchedule
_MERGE_BYTES = 10  # an fp32 sum is read and written, a 16-bit addend read


def programme_of(
    schedule: AnySchedule,
    shape: AttentionShape,
    timer: Timer,
    direction: Direction,
    pulled: bool = True,
    again: bool = False,
) -> tuple[Op, ...]:
    """The operations of a schedule's rank.

    Args:
        schedule: of one rank and pass.
        shape: sizes of the call on one rank.
        timer: how long kernels take.
        direction: of the pass; the schedule's, where it has one.
        pulled: whether what is gathered or exchanged inside a host goes by copy engine.
        again: whether a backward that exchanges heads exchanges Q, K and V too.
    """
    if isinstance(schedule, Schedule):
        return _ring(schedule, shape, timer)
    if isinstance(schedule, GatherSchedule):
        return gather_operations(schedule, shape, timer, direction, pulled)
    return a2a_operations(schedule, shape, timer, pulled, again)


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
