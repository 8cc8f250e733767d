"""The picture of `benchmarks/frontier.py`: peak memory across, a step's time upwards."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier_cases import MODELS, FrontierRow, problem_in
from benchmarks.frontier_table import Point, hull_of, points_of, runs_in
from benchmarks.labels import name_points
from benchmarks.style import BURST, MEGATRON, legend_below, measured_on

_DPI, _COLUMNS, _FONT = 160, 3, 9
_SIDES = {True: ("burst", BURST, "o"), False: ("Megatron", MEGATRON, "s")}
_READ = (
    "full recomputes all, off nothing; auto-7 may add 7 GiB to full's peak\n"
    "axes do not begin at 0; hollow: a mix of two other settings is faster in its memory"
)


def draw_frontier(rows: Sequence[FrontierRow], path: Path) -> None:
    """Draw a panel for each problem, of its latest run that has settings of both sides, in the
    models' order.

    Bars are the fastest and the slowest step. A line joins the settings that mixing others over
    layers could not beat; others are hollow. Those that failed are left out, and so are rows whose
    peak leaves out what copies still read, if others have it.

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
    figure = Figure(figsize=(3.5 * columns, 3.15 * lines + 1), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    drawn = list(zip(axes, (panels[place] for place in sorted(panels)), strict=False))
    for axis, (row, points) in drawn:
        _panel(axis, points)
        axis.set_title(problem_in(row), fontsize=10)
    for axis in axes[len(panels) :]:
        axis.remove()
    legend_below(figure, title=_READ)
    figure.suptitle(f"training steps: {measured_on(row for row, _ in panels.values())}")
    figure.draw_without_rendering()  # names are placed among what is where it stays
    for axis, (_, points) in drawn:
        _name(axis, points)
    figure.savefig(path, dpi=_DPI)


def _place(row: FrontierRow) -> tuple:
    sample = row.seq, not row.documents, row.documents, row.ranks
    return list(MODELS).index(row.model), row.layers, *sample


def _drawable(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.ms and point.peak_gib is not None]


def _panel(axis: Axes, points: Sequence[Point]) -> None:
    for is_burst, (label, colour, marker) in _SIDES.items():
        own = [point for point in points if point.is_burst is is_burst]
        best = hull_of(own)
        for point in own:
            bars = [[point.ms - point.ms_min], [point.ms_max - point.ms]]
            axis.errorbar(
                point.peak_gib, point.ms, bars, marker=marker, color=colour, capsize=2, lw=0.8,
                linestyle="none", mfc=colour if point in best else "white", ms=5,
            )  # fmt: skip
        hull = [(point.peak_gib, point.ms) for point in best]
        if hull:
            axis.plot(*zip(*hull, strict=True), color=colour, marker=marker, ms=5, label=label)
    axis.set(xlabel="peak GiB", ylabel="ms of a step")
    axis.margins(0.2, 0.15)
    axis.grid(alpha=0.3)


def _name(axis: Axes, points: Sequence[Point]) -> None:
    """Each point's setting beside it, those on the lines first."""
    lines = [[(point.peak_gib, ms) for ms in (point.ms_min, point.ms_max)] for point in points]
    hulls = [hull_of([one for one in points if one.is_burst is side]) for side in _SIDES]
    lines += [[(point.peak_gib, point.ms) for point in hull] for hull in hulls]
    names = [
        (point.name.partition(":")[2], (point.peak_gib, point.ms), _SIDES[point.is_burst][1])
        for point in sorted(points, key=lambda one: not any(one in hull for hull in hulls))
    ]
    name_points(axis, names, lines, _FONT)
