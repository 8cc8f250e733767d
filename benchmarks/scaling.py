"""Weak and strong scaling of training steps: the planner's rows, a picture with measured ones.

python -m benchmarks.scaling plan PLANNED.csv --gpus 1,2,4,8,16,32,64
python -m benchmarks.scaling draw scaling.png --measured slices.csv --planned PLANNED.csv

The runs are those of benchmarks/slices.py: two layers of BurstEngine's models with 32K tokens a GPU
(weak), or 256K in all (strong); burst keeps all of attention's results, tensor parallelism (tp)
recomputes them. Measured steps are points, planned ones lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from benchmarks.rows import append, check_appendable, read
from benchmarks.runner import App, Files, Machine, OutFile
from benchmarks.sheets import SLICES_CSV, SliceRow
from benchmarks.slice_cases import PER_GPU, SEEDS, STRONG, Slice
from benchmarks.slices import predicted, result_of
from benchmarks.style import colour_of, legend_below, measured_on, picture
from megatron_burst.errors import require
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.hardware_file import hardware as hardware_of
from megatron_burst.tools.terminal import check_writable
from megatron_burst.tools.units import in_units, whole_numbers

_WHO = "benchmarks.scaling"
_MARKERS = {"burst": "o", "megatron": "D", "tp": "s"}
KINDS = {"weak": "TFLOP/s per GPU", "strong": "s per step"}
app = App()


def of_kind(rows: Sequence[SliceRow], kind: str) -> list[SliceRow]:
    """The rows with a time of one kind of scaling."""
    timed = [row for row in rows if row.ms and row.model in {what.name for what in SEEDS}]
    if kind == "weak":
        return [row for row in timed if row.seq == PER_GPU * row.gpus]
    return [row for row in timed if row.seq == STRONG]


def lines_of(rows: Sequence[SliceRow], kind: str) -> dict[str, list[tuple[int, float]]]:
    """Points (GPUs, value) by model and implementation; of equal ones the newest."""
    lines: dict[str, dict[int, float]] = {}
    for row in of_kind(rows, kind):
        value = row.tflops_per_gpu if kind == "weak" else row.ms / 1e3
        lines.setdefault(f"{row.model} {row.impl}", {})[row.gpus] = value
    return {name: sorted(points.items()) for name, points in lines.items()}


def runs_of(gpus: Sequence[int], machine: Hardware) -> Iterator[tuple[Slice, str, int]]:
    """The runs of both kinds that so many GPUs can share evenly, each once."""
    for count, what in product(gpus, SEEDS):
        is_inside = count <= machine.node.gpus and what.heads_q % count == 0
        impls = ("burst", "tp") if is_inside else ("burst",)
        for seq, impl in product(sorted({PER_GPU * count, STRONG}), impls):
            yield replace(what, seq=seq), impl, count


@app.command()
def plan(
    out: OutFile,
    gpus: Annotated[str, Option(help="counts, with commas")] = "1,2,4,8,16,32,64",
    hardware: Machine = "h200",
) -> None:
    """Append what the planner says of weak and strong scaling."""
    check_appendable(out, SLICES_CSV, "OUT")
    machine = hardware_of(hardware)
    counts = whole_numbers(gpus, "--gpus", _WHO)
    rows = [predicted(*run, machine) for run in runs_of(counts, machine)]
    append(out, rows, SLICES_CSV)
    for row in rows:
        what = f"{row.model}, {in_units(row.seq)}, {row.impl}, {row.gpus} GPUs"
        typer.echo(f"{what}: {result_of(row)}")


@app.command()
def draw(
    path: Annotated[Path, Argument(metavar="PICTURE", help="what is written, e.g. scaling.png")],
    measured: Annotated[Files, Option(help="of benchmarks/slices.py")] = None,
    planned: Annotated[Files, Option(help="of the command plan")] = None,
) -> None:
    """Draw weak and strong scaling: measured steps are open points, planned ones lines."""
    check_writable(_WHO, "PICTURE", path)
    files = {"measured": measured, "planned": planned}
    named = {name: read(some, SLICES_CSV) for name, some in files.items() if some}
    require(_WHO, [(
        any(lines_of(rows, kind) for rows in named.values() for kind in KINDS),
        f"files must have rows of {' or '.join(what.name for what in SEEDS)} with times, because "
        "these are the runs of scaling", "none", "measure with benchmarks/everything.sh OUT GPUS "
        "scaling",
    )])  # fmt: skip
    with picture(path, 11, 4.2, 120) as figure:
        for (kind, unit), axis in zip(KINDS.items(), figure.subplots(1, len(KINDS)), strict=True):
            for name, rows in named.items():
                _draw_lines(axis, lines_of(rows, kind), name)
            size = f"{in_units(PER_GPU)} tokens per GPU"
            if kind == "strong":
                size = f"{in_units(STRONG)} tokens"
                axis.set_yscale("log", base=2)
                axis.yaxis.set_major_formatter("{x:g}")
            axis.set(title=f"{kind} scaling: {size}", xlabel="GPUs", ylabel=unit)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.3)
            if kind == "weak":
                axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        legend_below(figure, columns=3)
        every = [row for rows in named.values() for kind in KINDS for row in of_kind(rows, kind)]
        figure.suptitle(f"training steps of two layers: {measured_on(every)}")
    typer.echo(path)


def _draw_lines(axis: Any, lines: dict[str, list[tuple[int, float]]], name: str) -> None:
    """Lines of one panel: measured or planned ones."""
    first = next(iter(lines), "").rpartition(" ")[0]
    for label, points in lines.items():
        model, _, impl = label.rpartition(" ")
        look: dict[str, Any] = {"marker": _MARKERS.get(impl, "^"), "linestyle": "none"}
        look |= {"fillstyle": "none", "markersize": 8, "markeredgewidth": 2}
        if name == "planned":
            look = {"linestyle": "-" if model == first else "--", "alpha": 0.6}
        label = f"{label}, {name}"
        axis.plot(*zip(*points, strict=True), color=colour_of(impl), label=label, **look)


if __name__ == "__main__":
    app()
