"""The picture of `benchmarks/frontier.py`: peak memory across, a step's time upwards, and settings'
names, each beside its point where no line and no other name is."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, cos, hypot, radians, sin
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.frontier_cases import problem_in
from benchmarks.frontier_table import Point, hull_of, points_of, runs_in
from benchmarks.sheets import FrontierRow
from benchmarks.style import BURST, MEGATRON, legend_below, measured_on, picture

_DPI, _COLUMNS, _FONT = 160, 3, 8
_ANGLES, _REACHES = range(0, 360, 15), (4, 11, 21, 33, 47)  # degrees; points from name to point
_LED = 14  # points from which on a thin line leads to the name
_STEP = 3  # pixels between two points of a line that names keep clear of
_MARGIN = 5  # pixels around a name, half a marker's among them
_SIDES = {True: ("burst", BURST, "o"), False: ("Megatron", MEGATRON, "s")}
_WORDS = {  # of settings
    "full": "all layers recomputed", "off": "nothing recomputed", "mlp": "MLPs recomputed",
    "offload": "offloading", "offload+mlp": "offloading and MLPs", "keep": "attention kept",
}  # fmt: skip
_READ = "peak memory counts what a stream still reads; axes do not begin at 0"


def draw_frontier(rows: Sequence[FrontierRow], path: Path) -> None:
    """Draw a panel for each problem, of its latest run that has settings of both sides, the longest
    samples first. A line joins the settings that mixing others over layers could not beat; only
    these are drawn, of rows whose peak has what copies still read, if some have."""
    panels: dict[tuple, tuple[FrontierRow, list[Point]]] = {}
    rows = [row for row in rows if row.active_gib is not None] or rows
    for _, own in sorted(runs_in(rows), key=lambda run: run[1][0].run):
        points = [one for one in points_of(own) if one.ms and one.peak_gib is not None]
        if {point.is_burst for point in points} == {True, False}:
            row = own[0]
            panels[-row.seq, row.documents, row.model, row.layers, row.ranks] = row, points
    columns = min(_COLUMNS, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    with picture(path, 3.9 * columns, 3.3 * lines + 0.9, _DPI) as figure:
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        drawn = list(zip(axes, (panels[place] for place in sorted(panels)), strict=False))
        for axis, (row, points) in drawn:
            _panel(axis, points)
            gpus = f"{row.ranks} GPU{'s' * (row.ranks > 1)}"
            axis.set_title(f"{problem_in(row)}, {gpus}", fontsize=9)
        for axis in axes[len(panels) :]:
            axis.remove()
        legend_below(figure, title=_READ)
        figure.suptitle(f"training steps: {measured_on(row for row, _ in panels.values())}")
        figure.draw_without_rendering()  # names are placed among what is where it stays
        for axis, (_, points) in drawn:
            _name(axis, points)


def _panel(axis: Axes, points: Sequence[Point]) -> None:
    for is_burst, (label, colour, marker) in _SIDES.items():
        best = [(one.peak_gib, one.ms / 1e3) for one in _hull(points, is_burst)]
        axis.plot(*zip(*best, strict=True), color=colour, marker=marker, ms=5, label=label)
    axis.set(xlabel="peak GiB of a GPU", ylabel="seconds a step")
    axis.margins(0.2, 0.15)
    axis.grid(alpha=0.3)
    axis.annotate(
        "better", (0.78, 0.78), (0.97, 0.94), xycoords="axes fraction", fontsize=_FONT,
        ha="right", arrowprops={"arrowstyle": "->"},
    )  # fmt: skip


def _hull(points: Sequence[Point], is_burst: bool) -> list[Point]:
    return hull_of([point for point in points if point.is_burst is is_burst])


def _name(axis: Axes, points: Sequence[Point]) -> None:
    """Each point's setting beside it."""
    hulls = [_hull(points, side) for side in _SIDES]
    lines = [[(point.peak_gib, point.ms / 1e3) for point in hull] for hull in hulls]
    names = [
        (_words(point.name), (point.peak_gib, point.ms / 1e3), _SIDES[point.is_burst][1])
        for hull in hulls for point in hull
    ]  # fmt: skip
    name_points(axis, names, lines, _FONT)


def _words(name: str) -> str:
    """What a picture calls a setting."""
    setting = name.partition(":")[2]
    kind, _, budget = setting.partition("-")
    return f"auto, {budget} GiB more" if kind == "auto" and budget else _WORDS.get(setting, setting)


def name_points(
    axis: Axes,
    names: Sequence[tuple[str, tuple[float, float], str]],
    lines: Iterable[Sequence[tuple[float, float]]],
    size: float,
) -> None:
    """Write names (text, point in data coordinates, colour) beside points, the first ones first,
    over no line (corners in data coordinates); those for which there is no room are left out. To be
    called when the figure's layout and limits are final, and it has been drawn once."""
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
