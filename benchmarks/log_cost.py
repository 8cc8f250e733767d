"""What `--burst-log` costs a step, and what it says of it, as CSV.

torchrun --nproc-per-node 2 -m benchmarks.log_cost --seq 64K --out cost.csv
torchrun --nproc-per-node 4 -m benchmarks.log_cost --nodes 2 --mode intra=ring --out cost.csv

A step is forward and backward of attention in some layers, without the rest of a model.
"off" and "off again" are without the log: their difference is noise. "log" logs each step.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from typer import Option

from benchmarks.cases import Heads, one_head_count
from benchmarks.facts import stamp
from benchmarks.impls import burst_config
from benchmarks.runner import App, Out, Reps, check_out, interleave, save
from benchmarks.sheets import LOG_CSV, LogRow
from benchmarks.tables import Ratio, spread
from megatron_burst.attention import burst_attention
from megatron_burst.engine.ranges import METER
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.units import whole_number
from megatron_burst.tools.world import World, started

_WHO = "benchmarks.log_cost"
_WAYS = ("off", "off again", "log")
app = App()


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
    reps: Reps = 20,
    nodes: Annotated[int | None, Option(help="pretend so many, sockets between them")] = None,
    device: Device = None,
) -> None:
    """Measure on all ranks together."""
    with started(_WHO, device, nodes) as world:
        mode += f",nodes={nodes}" if nodes else ""
        counts = one_head_count(heads, _WHO)
        problem = Problem(whole_number(seq, "--seq", _WHO), counts, layers, mode)
        check_out(out, world, LOG_CSV)
        for row in save(out, world, measure(problem, world, reps), LOG_CSV):
            if world.rank == 0:
                cells = (item for item in asdict(row).items() if isinstance(item[1], float))
                words = (f"{name} {value:.4g}" for name, value in cells)
                typer.echo(f"{row.way}: {', '.join(words)}")


def measure(problem: Problem, world: World, reps: int) -> list[LogRow]:
    """A row for each way; the same on all ranks but for what the log says of bytes."""
    step = problem.step(world)

    def run(way: str) -> None:
        if way == "log":
            METER.begin_step(timed=True)
        step()
        if way == "log":
            METER.end_step()

    for _ in range(3):  # a step is timed once the one before it was counted
        run("log")
    world.synchronize()
    times = interleave({way: partial(run, way) for way in _WAYS}, reps, world)
    of_ranks = world.gather(METER.seconds())
    log = {
        "attention_ms": 1e3 * max(seconds[""] for seconds in of_ranks),
        "exposed_ms": 1e3 * max(seconds["exposed"] for seconds in of_ranks),
    }
    log |= {f"{link}_mib": METER.sent_bytes()[link] / 2**20 for link in Link}
    facts = stamp(world.device) | asdict(problem) | {"heads": "/".join(map(str, problem.heads))}
    return [
        LogRow(
            **facts, nodes=world.nodes, ranks=world.size, way=way, **spread(ms),
            percent=100 * (Ratio.paired(times["off"], ms).value - 1),
            **(log if way == "log" else {}),
        )
        for way, ms in times.items()
    ]  # fmt: skip


if __name__ == "__main__":
    app()
