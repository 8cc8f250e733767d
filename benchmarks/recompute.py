"""What recomputation costs in time and saves in memory, on a stack of Megatron's layers.

torchrun --nproc-per-node 4 -m benchmarks.recompute --seq 64K,256K,1M --layers 4
python -m benchmarks.recompute --help
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Option

from benchmarks.cases import one_head_count
from benchmarks.facts import gpu_state, link_speed, versions
from benchmarks.layers import ATTENTION, Mode, Widths, modes_of
from benchmarks.recompute_table import draw_if_possible, trade_table
from benchmarks.results import Memory, repetitions
from benchmarks.rows import RECOMPUTE_CSV, Row
from benchmarks.sweep import (
    Budget,
    Dtype,
    Out,
    check_out,
    clock,
    interleave,
    new_app,
    save,
    sweep,
    usual_dtype,
)
from megatron_burst.config import BurstConfig
from megatron_burst.tools.terminal import Device, Nodes, in_one_sentence
from megatron_burst.tools.units import whole_numbers
from megatron_burst.tools.world import World, attempt, clean_up, started, timed_ms

if TYPE_CHECKING:
    from benchmarks.stack import Stack

_WHO = "benchmarks.recompute"
app = new_app()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        problems: sizes, in order.
        modes: what each is measured with.
        options: burst's other options.
        reps: repetitions, in turns; a single one is that whose memory is measured.
        budget_s: seconds after which nothing new is started; None: no end.
        out: CSV that rank 0 appends to; None: nowhere.
    """

    problems: Sequence[Widths]
    modes: Sequence[Mode]
    options: BurstConfig = BurstConfig()
    reps: int = 5
    budget_s: float | None = None
    out: Path | None = None


def measure(plan: Plan, world: World, say: Callable[[str], None] | None = None) -> list[Row]:
    """Run a plan on all ranks together; returns the rows, on every rank.

    Args:
        plan: the same on all ranks.
        world: all ranks; they are one context-parallel group.
        say: see `sweep`.

    Raises:
        BurstError: if `plan.out` has other columns.
    """
    check_out(plan.out, world, RECOMPUTE_CSV)
    from benchmarks.stack import start  # Megatron warns: after what is refused

    start(world.device.type == "cpu", world.size)
    out_of_time, link = clock(plan.budget_s), link_speed(world)
    impls = dict.fromkeys(mode.impl for mode in plan.modes)

    def rows_of(what: _What) -> list[Row]:
        made = _Part(*what, plan, world, link, out_of_time).rows()
        save(plan.out, world, made, RECOMPUTE_CSV)
        return made

    every = [_What(*pair) for pair in product(plan.problems, impls)]
    return sweep(every, rows_of, world, out_of_time, say)


class _What(NamedTuple):
    """A problem, and whose attention."""

    widths: Widths
    impl: str

    def __str__(self) -> str:
        return f"{self.widths}; attention: {self.impl}"


