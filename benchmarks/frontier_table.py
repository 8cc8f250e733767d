"""What the rows of `benchmarks/frontier.py` come to: as a table, and as a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import geometric_mean, median

from benchmarks.frontier_cases import FULL, FULL_OF_BURST, NOTHING
from benchmarks.sheets import FrontierRow
from benchmarks.tables import Ratio, markdown, share_of_peak, shown
from megatron_burst.tools.units import in_units

HEAD = [
    "setting", "ms (min-max)", "steps", "tokens/s a GPU", "MFU", "of nothing recomputed", "GiB",
    "a", "host GiB", "burst in its memory",
]  # fmt: skip
_EQUAL_GIB = 0.1  # by which peaks may differ and count as equal: an allocator's rounding


@dataclass(frozen=True, slots=True)
class Point:
    """What the turns of one setting come to."""

    name: str  # of the setting, with whose it is
    steps: int = 0  # how many were timed
    ms: float | None = None  # median over all of them, with minimum and maximum; None if it failed
    ms_min: float | None = None
    ms_max: float | None = None
    turns: dict[int, list[float]] = field(default_factory=dict)  # ms of each turn's steps
    tokens_per_s: float | None = None  # of each GPU, at the median
    mfu: float | None = None  # recomputation is not counted; None on CPUs
    peak_gib: float | None = None  # median over turns of the rows' `gib`, as `host_gib`
    host_gib: float | None = None
    ratio: float | None = None  # how many times as fast nothing recomputed is
    # a = (peak - peak of full) / (peak of nothing recomputed - peak of full)
    share: float | None = None
    note: str = ""  # why it failed

    @property
    def is_burst(self) -> bool:
        return self.name.startswith("burst:")


def runs_in(rows: Sequence[FrontierRow]) -> Iterator[tuple[str, list[FrontierRow]]]:
    """The rows of each run and problem, with words for them."""
    runs: dict[tuple, list[FrontierRow]] = {}
    for row in rows:
        key = row.run, row.model, row.layers, row.seq, row.documents, row.ranks
        runs.setdefault(key, []).append(row)
    for (run, model, layers, seq, documents, ranks), own in runs.items():
        drawn, _, count = documents.partition(": ")
        kind = f"{count} documents ({drawn})" if documents else "one document"
        gpu = f"{f'{ranks} x ' * (ranks > 1)}{own[0].gpu.partition(';')[0]}"
        yield f"{model}, {layers} layers, {in_units(seq)} tokens, {kind}; {gpu}; {run}", own


def points_of(rows: Sequence[FrontierRow]) -> list[Point]:
    """One for each setting of a run, in the order of the first turn."""
    by_name: dict[str, list[FrontierRow]] = {}
    for row in rows:
        by_name.setdefault(f"{row.impl}:{row.setting}", []).append(row)
    points = {name: _point(name, own) for name, own in by_name.items()}
    nothing, full = points.get(NOTHING), points.get(FULL) or points.get(FULL_OF_BURST)
    return [_beside(point, nothing, full) for point in points.values()]


def _point(name: str, rows: Sequence[FrontierRow]) -> Point:
    turns = {row.turn: [float(ms) for ms in row.each.split()] for row in rows if row.each}
    if not turns:
        return Point(name, note=rows[0].note)
    each = list(chain(*turns.values()))
    ms, row, mfu = median(each), next(row for row in rows if row.each), None
    if row.tflops is not None and not row.gpu.startswith("cpu"):
        mfu = share_of_peak(row.tflops * row.ms / ms, row.gpu)
    known = (_known(rows, column) for column in ("gib", "host_gib"))
    gib = [median(values) if values else None for values in known]
    tokens_per_s = 1e3 * row.seq / row.ranks / ms
    return Point(name, len(each), ms, min(each), max(each), turns, tokens_per_s, mfu, *gib)


def _known(rows: Sequence[FrontierRow], column: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, column)) is not None]


def _beside(point: Point, nothing: Point | None, full: Point | None) -> Point:
    """The point with its ratio and share, where what they stand beside was measured."""
    if point.ms is None or nothing is None or not nothing.ms:
        return point
    share = None
    peaks = [one.peak_gib if one else None for one in (point, nothing, full)]
    if None not in peaks and peaks[1] != peaks[2]:
        share = (peaks[0] - peaks[2]) / (peaks[1] - peaks[2])
    return replace(point, ratio=speedup(nothing, point), share=share)


def speedup(point: Point, other: Point) -> float:
    """How many times as fast a setting is as another: step by step, if they took turns."""
    counts, others = ({turn: len(ms) for turn, ms in one.turns.items()} for one in (point, other))
    if len(counts) < 2 or counts != others:  # in one turn all steps of a setting come together
        return other.ms / point.ms
    return Ratio.paired(*(list(chain(*one.turns.values())) for one in (point, other))).value


def spread_of(rows: Sequence[FrontierRow]) -> dict[str, float]:
    """Largest relative difference of a loss, and of a gradients' norm, from the median."""
    spreads = {}
    for column in ("loss", "grad_norm"):
        if known := _known(rows, column):
            middle = median(known)
            spreads[column] = max(abs(value / middle - 1) for value in known)
    return spreads


