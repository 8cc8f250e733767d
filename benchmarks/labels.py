"""Names of points in a picture, each beside its point where no line and no other name is."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, cos, hypot, radians, sin

import numpy as np
from matplotlib.axes import Axes

_ANGLES, _REACHES = range(0, 360, 15), (4, 11, 21, 33, 47)  # degrees; points from name to point
_LED = 14  # points from which on a thin line leads to the name
_STEP = 3  # pixels between two points of a line that names keep clear of
_MARGIN = 5  # pixels around a name, half a marker's among them


def name_points(
    axis: Axes,
    names: Sequence[tuple[str, tuple[float, float], str]],
    lines: Iterable[Sequence[tuple[float, float]]],
    size: float,
) -> None:
    """Write names beside points, the first ones first; those for which there is no room are left
    out. To be called when the figure's layout and limits are final.

    Args:
        axis: of a figure that has been drawn once.
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
