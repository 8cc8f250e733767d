"""`plan --cu-seqlens` without a length: attention of one packed sample, work and bytes by rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Column, Table

from megatron_burst.errors import BurstError
from megatron_burst.logs import Decision
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout, positions, positions_in_documents
from megatron_burst.schedule.mask import Mask, Positions
from megatron_burst.schedule.modes import describe_mode
from megatron_burst.schedule.program import Attend, Program
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import MIB, Hardware
from megatron_burst.tools.job.strategy import Job, Strategy, least_multiple, misfit, open_call
from megatron_burst.tools.simulate.call import AttentionCall, attention_time, program, resolved
from megatron_burst.tools.simulate.kernels import Parts, Timer
from megatron_burst.tools.simulate.sample import Packing, Sample, numbers_in
from megatron_burst.tools.terminal import new_console, say

_SHOWN = 16  # ranks of which each is told


@dataclass(frozen=True, slots=True)
class Way:
    """How attention of a sample would run in one layout."""

    sample: Sample  # with the padding that the layout needs
    padding: int  # its tokens
    call: AttentionCall  # how it runs
    why: Decision  # its mode, and why it was chosen
    # pairs of queries and keys that each rank computes, for as many heads as the call has
    work: tuple[float, ...]
    sent: tuple[int, ...]  # bytes that each rank sends in both passes
    seconds: tuple[float, float]  # of each pass, by the programs that the engine runs
    exposed: float  # seconds of both in which kernels of the last rank wait for transfers

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
    """How a sample, `given` without padding, runs on the ranks of a call with open choices.

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
    times = [attention_time(call, hardware, way, ranks=ranks, sample=sample) for way in Direction]
    return Way(
        sample, sample.tokens - given.tokens, call, resolve(opened)[1]["intra"],
        tuple(_work(passes[0], timer, shape.heads_q) for passes in programs),
        tuple(sum(sum(one.sent_bytes().values()) for one in passes) for passes in programs),
        (times[0].seconds, times[1].seconds),
        sum(time.exposed(link) for time in times for link in Link),
    )  # fmt: skip


def _work(program: Program, timer: Timer, heads: int) -> float:
    """Pairs of a forward pass; those of a kernel of few heads count for its share of all heads."""
    parts = Parts(program)
    kernels = (parts.tile_of(op) for op in program.ops if isinstance(op, Attend))
    return sum(timer.pairs(tile) * shape.heads_q / heads for tile, shape in kernels)


def rows_of_rank(way: Way, rank: int) -> Positions:
    """Positions of the queries that a rank holds."""
    size = way.call.topology.cp_size
    if way.call.layout is Layout.DOCUMENTS:
        return positions_in_documents(way.sample.edges, rank, size)
    return positions(way.call.layout, rank, size, way.call.shape.tokens)


def plan_sample(job: Job, path: Path, sizes: Mapping[str, int]) -> tuple[dict[str, Way], str]:
    """Print what attention of a sample, in a file, takes; how it can run, by name, and what it is.

    The job's length and batch are not used; without a size of CP it has all GPUs that TP leaves.

    Raises:
        BurstError: if the file has no documents, or the sizes fit no job.
    """
    numbers = numbers_in(path)
    sample = Sample.of(numbers)
    ways = _ways(job, sizes, sample)
    working = {name: way for name, way in ways.items() if isinstance(way, Way)}
    if not working:
        raise BurstError(next(str(way) for way in ways.values()).removeprefix("burst attention: "))
    read = "boundaries" if sample.edges == tuple(numbers) else "lengths"
    title = (
        f"{job.model.base_name}, {job.hardware.name}: a packed sample of {sample.tokens:,} tokens "
        f"in {len(sample.lengths)} documents, the longest {max(sample.lengths):,}"
    )
    console = new_console()
    say(console, f"{title} ({path.name} has {read})")
    say(console, f"it has {sample.share:.1%} of one causal sequence's work; one layer's attention:")
    console.print(_table(working))
    for name, way in ways.items():
        if isinstance(way, Way) and way.why.reason != "asked for":
            say(console, f'"{name}" runs as {way.why.value}, because {way.why.reason}')
        elif not isinstance(way, Way):
            say(console, f'"{name}": {way}', "refused: ", "yellow")
    return working, title


def _ways(job: Job, sizes: Mapping[str, int], sample: Sample) -> dict[str, Way | BurstError]:
    """Both layouts as burst runs them; where an all-to-all runs, also with rows that stay."""
    tp = sizes.get("tp", 1)
    cp = sizes.get("cp", max(1, job.gpus // tp))
    strategy = Strategy(tp=tp, cp=cp, dp=max(1, job.gpus // (tp * cp)))
    seq = -(-sample.tokens // least_multiple(strategy)) * least_multiple(strategy)
    job = replace(job, seq=seq, batch=strategy.dp)
    if why := misfit(job, strategy):
        raise BurstError(
            "plan: --gpus, --tp and --cp must fit the model and each other, because ranks share "
            f"heads and tokens evenly; got {why}; choose other sizes"
        )
    call = open_call(job, strategy)
    stays = replace(call, intra="gather", inter="ring")
    every = {
        "THD (--sft): each document zigzag": (call, Layout.DOCUMENTS),
        "documents at any token": (call, Layout.ZIGZAG),
        "any token, rows stay": (stays, Layout.ZIGZAG),
    }
    ways = {name: _way(*how, sample, job.hardware) for name, how in every.items()}
    other = ways["documents at any token"]
    if isinstance(other, Way) and other.call.intra != "a2a":
        del ways["any token, rows stay"]
    return ways


def _way(call, layout: Layout, sample: Sample, hardware: Hardware) -> Way | BurstError:
    try:
        return way_of(call, sample, hardware, layout)
    except BurstError as error:
        return error


def _table(ways: Mapping[str, Way]) -> Table:
    table = Table("", *(Column(name, justify="right") for name in ways))
    every = list(ways.values())
    rows = {
        "runs as": [describe_mode(way.call) for way in every],
        "tokens of padding": [f"{way.padding:,}" for way in every],
        "work, slowest / mean": [f"{way.imbalance:.2f}" for way in every],
        "forward, ms": [f"{1e3 * way.seconds[0]:.3g}" for way in every],
        "backward, ms": [f"{1e3 * way.seconds[1]:.3g}" for way in every],
        "of that exposed, ms": [f"{1e3 * way.exposed:.3g}" for way in every],
        "TFLOP/s per GPU": [f"{way.tflops:.0f}" for way in every],
    }
    for rank in range(min(_SHOWN, len(every[0].work))):
        rows[f"rank {rank}: work / mean, MiB sent"] = [
            f"{way.work[rank] * len(way.work) / sum(way.work):.2f}, {way.sent[rank] / MIB:,.0f}"
            for way in every
        ]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    if (more := len(every[0].work) - _SHOWN) > 0:
        table.caption = f"{more} more ranks"
    return table
