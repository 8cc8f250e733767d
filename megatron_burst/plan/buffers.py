"""What an attention call needs in memory beside its inputs and outputs."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose import choose_heads_per_exchange
from megatron_burst.plan.cost import AttentionShape, exchange_widths, hop_bytes
from megatron_burst.plan.gather import GatherSchedule, Round
from megatron_burst.plan.schedule import Cargo, Circulate, Direction, Schedule
from megatron_burst.plan.slots import pulled_count, sent_count


@lru_cache(maxsize=4096)
def buffer_bytes(call: AttentionCall) -> float:
    """Memory that a rank needs beside q, k, v, out and their gradients, in the backward pass.

    Hop buffers, slots, sums in float32 and what the kernel needs for its own; the forward pass
    needs less, except for its output in float32 where results are merged.
    """
    schedule = call.schedule(0, Direction.BACKWARD)
    if isinstance(schedule, Schedule):
        return _ring_bytes(call, schedule)
    if isinstance(schedule, GatherSchedule):
        return _gather_bytes(call, schedule)
    return _a2a_bytes(call)


def _ring_bytes(call: AttentionCall, schedule: Schedule) -> float:
    shape = call.shape
    sizes = hop_bytes(shape, Direction.BACKWARD, schedule.circulate)
    slots = (schedule.read_slots + 1) * sizes[Cargo.READ] + schedule.grad_slots * sizes[Cargo.GRAD]
    dims = shape.dim_qk + shape.dim_v
    sums = 4 * (shape.rows_q * shape.dim_qk + shape.rows_kv * dims)
    shares = 0
    if schedule.circulate is Circulate.Q:  # a tile's dq, until it is added to what came
        shares = shape.rows_q * shape.dim_qk * shape.itemsize
    return slots + sums + shares + _kernel_bytes(shape, shape.tokens, shape.tokens)


def _gather_bytes(call: AttentionCall, schedule: GatherSchedule) -> float:
    shape = call.shape
    heads = len(schedule.rounds[0].heads)
    row = shape.batch * heads * (shape.dim_qk + shape.dim_v) * shape.itemsize
    rounds = len(schedule.rounds)
    reads = slot_count(Cargo.READ, rounds, row * schedule.num_rows, call.pulled)
    grads = slot_count(Cargo.GRAD, rounds, row * schedule.share_rows, call.pulled)
    come = max(
        sum(len(leaf.rows) for leaves in ranks[1:] for leaf in leaves if leaf.piece.owner == 0)
        for ranks in schedule.leaves
    )
    slots = row * (reads * schedule.num_rows + grads * schedule.share_rows + come)
    group = shape.heads_q // shape.heads_kv
    one = replace(shape, heads_q=heads * group, heads_kv=heads)
    return slots + max(_round_bytes(one, round_) for round_ in schedule.rounds)


def slot_count(cargo: Cargo, rounds: int, num_bytes: float, pulled: bool) -> int:
    """Slots of a call, as the engine makes them."""
    return pulled_count(cargo, rounds, num_bytes) if pulled else sent_count(rounds)


def _round_bytes(shape: AttentionShape, round_: Round) -> float:
    """Parts of dq that are not summed yet, gradients of the rank's own keys, the kernel's own."""
    every = (*round_.before, *round_.tiles, *round_.after)
    tiles_of = Counter(tile.q for tile in every)
    queries = sum(n * len(span) for span, n in tiles_of.items() if n > 1)
    keys = sum(len(tile.kv) for tile in (*round_.before, *round_.after))
    parts = queries * shape.heads_q * shape.dim_qk
    parts += keys * shape.heads_kv * (shape.dim_qk + shape.dim_v)
    kernel = max(_kernel_bytes(shape, len(tile.q), len(tile.kv)) for tile in every)
    return shape.batch * parts * shape.itemsize + kernel


def _a2a_bytes(call: AttentionCall) -> float:
    shape, size = call.shape, call.topology.cp_size
    heads = choose_heads_per_exchange(shape, size, call.heads_per_round)
    rounds = -(-shape.heads_kv // (heads * size))
    there, back = exchange_widths(shape)[Direction.BACKWARD]
    part = shape.batch * shape.tokens * heads * size / shape.heads_kv
    reads = slot_count(Cargo.READ, rounds, part * there, call.pulled)
    grads = slot_count(Cargo.GRAD, rounds, part * back, call.pulled)
    group = shape.heads_q // shape.heads_kv
    rows = shape.tokens * size
    one = replace(shape, tokens=rows, heads_q=heads * group, heads_kv=heads)
    wholes = min(2, rounds)
    return part * ((reads + wholes) * there + (grads + 1) * back) + _kernel_bytes(one, rows, rows)


def _kernel_bytes(shape: AttentionShape, rows_q: int, rows_kv: int) -> float:
    """What a backward kernel needs: dq in float32; with grouped heads dk and dv too."""
    sums = rows_q * shape.heads_q * shape.dim_qk * 4
    if shape.heads_q != shape.heads_kv:
        sums += rows_kv * shape.heads_kv * (shape.dim_qk + shape.dim_v) * 4
    return shape.batch * (sums + rows_q * shape.heads_q * 2 * 4)
