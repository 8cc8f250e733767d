"""The picture of `benchmarks/frontier.py`: peak memory across, a step's time upwards."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier_cases import MODELS, FrontierRow, problem_in
from benchmarks.frontier_table import Point, hull_of, points_of, runs_in
from benchmarks.style import BURST, MEGATRON, legend_below, measured_on

_DPI, _COLUMNS = 130, 2
_PAPER = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5}  # names stay legible on lines
_SIDES = {  # whose settings: label, colour, marker, and on which side of it names are
    True: ("burst", BURST, "o", {"xytext": (-6, -9), "ha": "right"}),
    False: ("Megatron", MEGATRON, "s", {"xytext": (6, 5), "ha": "left"}),
}


def draw_frontier(rows: Sequence[FrontierRow], path: Path) -> None:
    """Draw a panel for each problem, of its latest run that has settings of both sides, in the
    models' order.

    Bars are the fastest and the slowest step. A line joins the settings that mixing others over
    layers could not beat; of burst's, these alone are named. Those that failed are left out, and
    so are rows whose peak leaves out what copies still read, if others have it.

    Args:
        rows: of any number of runs.
        path: of the picture.
    """
    panels: dict[tuple, tuple[FrontierRow, list[Point]]] = {}
    rows = [row for row in rows if row.active_gib is not None] or rows
    for _, own in sorted(runs_in(rows), key=lambda run: run[1][0].run):
        points = _drawable(points_of(own))
        if {point.is_burst for point in points} == {True, False}:
            panels[_place(own[0])] = own[0], points
    columns = min(_COLUMNS, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(6.5 * columns, 5 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (_, (row, points)) in zip(axes, sorted(panels.items()), strict=False):
        _panel(axis, points)
        axis.set_title(f"{problem_in(row)}: {measured_on([row])}", fontsize=10)
    for axis in axes[len(panels) :]:
        axis.remove()
    legend_below(figure)
    figure.savefig(path, dpi=_DPI)


def _place(row: FrontierRow) -> tuple:
    sample = row.seq, not row.documents, row.documents, row.ranks
    return list(MODELS).index(row.model), row.layers, *sample


def _drawable(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.ms and point.peak_gib is not None]


def _panel(axis: Axes, points: Sequence[Point]) -> None:
    for is_burst, (label, colour, marker, beside) in _SIDES.items():
        own = [point for point in points if point.is_burst is is_burst]
        best = hull_of(own)
        for point in own:
            bars = [[point.ms - point.ms_min], [point.ms_max - point.ms]]
            axis.errorbar(
                point.peak_gib, point.ms, bars, marker=marker, color=colour, capsize=2, lw=0.8,
                linestyle="none",
            )  # fmt: skip
            if point in best or not is_burst:
                axis.annotate(
                    point.name.partition(":")[2], (point.peak_gib, point.ms),
                    textcoords="offset points", fontsize=7, color=colour, bbox=_PAPER, **beside,
                )  # fmt: skip
        hull = [(point.peak_gib, point.ms) for point in best]
        if hull:
            axis.plot(*zip(*hull, strict=True), color=colour, marker=marker, label=label)
    axis.set(xlabel="peak GiB", ylabel="ms of a training step")
    axis.margins(0.25, 0.15)
    axis.grid(alpha=0.3)
