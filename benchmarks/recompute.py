"""What recomputation costs in time and saves in memory, on a stack of Megatron's layers.

torchrun --nproc-per-node 4 -m benchmarks.recompute --seq 64K,256K,1M --layers 4
python -m benchmarks.recompute --help
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from benchmarks import runner
from benchmarks.bench import Memory
from benchmarks.cases import one_head_count
from benchmarks.facts import link_speed, stamp
from benchmarks.layers import ATTENTION, Mode, Widths, modes_of
from benchmarks.sheets import RECOMPUTE_CSV, Row
from benchmarks.steps_table import draw_trade, trade_table
from benchmarks.tables import repetitions, spread
from megatron_burst.tools.terminal import Device, Nodes
from megatron_burst.tools.units import whole_numbers
from megatron_burst.tools.world import World, attempt, clean_up, started, timed_ms

if TYPE_CHECKING:
    from benchmarks.stack import Stack

_WHO = "benchmarks.recompute"
_REPS = 5
app = runner.App()


def measure(plan: runner.Plan, world: World, say: Callable[[str], None] | None = None) -> list[Row]:
    """Run a plan on all ranks together, which are one context-parallel group; returns the rows, on
    every rank. Of a single repetition, that is timed whose memory is measured. BurstError if
    `plan.out` has other columns."""
    runner.check_out(plan.out, world, RECOMPUTE_CSV)
    from benchmarks.stack import start  # Megatron warns: after what is refused

    start(world.device.type == "cpu", world.size)
    plan = replace(plan, reps=plan.reps or _REPS)
    out_of_time, link = runner.clock(plan.budget_s), link_speed(world)

    def rows_of(part: _Part) -> list[Row]:
        return runner.save(plan.out, world, part.rows(), RECOMPUTE_CSV)

    every = product(plan.cases, dict.fromkeys(mode.impl for mode in plan.impls))
    parts = [_Part(*pair, plan, world, link, out_of_time) for pair in every]
    return runner.sweep(parts, rows_of, world, out_of_time, say)


@dataclass(slots=True)
class _Part:
    """One problem with one attention: its modes share the weights, and turns."""

    widths: Widths
    impl: str  # whose attention
    plan: runner.Plan
    world: World
    link: str
    out_of_time: Callable[[], bool]
    stack: "Stack | None" = None
    failures: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, float | None] = field(default_factory=dict)
    alone: dict[str, list[float]] = field(default_factory=dict)  # ms of the run that counts memory
    facts: dict[str, str] = field(default_factory=dict)  # after the repetitions of all modes

    def __str__(self) -> str:
        return f"{self.widths}; attention: {self.impl}"

    def rows(self) -> list[Row]:
        """Measure, then free everything."""
        modes = [mode for mode in self.plan.impls if mode.impl == self.impl]
        failure = attempt(self._build, self.world)
        for mode in modes:
            self.world.progress.now(f"{mode}: trying it out")
            if reason := failure or self._try_out(mode):
                self.failures[str(mode)] = reason
        able = {str(mode): mode for mode in modes if str(mode) not in self.failures}
        runs = {name: partial(self._run, mode) for name, mode in able.items()}
        times = self._times(runs) if self.plan.reps > 1 else self.alone
        self.facts = stamp(self.world.device)
        rows = [self._row(mode, times.get(str(mode))) for mode in modes]
        if able:  # what keeping can save: the forward pass of attention alone
            self.stack.use(Mode(self.impl, "off", "off"))
            (ms,) = self._times({ATTENTION: self.stack.attention_alone()}).values()
            flops = self.widths.attention_flops
            rows.append(self._row(Mode(self.impl, ATTENTION), ms, "fwd", flops))
        self.stack = None
        clean_up(self.world)
        return rows

    def _times(self, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        return runner.interleave(runs, self.plan.reps, self.world, self.out_of_time)

    def _build(self) -> None:
        from benchmarks.stack import Stack

        self.stack = Stack(self.widths, burst=self.impl == "burst")

    def _try_out(self, mode: Mode) -> str | None:
        """Run it twice: the first pass allocates what stays, the second's memory counts."""
        world, name, times = self.world, str(mode), []
        run = partial(self._run, mode)
        failure = attempt(run, world)
        clean_up(world)
        memory = Memory(world)
        memory.restart()
        failure = failure or attempt(lambda: times.append(timed_ms(run, world)), world)
        self.peaks[name] = None if failure else memory.peak_gib(0)
        self.alone[name] = [] if failure else [max(world.gather(times[0]))]
        clean_up(world)
        return failure

    def _run(self, mode: Mode) -> None:
        self.stack.use(mode)
        self.stack.run()

    def _row(
        self, mode: Mode, ms: list[float] | None, which: str = "fwd_bwd", flops: float | None = None
    ) -> Row:
        widths, world = self.widths, self.world
        measured = {"status": "failed", "note": self.failures.get(str(mode), "time was up")}
        if ms:
            measured = spread(ms) | {
                "peak_gib": self.peaks.get(str(mode)),
                "note": f"{widths.layers} layers, hidden {widths.hidden}, ffn {widths.ffn}; "
                f"model FLOPs; {repetitions(ms)}",
            }
            rate = (flops or widths.flops) / world.size / measured["ms"] / 1e9
            measured["tflops_per_gpu"] = rate
        return Row(
            **self.facts, link=self.link, nodes=world.nodes, ranks=world.size,
            seq=widths.seq, batch=widths.batch, heads_q=widths.heads_q, heads_kv=widths.heads_kv,
            head_dim_qk=widths.head_dim, head_dim_v=widths.head_dim, mask="causal",
            dtype=widths.dtype, impl=mode.impl, mode=mode.name, pass_=which, **measured,
        )  # fmt: skip


@app.command()
def main(
    seq: Annotated[str, Option(help="tokens of the whole sequence, e.g. 64K,256K,1M")] = "64K",
    heads: Annotated[str, Option(help="query heads / KV heads")] = "32/8",
    head_dim: Annotated[int, Option(min=1, help="head dimension")] = 128,
    layers: Annotated[int, Option(min=1, help="layers of the stack")] = 4,
    hidden: Annotated[int, Option(min=1, help="model width")] = 4096,
    ffn: Annotated[int, Option(min=1, help="width of the gated MLP")] = 14336,
    batch: Annotated[int, Option(min=1, help="sequences")] = 1,
    mode: Annotated[runner.Words, Option(help="such as burst:all; default: all")] = None,
    dtype: runner.Dtype = None,
    out: runner.Out = Path("recompute.csv"),
    reps: runner.Reps = _REPS,
    budget_s: runner.Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Time and memory of a stack of Megatron's layers by how it recomputes and what it keeps."""
    sizes = layers, hidden, ffn, *one_head_count(heads, _WHO), head_dim
    lengths, modes = whole_numbers(seq, "--seq", _WHO), modes_of(mode or ())
    with started(_WHO, device, nodes) as world:
        modes = modes_of(mode or (), world.size)
        dtype = dtype or runner.usual_dtype(world)
        problems = [Widths(*sizes, tokens, batch, dtype) for tokens in lengths]
        rows = measure(runner.Plan(problems, modes, reps, budget_s, out), world)
        if world.rank == 0 and rows:
            typer.echo(trade_table(rows))
            for path in draw_trade(rows, out.with_suffix("")):
                typer.echo(path)


if __name__ == "__main__":
    app()
