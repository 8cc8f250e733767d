"""The planner's predictions against measurements: a table, a plot, and what was fitted.

python -m benchmarks.validate_plan             all results; writes docs/planner_errors.*
python -m benchmarks.validate_plan MINE.csv    prints the table
python -m benchmarks.validate_plan MINE.csv --predictions P.csv    beside what predict.py wrote

Speeds of the H200's preset were fitted to one node's rows of 64K and 256K tokens only. Rows of
other implementations, of CPUs and failures are not predicted, and counted as such.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from typer import Argument, Option

from benchmarks.planned import Prediction, is_of_layers, is_standin, predict
from benchmarks.rows import SUPERSEDED, is_packed, read
from benchmarks.runner import App, Files
from benchmarks.sheets import ANY_CSV, ANY_PACKED_CSV, COLUMNS, Row
from benchmarks.style import SERIES, legend_below, measured_on, picture
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.units import in_units

ROOT = Path(__file__).parents[1]
FITTED = (64 << 10, 256 << 10)
ALIKE = 1.002  # by what predictions differ that say the same
SHAPE = (
    "nodes", "ranks", "seq", "batch", "heads_q", "heads_kv", "head_dim_qk", "head_dim_v", "mask",
    "dtype", "impl", "mode", "pass_",
)  # fmt: skip
KINDS = (  # what is summed up apart
    "64K and 256K on one node (speeds fitted)", "other lengths on one node",
    "several nodes (links as measured in the run)", "layers of Megatron's under recomputation",
    "TransformerEngine's p2p on one node, for which a ring of K, V over all ranks stands in",
    "TransformerEngine's p2p on several nodes",
)  # fmt: skip
Predictor = Callable[[Row], Prediction | None]
app = App()


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and what was predicted for it."""

    row: Row
    predicted: Prediction

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return self.predicted.ms / self.row.ms - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory, where both are known."""
        gib = self.predicted.gib
        return gib / self.row.peak_gib - 1 if gib and self.row.peak_gib else None

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if is_of_layers(self.row):
            return KINDS[3]
        if is_standin(self.row):
            return KINDS[4 + (self.row.nodes > 1)]
        if self.row.nodes > 1:
            return KINDS[2]
        return KINDS[self.row.seq not in FITTED]


def compare(rows: Sequence[Row], predictor: Predictor = predict) -> list[Compared]:
    """Rows that could run and are predicted."""
    able = [row for row in rows if row.status == "ok"]
    return [Compared(row, found) for row in able if (found := predictor(row))]


def written(predictions: Sequence[Row]) -> Predictor:
    """Predictions that predict.py wrote before a row was measured; later ones do not count."""
    known: dict[tuple, list[Row]] = {}
    for one in predictions:
        known.setdefault(_problem(one), []).append(one)

    def look_up(row: Row) -> Prediction | None:
        before = [one for one in known.get(_problem(row), ()) if one.date < row.date]
        return Prediction(before[-1].ms, before[-1].peak_gib) if before else None

    return look_up


def _problem(row: Row) -> tuple:
    layers = row.note.partition(";")[0] if is_of_layers(row) else ""
    return *attrgetter(*SHAPE)(row), layers


def summary(errors: Sequence[float]) -> str:
    """Median and worst of relative errors, in per cent."""
    sizes = [abs(error) for error in errors]
    return f"{100 * median(sizes):.1f} % (median), {100 * max(sizes):.1f} % (worst)"


HEAD = (
    "what", "ranks", "nodes", "seq", "heads", "variant", "pass", "ms", "predicted ms", "error",
    "GiB", "predicted GiB", "error of GiB",
)  # fmt: skip


def table(compared: Sequence[Compared]) -> list[tuple[object, ...]]:
    """By the columns of HEAD, one line a row of the CSVs."""
    lines = []
    for one in sorted(compared, key=_order):
        row, memory = one.row, one.memory_error
        gib: tuple[str, ...] = ("", "", "")
        if memory is not None:
            gib = f"{row.peak_gib:.2f}", f"{one.predicted.gib:.2f}", f"{memory:+.1%}"
        lines.append((
            "layers" if is_of_layers(row) else "attention", row.ranks, row.nodes,
            in_units(row.seq), f"{row.heads_q}/{row.heads_kv}", f"{row.impl}:{row.mode}",
            row.pass_, f"{row.ms:.2f}", f"{one.predicted.ms:.2f}", f"{one.error:+.1%}", *gib,
        ))  # fmt: skip
    return lines


def _order(one: Compared) -> tuple:
    row, kind = one.row, KINDS.index(one.kind)
    return kind, row.ranks, row.seq, -row.heads_q, -row.heads_kv, row.pass_, row.impl, row.mode


def choices(compared: Sequence[Compared]) -> list[float]:
    """How much slower the schedule predicted fastest is than the best measured in the same run."""
    problems: dict[tuple, list[Compared]] = {}
    for one in compared:
        row = one.row
        varied = not row.mode.startswith(("backend", "deterministic", "overlap"))
        if row.impl == "burst" and varied and not is_of_layers(row):
            key = (row.date, row.nodes, row.seq, row.heads_q, row.heads_kv, row.mask, row.pass_)
            problems.setdefault(key, []).append(one)
    losses = []
    for some in problems.values():
        # what is predicted alike counts as repetitions of one schedule
        least = min(one.predicted.ms for one in some)
        near = [one.row.ms for one in some if one.predicted.ms <= ALIKE * least]
        times: dict[float, list[float]] = {}
        for one in some:
            times.setdefault(one.predicted.ms, []).append(one.row.ms)
        if len(near) < len(some):
            losses.append(median(near) / min(map(median, times.values())) - 1)
    return losses


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Predicted against measured time, and the errors beside it."""
    with picture(path, 11, 5.4, 110) as figure:
        left, right = figure.subplots(1, 2)
        for kind, colour in zip(KINDS, SERIES, strict=False):
            for kernel, marker in ((False, "o"), (True, "^")):
                own = (c for c in compared if c.kind == kind)
                some = [c for c in own if (c.row.impl == "ceiling") == kernel]
                if not some:
                    continue
                name = f"{kind}{', the kernel alone' if kernel else ''}"
                style = {"c": colour, "marker": marker, "s": 24, "alpha": 0.6, "label": name}
                left.scatter([c.row.ms for c in some], [c.predicted.ms for c in some], **style)
                right.scatter([c.row.ms for c in some], [100 * c.error for c in some], **style)
        ends = [min(c.row.ms for c in compared), max(c.row.ms for c in compared)]
        left.plot(ends, ends, c="0.5", lw=0.8)
        left.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms")
        right.axhspan(-10, 10, color="0.93", zorder=0)
        right.axhline(0, c="0.5", lw=0.8)
        right.set(xscale="log", xlabel="measured ms", ylabel="error of the prediction, %")
        legend_below(figure, columns=2, fontsize=8)
        figure.suptitle(f"predicted and measured: {measured_on(one.row for one in compared)}")


