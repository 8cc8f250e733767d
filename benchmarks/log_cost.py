"""What `--burst-log` costs a step, and what it says of it, as CSV.

torchrun --nproc-per-node 2 -m benchmarks.log_cost --seq 64K --out cost.csv
torchrun --nproc-per-node 4 -m benchmarks.log_cost --nodes 2 --mode intra=ring --out cost.csv

A step is forward and backward of attention in some layers, without the rest of a model.
"off" and "off again" are without the log: their difference is noise. "log" logs each step.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks.cases import Heads, one_head_count
from benchmarks.facts import gpu_state, versions
from benchmarks.impls import burst_config
from benchmarks.ratios import Ratio
from benchmarks.rows import Sheet
from benchmarks.sweep import Out, check_out, interleave, new_app, save
from megatron_burst.attention import burst_attention
from megatron_burst.engine.watch import METER
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.terminal import Device, in_one_sentence
from megatron_burst.tools.units import whole_number
from megatron_burst.tools.world import World, started

_WHO = "benchmarks.log_cost"
_WAYS = ("off", "off again", "log")
app = new_app()


@dataclass(frozen=True, slots=True)
class CostRow:
    """One way of one problem; fields are columns.

    Attributes:
        date, versions, gpu: when, of what took part, of rank 0's device.
        nodes, ranks, seq, heads, layers: of the problem; `seq` over all ranks, `heads` query/KV.
        mode: options of burst.
        way: "off", "off again" or "log".
        ms, ms_min, ms_max: of a step, of the slowest rank: median and spread over repetitions.
        percent: above "off": median of the differences of neighbouring repetitions.
        attention_ms, exposed_ms: what the log says of the last step, of the worst rank; None
            unless it logs.
        intra_ms, inter_ms: of transfers by link, which the log no longer says.
        intra_mib, inter_mib: sent by rank 0 in the step, likewise.
    """

    date: str
    versions: str
    gpu: str
    nodes: int
    ranks: int
    seq: int
    heads: str
    layers: int
    mode: str
    way: str
    ms: float
    ms_min: float
    ms_max: float
    percent: float
    attention_ms: float | None = None
    exposed_ms: float | None = None
    intra_ms: float | None = None
    inter_ms: float | None = None
    intra_mib: float | None = None
    inter_mib: float | None = None


LOG_CSV = Sheet(_WHO, CostRow)


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of some layers."""

    seq: int
    heads: Heads
    layers: int
    mode: str

    def step(self, world: World):
        """What a step runs: forward of all layers, then backward."""
        num_q, num_kv = self.heads
        q, k, v, dout = (
            torch.randn(self.seq // world.size, 1, heads, 128, device=world.device).bfloat16()
            for heads in (num_q, num_kv, num_kv, num_q)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attend = partial(burst_attention, qkv_format="sbhd", config=burst_config(self.mode))

        def step() -> None:
            outs = [attend(*leaves, layer=layer + 1) for layer in range(self.layers)]
            for out in reversed(outs):
                torch.autograd.grad(out, leaves, dout)

        return step


@app.command()
def main(
    out: Out,
    seq: Annotated[str, Option(help="tokens of the whole sequence")] = "64K",
    heads: Annotated[str, Option(help="query heads / KV heads")] = "32/8",
    layers: Annotated[int, Option(help="of a step")] = 8,
    mode: Annotated[str, Option(help="options of burst")] = "intra=gather",
    reps: Annotated[int, Option(help="repetitions")] = 20,
    nodes: Annotated[int | None, Option(help="pretend so many, sockets between them")] = None,
    device: Device = None,
) -> None:
    """Measure on all ranks together."""
    with in_one_sentence(), started(_WHO, device, nodes) as world:
        mode += f",nodes={nodes}" if nodes else ""
        counts = one_head_count(heads, _WHO)
        problem = Problem(whole_number(seq, "--seq", _WHO), counts, layers, mode)
        check_out(out, world, LOG_CSV)
        rows = measure(problem, world, reps)
        save(out, world, rows, LOG_CSV)
        for row in rows if world.rank == 0 else ():
            typer.echo(_in_words(row))


def measure(problem: Problem, world: World, reps: int) -> list[CostRow]:
    """A row for each way; the same on all ranks but for what the log says of bytes."""
    step = problem.step(world)

    def run(way: str) -> None:
        if way != "log":
            step()
            return
        METER.begin_step(timed=True)
        step()
        METER.end_step()

    for _ in range(3):  # a step is timed once the one before it was counted
        run("log")
    world.synchronize()
    runs = {way: partial(run, way) for way in _WAYS}
    times = interleave(runs, dict.fromkeys(_WAYS, reps), world, lambda: False)
    said = world.gather(METER.seconds())
    worst = {name: max(theirs[name] for theirs in said) for name in said[0]}
    return [_row(problem, world, way, times, worst) for way in _WAYS]


def _row(
    problem: Problem, world: World, way: str, times: dict[str, list[float]], worst: dict[str, float]
) -> CostRow:
    mine, off = times[way], times["off"]
    above = 100 * (Ratio.paired(off, mine).value - 1)
    log = {}
    if way == "log":
        names = {"attention": "", "exposed": "exposed"}
        log = {f"{column}_ms": 1e3 * worst[name] for column, name in names.items()}
        log |= {f"{link}_mib": METER.sent_bytes()[link] / 2**20 for link in Link}
    return CostRow(
        datetime.now(UTC).isoformat(timespec="seconds"), versions(), gpu_state(world.device),
        world.nodes, world.size, problem.seq, "/".join(map(str, problem.heads)), problem.layers,
        problem.mode, way,
        median(mine), min(mine), max(mine), above, **log,
    )  # fmt: skip


def _in_words(row: CostRow) -> str:
    cells = {name: value for name, value in asdict(row).items() if isinstance(value, float)}
    return f"{row.way}: " + ", ".join(f"{name} {value:.4g}" for name, value in cells.items())


if __name__ == "__main__":
    app()