def in_equal_memory(points: Sequence[Point]) -> dict[str, tuple[float, str]]:
    """By setting of Megatron's: speedup and name of burst's fastest in no more memory."""
    known = [point for point in points if point.ms and point.peak_gib is not None]
    gains = {}
    for peer in (point for point in known if not point.is_burst):
        room = peer.peak_gib + _EQUAL_GIB
        able = [point for point in known if point.is_burst and point.peak_gib <= room]
        if able:
            best = min(able, key=lambda point: point.ms)
            gains[peer.name] = speedup(best, peer), best.name
    return gains


def frontier_table(rows: Sequence[FrontierRow]) -> str:
    """Markdown: a table for each run and problem, one line a setting."""
    return "\n\n".join("\n".join(_section(title, own)) for title, own in runs_in(rows))


def _section(title: str, rows: Sequence[FrontierRow]) -> Iterator[str]:
    points = points_of(rows)
    gains = in_equal_memory(points)
    yield f"{title}\n"
    yield markdown([HEAD, *(line_of(point, gains) for point in points)])
    if gains:
        speedups = [speedup for speedup, _ in gains.values()]
        means = f"geometric mean {geometric_mean(speedups):.3f}, least {min(speedups):.3f}"
        yield f"\nburst in the memory of Megatron's settings: {means} times as fast"
    differences = (f"{name} {value:.2g}" for name, value in spread_of(rows).items())
    yield f"\nlargest relative difference from the median: {', '.join(differences)}"


def line_of(point: Point, gains: dict[str, tuple[float, str]]) -> list[str]:
    """A line of the table, below `HEAD`."""
    if point.ms is None:
        why = "out of memory" if "out of memory" in point.note else f"failed: {point.note}"
        return [point.name, why, *["-"] * (len(HEAD) - 2)]
    gain, best = gains.get(point.name, (None, ""))
    digits = 0 if point.ms >= 1000 else 1
    middle, least, most = (shown(ms, digits) for ms in (point.ms, point.ms_min, point.ms_max))
    return [
        point.name, f"{middle} ({least}-{most})", str(point.steps), shown(point.tokens_per_s, 0),
        f"{100 * point.mfu:.1f} %" if point.mfu else "-", shown(point.ratio, 3),
        shown(point.peak_gib, 2), shown(point.share, 2), shown(point.host_gib, 1),
        f"{gain:.3f} ({best})" if gain else "-",
    ]  # fmt: skip


def hull_of(points: Sequence[Point]) -> list[Point]:
    """The lower left of the convex hull in (GiB, ms): the best that mixed settings could reach."""
    known = [point for point in points if point.ms and point.peak_gib is not None]
    hull: list[Point] = []
    for point in sorted(known, key=lambda one: (one.peak_gib, one.ms)):
        if hull and point.ms >= hull[-1].ms:
            continue  # slower, and no less memory
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(left: Point, middle: Point, right: Point) -> bool:
    """Whether the middle one is on the line from left to right, or above it."""
    slope = (right.ms - left.ms) / (right.peak_gib - left.peak_gib)
    return middle.ms >= left.ms + slope * (middle.peak_gib - left.peak_gib)
