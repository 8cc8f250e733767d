"""What an attention call needs in memory beside its inputs and outputs."""

from collections.abc import Sequence
from functools import lru_cache

from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.cost import AttentionShape, exchange_widths, hop_bytes
from megatron_burst.plan.gather import GatherSchedule, GatherStep
from megatron_burst.plan.mask import Tile, is_alone
from megatron_burst.plan.operations import part_of_heads
from megatron_burst.plan.schedule import Cargo, Circulate, Direction, Schedule
from megatron_burst.plan.slots import pulled_count, sent_count

_MOST_HOSTS = 8  # more of them need no more buffers; a test compares


@lru_cache(maxsize=4096)
def buffer_bytes(call: AttentionCall) -> float:
    """Memory that a rank needs beside q, k, v, out and their gradients, in the backward pass.

    Hop buffers, slots, sums in float32 and what the kernel needs for its own; the forward pass
    needs less, except for its output in float32 where results are merged.
    """
    if call.mode != "ring" and call.arranged.inter_size > _MOST_HOSTS:
        return buffer_bytes(call.settled(Direction.BACKWARD).on_hosts(_MOST_HOSTS))
    schedule = call.schedule(0, Direction.BACKWARD)
    if isinstance(schedule, Schedule):
        return _ring_bytes(call, schedule)
    if isinstance(schedule, GatherSchedule):
        return _gather_bytes(call, schedule)
    return _a2a_bytes(call, schedule)


def _ring_bytes(call: AttentionCall, schedule: Schedule) -> float:
    shape = call.priced
    sizes = hop_bytes(shape, Direction.BACKWARD, schedule.circulate)
    slots = (schedule.read_slots + 1) * sizes[Cargo.READ] + schedule.grad_slots * sizes[Cargo.GRAD]
    dims = shape.dim_qk + shape.dim_v
    sums = 4 * (shape.rows_q * shape.dim_qk + shape.rows_kv * dims)
    shares = 0
    if schedule.circulate is Circulate.Q:  # a tile's dq, until it is added to what came
        shares = shape.rows_q * shape.dim_qk * shape.itemsize
    return slots + sums + shares + _kernel_bytes(shape, shape.tokens, shape.tokens)


def _gather_bytes(call: AttentionCall, schedule: GatherSchedule) -> float:
    shape = call.priced
    heads, steps = len(schedule.rounds[0]), schedule.steps
    row = shape.batch * heads * (shape.dim_qk + shape.dim_v) * shape.itemsize
    pulled, share = call.by_copy_engine, row * schedule.share_rows
    reads = slot_count(Cargo.READ, len(schedule.reads), row * schedule.num_rows, pulled)
    grads = slot_count(Cargo.GRAD, len(steps), share, pulled)
    come = max(step.arriving_rows for step in steps)
    slots = row * (reads * schedule.num_rows + grads * schedule.share_rows + come)
    one, in_place = part_of_heads(shape, heads), schedule.topology.inter_size == 1
    tiles = max(_step_bytes(one, step, in_place) for step in steps)
    came = 0
    if schedule.recalls:  # what they came through in forward stays for the next call
        forward = call.schedule(0, Direction.FORWARD)
        assert isinstance(forward, GatherSchedule)
        came = forward.relay.read_slots
    return slots + _relay_bytes(shape, schedule, came) + tiles


def _relay_bytes(
    shape: AttentionShape, schedule: GatherSchedule | A2ASchedule, came: int = 0
) -> float:
    """Pieces on their way between hosts, their gradients, and the sums of those that stay.

    `came`: buffers of pieces that only forward uses.
    """
    relay = schedule.relay
    sizes = hop_bytes(shape, Direction.BACKWARD, schedule.circulate)
    buffers = (came + relay.read_slots) * sizes[Cargo.READ] + relay.grad_slots * sizes[Cargo.GRAD]
    if len(relay.legs) > len(schedule.rounds):
        if schedule.circulate is Circulate.KV:
            buffers += 4 * shape.rows_q * shape.dim_qk
        else:
            buffers += 4 * shape.rows_kv * (shape.dim_qk + shape.dim_v)
    return buffers * len(schedule.rounds[0]) / shape.heads_kv


def slot_count(cargo: Cargo, rounds: int, num_bytes: float, pulled: bool) -> int:
    """Slots of a call, as the engine makes them."""
    return pulled_count(cargo, rounds, num_bytes) if pulled else sent_count(rounds)


def _step_bytes(shape: AttentionShape, step: GatherStep, in_place: bool) -> float:
    """Parts of dq that are not summed yet, gradients of the rank's own keys, the kernel's own."""
    every = step.every_tile
    if not every:
        return 0.0
    apart = [tile for tile in every if not in_place or not is_alone(tile, every)]
    queries = sum(len(tile.q) for tile in apart)
    keys = sum(len(tile.kv) for tile in (*step.before, *step.after))
    parts = queries * shape.heads_q * shape.dim_qk
    parts += keys * shape.heads_kv * (shape.dim_qk + shape.dim_v)
    kernel = max(_kernel_bytes(shape, len(tile.q), len(tile.kv)) for tile in every)
    return shape.batch * parts * shape.itemsize + kernel


def _a2a_bytes(call: AttentionCall, schedule: A2ASchedule) -> float:
    """Slots serve both passes, so they are as large as either wants them; what has come in forward
    either stays, in place of q, k and v, or comes again in backward."""
    shape, rounds = call.priced, len(schedule.rounds)
    widths = exchange_widths(shape, call.again)
    came = widths[Direction.BACKWARD][0]
    there, back = map(max, zip(*widths.values(), strict=True))
    part = shape.batch * shape.tokens * len(schedule.rounds[0]) / shape.heads_kv
    reads = slot_count(Cargo.READ, rounds, part * there, call.by_copy_engine)
    grads = slot_count(Cargo.GRAD, rounds, part * back, call.by_copy_engine)
    wholes = min(2, rounds)
    slots = part * (reads * there + wholes * came + (grads + 1) * back)
    one = part_of_heads(shape, len(schedule.rounds[0]) // len(schedule.ranks))
    alone = schedule.topology.inter_size == 1
    tiles = max(_tiles_bytes(one, some, alone) for some in schedule.tiles)
    return slots + _relay_bytes(shape, schedule) + tiles


def _tiles_bytes(shape: AttentionShape, tiles: Sequence[Tile], in_place: bool) -> float:
    """Gradients of tiles until they are summed, and the kernel's own."""
    kernel = max((_kernel_bytes(shape, len(tile.q), len(tile.kv)) for tile in tiles), default=0)
    if in_place:
        return kernel
    queries = sum(len(tile.q) for tile in tiles) * shape.heads_q * shape.dim_qk
    keys = sum(len(tile.kv) for tile in tiles) * shape.heads_kv * (shape.dim_qk + shape.dim_v)
    return kernel + shape.batch * (queries + keys) * shape.itemsize


def _kernel_bytes(shape: AttentionShape, rows_q: int, rows_kv: int) -> float:
    """What a backward kernel needs: dq in float32; with grouped heads dk and dv too."""
    sums = rows_q * shape.heads_q * shape.dim_qk * 4
    if shape.heads_q != shape.heads_kv:
        sums += rows_kv * shape.heads_kv * (shape.dim_qk + shape.dim_v) * 4
    return shape.batch * (sums + rows_q * shape.heads_q * 2 * 4)