def report(rows: Sequence[Row], compared: Sequence[Compared]) -> list[str]:
    """The prediction errors, one paragraph per kind of rows."""
    paragraphs = [f"{len(compared)} of {len(rows)} rows are predicted and could run."]
    for kind in KINDS:
        some = [one for one in compared if one.kind == kind]
        memory = [one.memory_error for one in some if one.memory_error is not None]
        if some:
            time = summary([one.error for one in some])
            paragraphs.append(f"{kind}: time {time} of {len(some)} rows")
        if memory:
            paragraphs[-1] += f"; memory {summary(memory)} of {len(memory)} rows"
    if lost := choices(compared):
        near = sum(loss <= 0.03 for loss in lost)
        paragraphs.append(
            f"The schedule predicted to be the fastest of those measured is within 3 % of the best "
            f"in {near} of {len(lost)} problems; {summary(lost)} slower."
        )
    return paragraphs


def results() -> list[Path]:
    """All CSVs of the repository with measurements that can be predicted."""
    files = sorted((ROOT / "benchmarks/results").glob("*.csv"))
    heads = {",".join(COLUMNS), ",".join((*COLUMNS, SUPERSEDED))}
    return [file for file in files if file.open().readline().strip() in heads]


def _read(csvs: Sequence[Path]) -> list[Row]:
    """Rows of all files, also of packed samples. Some are in two: beside those of earlier code."""
    return list(dict.fromkeys(
        row for path in csvs for row in read([path], ANY_PACKED_CSV if is_packed(path) else ANY_CSV)
        if row.nodes == 1 or row.mode != "intra=a2a"  # all-to-alls inside nodes are gone
    ))  # fmt: skip


@app.command()
def main(
    csvs: Annotated[Files, Argument(help="default: benchmarks/results")] = None,
    hardware: Annotated[str, Option(help="default: the preset of each row's GPU")] = "",
    predictions: Annotated[Files, Option(help="of predict.py; default: predicted now")] = None,
    docs: Annotated[Path, Option(help="where planner_errors.* of all rows go")] = ROOT / "docs",
) -> None:
    """Compare every row; print medians; write or print the table."""
    rows = _read(csvs or results())
    machine = hardware_of(hardware) if hardware else None
    made = _read(predictions or ())
    compared = compare(rows, written(made) if made else lambda row: predict(row, machine))
    planners = dict.fromkeys(one.versions for one in made)
    origins = [f"Before it was measured, by the {planner}." for planner in planners]
    typer.echo("\n".join([*origins, *report(rows, compared)]))
    if csvs or predictions or hardware:
        csv.writer(sys.stdout).writerows([HEAD, *table(compared)])
        return
    with (docs / "planner_errors.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *table(compared)])
    draw(compared, docs / "planner_errors.png")


if __name__ == "__main__":
    app()
