"""Whole training steps as tables of docs/benchmarks: `benchmarks.show docs` makes them."""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from benchmarks.frontier_cases import FRONTIER_CSV, FULL, FrontierRow, problem_in
from benchmarks.frontier_table import (
    HEAD,
    Point,
    in_equal_memory,
    line_of,
    points_of,
    shown,
    speedup,
)
from benchmarks.ratios import Ratio, share_of_peak
from benchmarks.rows import read
from benchmarks.slice_cases import SLICES_CSV, SliceRow
from megatron_burst.errors import require
from megatron_burst.tools.units import in_units

_WHO = "benchmarks.show docs"
_NAMES = {  # of settings of slices
    "burst": "burst, `--burst-keep all`", "burst-recompute": "burst",
    "megatron": "Megatron, `p2p`", "megatron-a2a": "Megatron, `a2a`",
    "megatron-keep": "Megatron, `p2p`, `--burst-keep all`",
}  # fmt: skip
_OURS = "burst", "burst-recompute"
Lines = list[list[str]]


def frontier_lines(path: Path, runs: Sequence[str]) -> Lines:
    """All settings of one run of `benchmarks/frontier.py`; its columns that have a figure.

    Args:
        path: of the CSV.
        runs: the run, as its rows name it; its zone and seconds may be left out.
    """
    (rows,) = _runs(path, runs)
    points = points_of(rows)
    gains = in_equal_memory(points)
    lines = [line_of(point, gains) for point in points]
    some = [set(column) != {"-"} for column in zip(*lines, strict=True)]
    return [list(compress(line, some)) for line in (HEAD, *lines)]


def overview_lines(path: Path, runs: Sequence[str]) -> Lines:
    """A line a run: full recomputation beside `auto` with the least memory, and Megatron's fastest
    other setting beside burst's fastest one in no more memory."""
    head = [
        "step", "Megatron, full recomputation", "`--burst-keep auto`", "times as fast",
        "Megatron's fastest setting that saves memory", "burst in its memory", "times as fast",
    ]  # fmt: skip
    return [head, *(_overview(rows) for rows in _runs(path, runs))]


def _overview(rows: Sequence[FrontierRow]) -> list[str]:
    points = {point.name: point for point in points_of(rows) if point.ms}
    full = points.get(FULL)
    autos = [point for name, point in points.items() if name.startswith("burst:auto")]
    auto = min(autos, key=lambda point: (point.peak_gib, point.ms))
    gains = in_equal_memory(list(points.values()))
    others = [points[name] for name in gains if name not in (FULL, "megatron:off")]
    peer = min(others, key=lambda point: point.ms, default=None)
    gain, best = gains[peer.name] if peer else (None, "")
    return [
        problem_in(rows[0]), _cell(full), _cell(auto),
        shown(speedup(auto, full) if full else None, 2), _cell(peer), _cell(points.get(best)),
        shown(gain, 3),
    ]  # fmt: skip


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    name = point.name.partition(":")[2]
    said = "" if name == "full" else f" (`{name}`)"
    return f"{point.ms:.0f} ms, {point.peak_gib:.1f} GiB{said}"


def slice_lines(path: Path, sequences: Sequence[str]) -> Lines:
    """Steps of `benchmarks/slices.py`, by length: burst beside each of Megatron's runs.

    The last of burst's runs counts, and of Megatron's the last with each setting and commit.

    Args:
        path: of the CSV.
        sequences: lengths in words, "256K".
    """
    head = ["tokens, layers", "setting", "s (min-max)", "tokens/s a GPU", "TFLOP/s a GPU", "MFU",
            "GiB", "burst: times as fast"]  # fmt: skip
    rows = [row for row in read([path], SLICES_CSV) if row.ms and in_units(row.seq) in sequences]
    ours = {row.seq: row for row in rows if row.impl in _OURS}
    peers = {(row.seq, row.impl, row.versions): row for row in rows if row.impl not in _OURS}
    ordered = sorted([*ours.values(), *peers.values()], key=lambda row: row.seq)
    return [head, *(_slice(row, ours[row.seq]) for row in ordered)]


def _slice(row: SliceRow, ours: SliceRow) -> list[str]:
    share = share_of_peak(row.tflops_per_gpu, row.gpu)
    digits = 3 if ours.ms < 1e3 else 2
    times = row.ms, row.ms_min, row.ms_max
    middle, least, most = (f"{ms / 1e3:.{digits}f}" for ms in times)
    gain = "-" if row is ours else f"{Ratio.of(ours, row).value:.{digits}f}"
    return [
        f"{in_units(row.seq)}, {row.layers}", _NAMES[row.impl], f"{middle} ({least}-{most})",
        f"{row.tokens_per_s_per_gpu:.0f}", f"{row.tflops_per_gpu:.0f}", f"{100 * share:.1f} %",
        f"{row.peak_gib:.1f}", gain,
    ]  # fmt: skip


def _runs(path: Path, names: Sequence[str]) -> list[list[FrontierRow]]:
    """The rows of each run, in the order of the names."""
    rows = read([path], FRONTIER_CSV)
    found = [[row for row in rows if row.run.startswith(name)] for name in names]
    for name, own in zip(names, found, strict=True):
        require(_WHO, [(
            own, f"{path.name} must have the runs that a page names, because a table is made of "
            "their rows", name, "name one of its runs",
        )])  # fmt: skip
    return found
