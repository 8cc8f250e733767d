"""The picture of `benchmarks/frontier.py`: peak memory across, a step's time upwards, and settings'
names, each beside its point where no line and no other name is."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, cos, hypot, radians, sin
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.frontier_cases import MODELS, problem_in
from benchmarks.frontier_table import Point, hull_of, points_of, runs_in
from benchmarks.sheets import FrontierRow
from benchmarks.style import BURST, MEGATRON, legend_below, measured_on, picture

_DPI, _COLUMNS, _FONT = 160, 3, 9
_ANGLES, _REACHES = range(0, 360, 15), (4, 11, 21, 33, 47)  # degrees; points from name to point
_LED = 14  # points from which on a thin line leads to the name
_STEP = 3  # pixels between two points of a line that names keep clear of
_MARGIN = 5  # pixels around a name, half a marker's among them
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
    """
    panels: dict[tuple, tuple[FrontierRow, list[Point]]] = {}
    rows = [row for row in rows if row.active_gib is not None] or rows
    for _, own in sorted(runs_in(rows), key=lambda run: run[1][0].run):
        points = [one for one in points_of(own) if one.ms and one.peak_gib is not None]
        if {point.is_burst for point in points} == {True, False}:
            panels[_place(own[0])] = own[0], points
    columns = min(_COLUMNS, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    with picture(path, 3.5 * columns, 3.15 * lines + 1, _DPI) as figure:
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


def _place(row: FrontierRow) -> tuple:
    sample = row.seq, not row.documents, row.documents, row.ranks
    return list(MODELS).index(row.model), row.layers, *sample


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


def name_points(
    axis: Axes,
    names: Sequence[tuple[str, tuple[float, float], str]],
    lines: Iterable[Sequence[tuple[float, float]]],
    size: float,
) -> None:
    """Write names beside points, the first ones first; those for which there is no room are left
    out. To be called when the figure's layout and limits are final, and it has been drawn once.

    Args:
        axis: of the figure.
        names: text, point in data coordinates, colour.
        lines: what names do not cover, as corners in data coordinates.
        size: of the font, in points.
    """
    scale = axis.figure.dpi / 72
    points = axis.transData.transform([point for _, point, _ in names] or np.empty((0, 2)))
    busy = np.concatenate([points, *(_dense(axis.transData.transform(line)) for line in lines)])
    taken: list[np.ndarray] = []
    for (text, point, colour), pixel in zip(names, points, strict=True):
        half = _half_of(axis, text, size)
        ways = _ways(half, scale)
        free = [way for way in ways if _is_free(_box(pixel + way, half), axis, busy, taken)]
        if not free:
            continue
        away = next((way for way in free if _is_nearest(pixel, way, half, points)), free[0])
        taken.append(_box(pixel + away, half))
        is_far = hypot(*np.maximum(abs(away) - half, 0)) > _LED * scale
        line = {"arrowstyle": "-", "lw": 0.6, "color": colour, "shrinkB": 3} if is_far else None
        axis.annotate(
            text, point, tuple(away / scale), textcoords="offset points", fontsize=size,
            color=colour, ha="center", va="center", in_layout=False, arrowprops=line,
        )  # fmt: skip


def _box(middle: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Lower left and upper right corner."""
    return np.array([middle - half, middle + half])


def _half_of(axis: Axes, text: str, size: float) -> np.ndarray:
    """Half the width and height that a name takes, in pixels."""
    label = axis.text(0, 0, text, fontsize=size)
    box = label.get_window_extent()
    label.remove()
    return np.array([box.width, box.height]) / 2 + _MARGIN


def _ways(half: np.ndarray, scale: float) -> list[np.ndarray]:
    """From a point to where its name's middle can be: all around, near ones first."""
    around = [np.array([cos(radians(angle)), sin(radians(angle))]) for angle in _ANGLES]
    return [way * (half + reach * scale) for reach in _REACHES for way in around]


def _is_free(box: np.ndarray, axis: Axes, busy: np.ndarray, taken: Sequence[np.ndarray]) -> bool:
    """Whether a name would cover neither lines nor other names, nor the panel's frame."""
    low, high = box
    least, most = axis.bbox.get_points()
    inside = np.all(low >= least) and np.all(high <= most)
    shares = any(np.all((low < far) & (near < high)) for near, far in taken)
    return bool(inside and not shares and not np.all((busy > low) & (busy < high), axis=1).any())


def _is_nearest(own: np.ndarray, way: np.ndarray, half: np.ndarray, points: np.ndarray) -> bool:
    """Whether a name would be nearer to its point than to any other, so that none takes it."""
    gaps = [hypot(*np.maximum(abs(point - own - way) - half, 0)) for point in (own, *points)]
    return gaps[0] <= min(gaps)


def _dense(corners: np.ndarray) -> np.ndarray:
    """Points along a line, close enough that no name fits between two of them."""
    parts = [corners]
    for start, end in pairwise(corners):
        parts.append(np.linspace(start, end, ceil(hypot(*(end - start)) / _STEP) + 1))
    return np.concatenate(parts)
