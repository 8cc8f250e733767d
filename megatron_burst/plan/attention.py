"""One attention call: the schedules that the engine would run, their time and their buffers."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from megatron_burst.plan.a2a import a2a_schedule
from megatron_burst.plan.choose import (
    choose_circulate,
    choose_heads_per_exchange,
    choose_heads_per_round,
    choose_intra,
)
from megatron_burst.plan.cost import AttentionShape, hop_bytes
from megatron_burst.plan.gather import GatherSchedule, Round, gather_schedule
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.programme import (
    AnySchedule,
    exchange_widths,
    programme_of,
    without_overlap,
)
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Cargo, Circulate, Direction, Schedule
from megatron_burst.plan.simulate import Timeline, Wiring, simulate
from megatron_burst.plan.topology import Topology

_MOST_RANKS = 16  # that are simulated one by one; in larger zigzag groups two stand for all


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """An attention call and how it is to run; "auto" as in `BurstConfig`.

    Attributes:
        shape: sizes on one rank.
        topology: of the context-parallel group.
        neighbours: GPUs of a host that belong to other groups beside one rank of this one, plus it:
            the tensor-parallel size, where those ranks run their rings at the same time.
        intra: inside a host.
        heads_per_round: of gathering or exchanging; None: as the engine chooses.
        circulate: in backward.
        pulled: whether gathered keys go by copy engine.
        overlap: whether transfers are hidden.
        backend: attention kernel.
        layout: of the tokens.
        mask: of the sequence.
    """

    shape: AttentionShape
    topology: Topology
    neighbours: int = 1
    intra: str = "auto"
    heads_per_round: int | None = None
    circulate: str = "auto"
    pulled: bool = True
    overlap: bool = True
    backend: str = "auto"
    layout: Layout = Layout.ZIGZAG
    mask: Mask = Mask.CAUSAL

    @property
    def mode(self) -> str:
        """ "ring", "gather" or "a2a"."""
        return choose_intra(self.topology, self.layout, "cuda", self.intra).value

    def schedule(self, cp_rank: int, direction: Direction) -> AnySchedule:
        """What the engine runs on a rank.

        Raises:
            BurstError: if the call cannot run so.
        """
        shape, size = self.shape, self.topology.cp_size
        rows = {"layout": self.layout, "mask": self.mask, "tokens": shape.tokens}
        rows["direction"] = direction
        if self.mode == "ring":
            circulate = Circulate.KV
            if direction is Direction.BACKWARD:
                circulate = Circulate(choose_circulate(shape, self.circulate).value)
            return ring_schedule(self.topology, cp_rank, circulate=circulate, **rows)
        rows["heads_kv"] = shape.heads_kv
        if self.mode == "a2a":
            heads = choose_heads_per_exchange(shape, size, self.heads_per_round)
            return a2a_schedule(cp_rank, size, heads_per_round=heads, **rows)
        heads = choose_heads_per_round(shape, size, self.heads_per_round)
        fa4 = self.backend in ("auto", "fa4")
        return gather_schedule(
            cp_rank, size, heads_per_round=heads, rectangular_causal=fa4 or self.backend == "flash",
            **rows,
        )  # fmt: skip

    def tflop(self, direction: Direction) -> float:
        """Work of one GPU in a pass, TFLOP: of the whole sequence, dealt out evenly."""
        shape, size = self.shape, self.topology.cp_size
        pairs = shape.tokens * size * shape.tokens * (0.5 if self.mask is Mask.CAUSAL else 1)
        dims = shape.dim_qk + shape.dim_v
        if direction is Direction.BACKWARD:
            dims = 3 * shape.dim_qk + 2 * shape.dim_v
        return 2 * pairs * shape.batch * shape.heads_q * dims / 1e12


@lru_cache(maxsize=4096)
def attention_time(
    call: AttentionCall,
    hardware: Hardware,
    direction: Direction,
    pass_tflop: float = inf,
    ranks: range | None = None,
) -> Timeline:
    """What happens in one pass of a call.

    Args:
        call: the call.
        hardware: that it runs on.
        direction: which pass.
        pass_tflop: work without pause (`KernelSpeed`); infinite in training.
        ranks: to simulate; None: as many as the time depends on.

    Raises:
        BurstError: if the call cannot run so.
    """
    timer = Timer(hardware, call.backend, pass_tflop)
    programmes = {}
    for rank in _simulated(call) if ranks is None else ranks:
        schedule = call.schedule(rank, direction)
        ops = programme_of(schedule, call.shape, timer, direction, call.pulled)
        programmes[rank] = ops if call.overlap else without_overlap(ops)
    return simulate(programmes, Wiring(hardware, _inter_share(call, hardware)))


def _simulated(call: AttentionCall) -> range:
    """Ranks to simulate: the first and the last of a large group in which all do alike.

    In zigzag the first rank's tiles have half of the queries and all keys, the last one's all
    queries and half of the keys; the others' times lie between theirs.
    """
    topology = call.topology
    nested = topology.inter_size == len(set(topology.host_of))
    even = call.layout is Layout.ZIGZAG or call.mask is Mask.FULL
    if topology.cp_size > _MOST_RANKS and nested and even:
        return range(0, topology.cp_size, topology.cp_size - 1)
    return range(topology.cp_size)


def _inter_share(call: AttentionCall, hardware: Hardware) -> float:
    """Of a network card for a rank: in nested rings all ranks of a host send at the same time."""
    nested = call.topology.inter_size > 1
    senders = (call.topology.intra_size if nested else 1) * call.neighbours
    return hardware.inter_share(senders)


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
    reads, grads = (2, min(3, rounds + 1)) if call.pulled else (min(2, rounds), min(2, rounds))
    come = max(
        sum(len(leaf.rows) for leaves in ranks[1:] for leaf in leaves if leaf.piece.owner == 0)
        for ranks in schedule.leaves
    )
    slots = row * (reads * schedule.num_rows + grads * schedule.share_rows + come)
    group = shape.heads_q // shape.heads_kv
    one = replace(shape, heads_q=heads * group, heads_kv=heads)
    return slots + max(_round_bytes(one, round_) for round_ in schedule.rounds)


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
    reads, grads = (2, min(3, rounds + 1)) if call.pulled else (min(2, rounds), min(2, rounds))
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