class _Part:
    """One problem with one attention: its modes share the weights, and turns."""

    def __init__(
        self, widths: Widths, impl: str, plan: Plan, world: World, link: str,
        out_of_time: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.widths, self.impl, self.plan, self.world = widths, impl, plan, world
        self.link, self.out_of_time = link, out_of_time
        self.gpu = ""  # its state after the repetitions of all modes
        self.stack: Stack | None = None
        self.failures: dict[str, str] = {}
        self.peaks: dict[str, float | None] = {}
        self.alone: dict[str, list[float]] = {}  # ms of the run whose memory is measured

    def rows(self) -> list[Row]:
        """Measure, then free everything."""
        modes = [mode for mode in self.plan.modes if mode.impl == self.impl]
        failure = attempt(self._build, self.world)
        for mode in modes:
            self.world.progress.now(f"{mode}: trying it out")
            failure_of_it = failure or self._try_out(mode)
            if failure_of_it:
                self.failures[str(mode)] = failure_of_it
        able = {str(mode): mode for mode in modes if str(mode) not in self.failures}
        runs = {name: partial(self._run, mode) for name, mode in able.items()}
        times = self._times(runs) if self.plan.reps > 1 else self.alone
        self.gpu = gpu_state(self.world.device)
        made = [self._row(mode, times.get(str(mode))) for mode in modes]
        if able:
            made.append(self._attention_row())
        self.stack = None
        clean_up(self.world)
        return made

    def _times(self, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        reps = dict.fromkeys(runs, self.plan.reps)
        return interleave(runs, reps, self.world, self.out_of_time)

    def _build(self) -> None:
        from benchmarks.stack import Stack

        self.stack = Stack(self.widths, burst=self.impl == "burst")

    def _attention_row(self) -> Row:
        """What keeping can save: the forward pass of attention alone."""
        Mode(self.impl, "off", "off").apply(self.stack, self.widths, self.plan.options)
        (ms,) = self._times({"attention": self.stack.attention_alone()}).values()
        return self._row(Mode(self.impl, ATTENTION), ms, "fwd", self.widths.attention_flops)

    def _try_out(self, mode: Mode) -> str | None:
        """Run it twice: the first pass allocates what stays, the second's memory counts."""
        world, name, mine = self.world, str(mode), []
        failure = attempt(partial(self._run, mode), world)
        clean_up(world)
        memory = Memory(world)
        memory.restart()
        failure = failure or attempt(
            lambda: mine.append(timed_ms(partial(self._run, mode), world)), world
        )
        self.peaks[name] = None if failure else memory.peak_gib(0)
        self.alone[name] = [] if failure else [max(world.gather(mine[0]))]
        clean_up(world)
        return failure

    def _run(self, mode: Mode) -> None:
        mode.apply(self.stack, self.widths, self.plan.options)
        self.stack.run()

    def _row(
        self, mode: Mode, ms: list[float] | None, which: str = "fwd_bwd", flops: float | None = None
    ) -> Row:
        widths, world = self.widths, self.world
        measured = {"status": "failed", "note": self.failures.get(str(mode), "time was up")}
        if ms:
            middle = median(ms)
            measured = {
                "ms": middle,
                "ms_min": min(ms),
                "ms_max": max(ms),
                "tflops_per_gpu": (flops or widths.flops) / world.size / middle / 1e9,
                "peak_gib": self.peaks.get(str(mode)),
                "note": f"{widths.layers} layers, hidden {widths.hidden}, ffn {widths.ffn}; "
                f"model FLOPs; {repetitions(ms)}",
            }
        return Row(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(), gpu=self.gpu, link=self.link,
            nodes=world.nodes, ranks=world.size,
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
    mode: Annotated[
        list[str] | None, Option(help="repeatable, e.g. burst:all, megatron:full; default: all")
    ] = None,
    dtype: Dtype = None,
    out: Out = Path("recompute.csv"),
    reps: Annotated[int, Option(min=1)] = 5,
    budget_s: Budget = None,
    nodes: Nodes = None,
    device: Device = None,
) -> None:
    """Time and memory of a stack of Megatron's layers by how it recomputes and what it keeps."""
    with in_one_sentence():
        sizes = layers, hidden, ffn, *one_head_count(heads, _WHO), head_dim
        lengths, modes = whole_numbers(seq, "--seq", _WHO), modes_of(mode or ())
        with started(_WHO, device, nodes) as world:
            modes = modes_of(mode or (), world.size)
            dtype = dtype or usual_dtype(world)
            problems = [Widths(*sizes, tokens, batch, dtype) for tokens in lengths]
            plan = Plan(problems, modes, reps=reps, budget_s=budget_s, out=out)
            rows = measure(plan, world)
            if world.rank == 0 and rows:
                typer.echo(trade_table(rows))
                for path in draw_if_possible(rows, out.with_suffix("")):
                    typer.echo(path)


if __name__ == "__main__":
    app()
