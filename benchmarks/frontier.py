"""A training step's time against its peak memory, by setting of recomputation.

python -m benchmarks.frontier measure OUT.csv --model qwen3-8b --seq 64K
torchrun --nproc-per-node 2 -m benchmarks.frontier measure OUT.csv --seq 128K    context parallel
python -m benchmarks.frontier table OUT.csv
python -m benchmarks.frontier plot docs/frontier.png OUT.csv

A step is that of Megatron's DDP and distributed optimizer, with burst's fused loss but in settings
named "own-loss". Settings take turns in one run and train the same weights on the same sample; the
learning rate is 0, so losses and gradient norms can be compared. A row is written after each turn
of a setting. One that fails says why, and is left out of later turns.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from typer import Argument, Option

from benchmarks import frontier_cases as cases
from benchmarks import runner
from benchmarks.facts import now, stamp
from benchmarks.frontier_table import frontier_table
from benchmarks.rows import check_appendable, read
from benchmarks.sheets import FRONTIER_CSV, FrontierRow
from benchmarks.tables import spread
from megatron_burst.errors import require
from megatron_burst.recompute.offload import host_memory
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.terminal import Device
from megatron_burst.tools.world import World, attempt, clean_up, started, timed_ms

if TYPE_CHECKING:
    from benchmarks.frontier_step import Trainer

_GIB = 1 << 30
_LEFT_GIB = 0.1  # memory that a setting leaves allocated, from which on its row says so
app = runner.App()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures."""

    model: Model  # the sizes
    sample: cases.Sample  # what a step trains on
    settings: Sequence[cases.Setting]  # in the order of the first turn
    turns: int = 3  # how often each has its turn
    steps: int = 2  # timed in each turn
    budget_s: float | None = None  # seconds after which nothing new is started; None: no end


def measure(plan: Plan, world: World) -> Iterator[FrontierRow]:
    """The rows of a run, each as soon as it is measured."""
    os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")  # for Megatron's offloading; TE reads it once
    out_of_time = runner.clock(plan.budget_s)
    if world.device.type == "cpu":
        from megatron_burst.tools import cpu_mode

        cpu_mode.install()
    from benchmarks.stack import start  # Megatron warns: after what is refused

    start(world.device.type == "cpu", cp_size=world.size)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it tells of every model built
    from benchmarks.frontier_step import Trainer

    dtype = getattr(torch, runner.usual_dtype(world))
    run = _Run(Trainer(plan.model, plan.sample, dtype), plan, world)
    failed: set[str] = set()
    for turn in range(plan.turns):
        for setting in runner.in_turn(plan.settings, turn):
            if str(setting) in failed:
                continue
            if world.decide(out_of_time()):
                world.progress.say(f"time is up in turn {turn + 1}, before {setting}")
                return
            world.progress.now(f"turn {turn + 1} of {plan.turns}: {setting}")
            row = run.row(setting, turn + 1)
            failed |= {str(setting)} if row.status == "failed" else set()
            yield row


