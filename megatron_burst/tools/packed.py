"""Attention of one packed sample: work and bytes sent by rank, and the time of both passes."""

from dataclasses import dataclass, replace

from megatron_burst.resolve import resolve
from megatron_burst.say import Choice
from megatron_burst.schedule.layout import Layout, places_in_documents, positions
from megatron_burst.schedule.mask import Mask, Places
from megatron_burst.schedule.program import Attend, Program
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.simulate.call import AttentionCall, attention_time, program, resolved
from megatron_burst.tools.simulate.kernels import OpTimer, Timer
from megatron_burst.tools.simulate.sample import Packing, Sample


@dataclass(frozen=True, slots=True)
class Way:
    """How attention of a sample would run in one layout.

    Attributes:
        sample: with the padding that the layout needs.
        padding: its tokens.
        call: how it runs.
        why: its mode, and why it was chosen.
        work: pairs of queries and keys that each rank computes, for as many heads as the call has.
        sent: bytes that each rank sends in both passes.
        seconds: of each pass, by the programs that the engine runs.
        exposed: seconds of both passes in which kernels of the last rank wait for transfers.
    """

    sample: Sample
    padding: int
    call: AttentionCall
    why: Choice
    work: tuple[float, ...]
    sent: tuple[int, ...]
    seconds: tuple[float, float]
    exposed: float

    @property
    def imbalance(self) -> float:
        """Work of the slowest rank over the mean."""
        return max(self.work) * len(self.work) / sum(self.work)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s per GPU in both passes: forward has two products, backward five."""
        shape = self.call.shape
        flops = 3.5 * 2 * sum(self.work) * shape.heads_q * (shape.dim_qk + shape.dim_v)
        return flops / len(self.work) / sum(self.seconds) / 1e12


def way_of(call: AttentionCall, given: Sample, hardware: Hardware, layout: Layout) -> Way:
    """How a sample runs on the ranks of a call.

    Args:
        call: heads, topology and options, with choices open; its tokens are the sample's.
        given: the documents, without padding.
        hardware: the cluster's.
        layout: ZIGZAG, where documents start at any token, or DOCUMENTS.

    Raises:
        BurstError: if burst has no mode for it.
    """
    ranks = range(call.topology.cp_size)
    sample = Packing(layout, given).sharded(len(ranks))
    assert sample
    shape = replace(call.shape, tokens=sample.tokens // len(ranks))
    mask = Mask(right=0, documents=True)
    opened = replace(call, shape=shape, layout=layout, mask=mask)
    call = resolved(opened)
    programs = [[program(call, rank, way) for way in Direction] for rank in ranks]
    timer = Timer(hardware, call.backend, sample=sample)
    times = [
        attention_time(call, hardware, way, ranks=ranks, with_spans=False, sample=sample)
        for way in Direction
    ]
    return Way(
        sample, sample.tokens - given.tokens, call, resolve(opened).why["intra"],
        tuple(_work(both[0], timer, shape.heads_q) for both in programs),
        tuple(sum(sum(one.sent_bytes().values()) for one in both) for both in programs),
        (times[0].seconds, times[1].seconds),
        sum(time.exposed(link) for time in times for link in Link),
    )  # fmt: skip


def _work(program: Program, timer: Timer, heads: int) -> float:
    """Pairs of a forward pass, in units of all heads: a kernel of few heads counts for its
    share."""
    timed = OpTimer(program, timer)
    kernels = (timed.tile_of(op.q, op.kv, op) for op in program.ops if isinstance(op, Attend))
    return sum(timer.pairs(tile) * shape.heads_q / heads for tile, shape in kernels)


def rows_of_rank(way: Way, rank: int) -> Places:
    """Positions of the queries that a rank holds."""
    size = way.call.topology.cp_size
    if way.call.layout is Layout.DOCUMENTS:
        return places_in_documents(way.sample.edges, rank, size)
    return positions(way.call.layout, rank, size, way.call.shape.tokens)
