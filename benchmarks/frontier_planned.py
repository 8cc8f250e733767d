"""The planner's predictions of `benchmarks.frontier`, and their errors.

python -m benchmarks.frontier_planned predict OUT.csv --model qwen3-8b --layers 12 --seq 32K
python -m benchmarks.frontier_planned compare MEASURED.csv --predictions OUT.csv

Settings of Megatron's own offloading, and `moe_act`, are left out: the planner does not count them.
Rows of Megatron's own attention are predicted with cuDNN's speed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Annotated

import typer
from typer import Option

from benchmarks import frontier_cases as cases
from benchmarks.documents import SEED
from benchmarks.facts import planner_stamp
from benchmarks.rows import append, check_appendable, read
from benchmarks.runner import App, Csvs, Files, Machine, OutFile
from benchmarks.sheets import FRONTIER_CSV, FrontierRow
from megatron_burst.config import BurstConfig
from megatron_burst.recompute.auto.budget import Placed
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.hardware import GIB, Hardware
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.job.auto import placed_by_auto
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.peer import as_megatron
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy, open_call
from megatron_burst.tools.simulate.sample import Packing
from megatron_burst.tools.simulate.sample import Sample as Lengths

_COUNTED = {"mlp"}, {"moe"}  # modules of selective recomputation
_problem = attrgetter("model", "layers", "seq", "documents", "ranks", "impl", "setting")
app = App()


def strategy_of(setting: cases.Setting, model: Model) -> Strategy | None:
    """A setting as the planner has it; None: it does not count it."""
    config, burst = setting.config, setting.burst or BurstConfig()
    if "offload_modules" in config or setting.name == cases.OWN_LOSS:
        return None
    if config.get("recompute_granularity") == "selective":
        modules = set(config["recompute_modules"])
        return Strategy(recompute="selective") if modules in _COUNTED else None
    if "recompute_granularity" not in config:
        return Strategy(recompute="none")
    again = config["recompute_num_layers"] if config["recompute_method"] == "block" else None
    layers = again or model.layers
    # the last layer's outputs stay on the GPU
    placed = Placed(1, layers - 1) if burst.offloads_results else Placed(layers)
    return Strategy(
        recompute="full", keep=burst.keep, offload=burst.offloads_results,
        keep_budget_gib=burst.keep_budget_gib, again_layers=again,
        placed=tuple((name, placed) for name in burst.keep_modules),
    )  # fmt: skip


def job_of(model: Model, sample: cases.Sample, hardware: Hardware) -> Job:
    """A step of the benchmark, on ranks of one node."""
    lengths = Lengths.of(sample.lengths)
    packing = Packing(Layout.DOCUMENTS, lengths) if sample.documents else None
    return Job(model, sample.seq, sample.ranks, sample.ranks, 1, hardware, packing)


def predict(job: Job, setting: cases.Setting) -> dict[str, float] | None:
    """Columns of a setting's step; None: the planner does not count it."""
    strategy = strategy_of(setting, job.model)
    if strategy is None:
        return None
    strategy = placed_by_auto(job, replace(strategy, cp=job.gpus))
    own = setting.burst is None
    call = as_megatron(open_call(job, strategy), job.hardware) if own else None
    memory = memory_of(job, strategy)
    seconds = step_time(job, strategy, memory, call).seconds
    return {"ms": 1e3 * seconds, "peak_gib": memory.peak / GIB, "host_gib": memory.node / GIB}