@dataclass
class _Run:
    """One run: its trainer, and what is the same in all of its rows."""

    trainer: "Trainer"
    plan: Plan
    world: World
    began: str = field(default_factory=now)

    def row(self, setting: cases.Setting, turn: int) -> FrontierRow:
        """A setting's turn."""
        before, measured = self._allocated_gib(), {}
        failure = attempt(lambda: measured.update(self._columns(setting)), self.world)
        self.trainer.release()
        clean_up(self.world)
        more = self._allocated_gib() - before
        stays = turn > 1 and more > _LEFT_GIB  # in the first one the optimizer's states do
        notes = failure, f"{more:.2f} GiB more are allocated after it" if stays else None
        return FrontierRow(
            run=self.began, **stamp(self.world.device),
            **cases.columns_of(self.plan.model, self.plan.sample),
            impl=setting.impl, setting=setting.name, turn=turn, **measured,
            status="failed" if failure else "ok", note="; ".join(filter(None, notes)),
        )  # fmt: skip

    def _columns(self, setting: cases.Setting) -> dict[str, Any]:
        """Warm up, then time each step; what a row says of them."""
        left = self._pinned("current")  # Megatron's offloading keeps its buffers for ever
        self.trainer.use(setting)
        for _ in range(setting.warm_up):
            self.trainer.step()
        results: list[tuple[float, float]] = []
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        own = [
            timed_ms(lambda: results.append(self.trainer.step()), self.world)
            for _ in range(self.plan.steps)
        ]
        times = runner.slowest(self.world.gather(own))
        columns = spread(times) | {"each": " ".join(f"{ms:.2f}" for ms in times)}
        columns["tflops"] = cases.flops_of(self.plan.model, self.plan.sample) / columns["ms"] / 1e9
        columns["loss"], columns["grad_norm"] = results[-1]
        if self._on_gpu:
            active = torch.cuda.memory_stats()["active_bytes.all.peak"]
            host = self._pinned("peak") - left
            host += host_memory(self.world.device, None).taken_bytes  # burst pins its own
            own_peaks = torch.cuda.max_memory_allocated(), active, host
            peaks = runner.slowest(self.world.gather(own_peaks))
            names = "peak_gib", "active_gib", "host_gib"
            columns |= {name: peak / _GIB for name, peak in zip(names, peaks, strict=True)}
        return columns

    def _pinned(self, when: str) -> int:
        """Bytes of host memory that torch has pinned: "current", or their "peak"."""
        return torch.cuda.host_memory_stats().get(f"active_bytes.{when}", 0) if self._on_gpu else 0

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def _allocated_gib(self) -> float:
        return torch.cuda.memory_allocated() / _GIB if self._on_gpu else 0.0


@app.command("measure")
def measure_command(
    out: runner.OutFile,
    model: cases.ModelName = "qwen3-8b",
    layers: cases.Layers = None,
    seq: cases.Tokens = "64K",
    documents: cases.Documents = "drawn",
    only: Annotated[str, Option(help="settings, or words in their names; default: all")] = "",
    turns: Annotated[int, Option(min=1, help="of each setting")] = 3,
    steps: Annotated[int, Option(min=1, help="timed in each turn")] = 2,
    budget_s: runner.Budget = None,
    device: Device = None,
) -> None:
    """Measure settings in turns, then show the table."""
    check_appendable(out, FRONTIER_CSV, "OUT")
    sizes, sample = cases.problem_of(model, layers, seq, documents)
    settings, rows = cases.chosen(sizes, only), []
    with started(cases.WHO, device) as world:
        sample = replace(sample, ranks=world.size)
        for row in measure(Plan(sizes, sample, settings, turns, steps, budget_s), world):
            rows += runner.save(out, world, [row], FRONTIER_CSV)
            world.progress.say(_line(row))
        if world.rank == 0:
            typer.echo(frontier_table(rows))


def _line(row: FrontierRow) -> str:
    result = f"{row.ms:.1f} ms" if row.ms else row.note
    peak = f", {row.gib:.2f} GiB" if row.gib else ""
    return f"turn {row.turn}, {row.impl}:{row.setting}: {row.status}, {result}{peak}"


@app.command()
def table(csvs: runner.Csvs) -> None:
    """Time, peak memory and what they come to beside nothing recomputed, as Markdown."""
    typer.echo(frontier_table(read(csvs, FRONTIER_CSV)))


@app.command()
def plot(
    picture: Annotated[Path, Argument(help="what is written, such as docs/frontier.png")],
    csvs: runner.Csvs,
    run: Annotated[runner.Words, Option(help="default: each problem's last")] = None,
) -> None:
    """Peak memory across and time upwards, one panel a run."""
    from benchmarks.frontier_plot import draw_frontier

    rows = read(csvs, FRONTIER_CSV)
    for each in run or ():
        require(cases.WHO, [(
            any(row.run.startswith(each) for row in rows), "--run must name a run of the CSVs, "
            "because a panel is one", each, "name one of theirs",
        )])  # fmt: skip
    draw_frontier([row for row in rows if not run or row.run.startswith(tuple(run))], picture)
    typer.echo(picture)


if __name__ == "__main__":
    app()