def predicted_rows(
    model: Model, sample: cases.Sample, hardware: Hardware, settings: Sequence[cases.Setting]
) -> Iterator[FrontierRow]:
    """A row for each setting that the planner counts."""
    facts, job = planner_stamp(hardware.name), job_of(model, sample, hardware)
    for setting in settings:
        if found := predict(job, setting):
            fits = found["peak_gib"] <= hardware.gpu.memory_gib
            yield FrontierRow(
                run=facts["date"], **facts, **cases.columns_of(model, sample), impl=setting.impl,
                setting=setting.name, turn=1, **found, note="" if fits else "more than the GPU has",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compared:
    """What was measured of a setting, the median over turns, and what was predicted."""

    row: FrontierRow
    predicted: FrontierRow

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of time and of the peak."""
        return self.predicted.ms / self.row.ms - 1, self.predicted.gib / self.row.gib - 1


def compare(rows: Sequence[FrontierRow], made: Sequence[FrontierRow]) -> list[Compared]:
    """The latest run of each setting of each problem, beside the last prediction before it."""
    latest: dict[tuple, str] = {}
    turns: dict[tuple, list[FrontierRow]] = {}
    for row in rows:
        if row.status == "ok" and row.gib:
            problem = _problem(row)
            latest[problem] = max(row.run, latest.get(problem, ""))
            turns.setdefault((row.run, *problem), []).append(row)
    compared = []
    for (run, *problem), some in turns.items():
        before = [one for one in made if _problem(one) == tuple(problem) and one.date < run]
        if run == latest[tuple(problem)] and before:
            middle = replace(
                some[0], ms=median(row.ms for row in some),
                active_gib=median(row.gib for row in some),
            )  # fmt: skip
            compared.append(Compared(middle, before[-1]))
    return compared


def predicted_now(rows: Sequence[FrontierRow], hardware: Hardware) -> list[FrontierRow]:
    """Predictions of all problems that there are rows of, as if written before."""
    made = []
    for name, layers, seq, documents, ranks in dict.fromkeys(_problem(row)[:-2] for row in rows):
        model = replace(cases.MODELS[name], layers=layers)
        sample = cases.Sample(seq, documents.rpartition(f"-{SEED}")[0], ranks)
        every = cases.settings_of(model).values()
        made += predicted_rows(model, sample, hardware, list(every))
    return [replace(row, date="") for row in made]


def report(compared: Sequence[Compared]) -> str:
    """A line for each setting, then the errors' medians and worst, as Markdown."""
    lines = ["| what | ms | predicted | | GiB | predicted | |", "|---|--:|--:|--:|--:|--:|--:|"]
    for one in compared:
        row, time, peak = one.row, *one.errors
        what = f"{row.model} x {row.layers}, {row.seq >> 10}K {row.documents or 'one document'}"
        lines.append(
            f"| {what}: {row.impl}:{row.setting} | {row.ms:.1f} | {one.predicted.ms:.1f} | "
            f"{time:+.1%} | {row.gib:.2f} | {one.predicted.gib:.2f} | {peak:+.1%} |"
        )
    for place, name in enumerate(("time", "peak")) if compared else ():
        sizes = [abs(one.errors[place]) for one in compared]
        near = sum(size <= 0.05 for size in sizes)
        lines.append(
            f"\n{name}: {median(sizes):.1%} off (median), {max(sizes):.1%} (worst), within 5 % in "
            f"{near} of {len(sizes)} settings"
        )
    return "\n".join(lines)


@app.command("predict")
def predict_command(
    out: OutFile,
    model: cases.ModelName = "qwen3-8b",
    layers: cases.Layers = None,
    seq: cases.Tokens = "64K",
    documents: cases.Documents = "drawn",
    ranks: Annotated[int, Option(min=1, help="GPUs of one node, all context-parallel")] = 1,
    hardware: Machine = "h200",
) -> None:
    """Predict all settings of a problem, options as in `benchmarks.frontier measure`."""
    check_appendable(out, FRONTIER_CSV, "OUT")
    sizes, sample = cases.problem_of(model, layers, seq, documents)
    sample = replace(sample, ranks=ranks)
    rows = list(predicted_rows(sizes, sample, hardware_of(hardware), cases.chosen(sizes, "")))
    append(out, rows, FRONTIER_CSV)
    typer.echo(f"{len(rows)} predictions were appended to {out}")


@app.command("compare")
def compare_command(
    csvs: Csvs,
    predictions: Annotated[Files, Option(help="of `predict`; default: predicted now")] = None,
    hardware: Machine = "h200",
) -> None:
    """Errors of time and peak memory, for the latest run of each setting of each problem."""
    rows = read(csvs, FRONTIER_CSV)
    written = read(predictions, FRONTIER_CSV) if predictions else None
    made = predicted_now(rows, hardware_of(hardware)) if written is None else written
    typer.echo(report(compare(rows, made)))


if __name__ == "__main__":
    app()
