"""Layers and steps as tables of docs/benchmarks, and layers' time against their memory, drawn."""

from collections.abc import Sequence
from itertools import compress
from math import ceil
from pathlib import Path

from benchmarks import tables
from benchmarks.frontier_cases import FULL, problem_in
from benchmarks.frontier_table import HEAD, Point, in_equal_memory, line_of, points_of, speedup
from benchmarks.rows import read
from benchmarks.sheets import FRONTIER_CSV, SLICES_CSV, FrontierRow, Row, SliceRow
from benchmarks.style import colours_of, gpu_of, legend_below, measured_on, optional, picture
from benchmarks.tables import measured_by
from megatron_burst.errors import require
from megatron_burst.tools.units import in_units

_WHO, _ROOT = "benchmarks.show docs", Path(__file__).parents[1]
_NAMES = {  # of settings of slices
    "burst": "burst, `--burst-keep all`", "burst-recompute": "burst",
    "megatron": "Megatron, `p2p`", "megatron-a2a": "Megatron, `a2a`",
    "megatron-keep": "Megatron, `p2p`, `--burst-keep all`",
}  # fmt: skip
_OURS = "burst", "burst-recompute"
_FULL = {"burst": "none", "megatron": "full"}  # the mode that recomputes everything
_A_LINE = 3  # panels
_MODES = {  # of layers in pages, in their order
    "megatron:full": "full recomputation, Megatron + TE p2p", "burst:none": "full recomputation",
    "burst:half": "`--burst-keep half`",
    "burst:all": "`--burst-keep all`",
    "burst:all-offload": "`--burst-keep all --burst-keep-offload results`",
    "megatron:full-keep": "`--burst-keep all` with Megatron's TE p2p",
    "burst:off": "no recomputation",
    "megatron:off": "no recomputation, Megatron + TE p2p",
    "burst:attention": "attention's forward alone",
}  # fmt: skip
_LEFT_OUT = ("megatron:attention", "burst:all-half-layers", "burst:selective", "megatron:selective")
_SIDES = (
    "Megatron, every layer recomputed", "Megatron, its fastest setting",
    "burst, the least memory", "burst, in the memory of Megatron's fastest",
)  # fmt: skip
Lines = list[list[str]]


def frontier_lines(path: Path, runs: Sequence[str]) -> Lines:
    """All settings of one run of `benchmarks/frontier.py`, named without zone and seconds."""
    (rows,) = _named([path, *runs])
    points = points_of(rows)
    gains = in_equal_memory(points)
    lines = [line_of(point, gains) for point in points]
    some = [set(column) != {"-"} for column in zip(*lines, strict=True)]
    return [list(compress(line, some)) for line in (HEAD, *lines)]


def job_lines(words: Sequence[str]) -> Lines:
    """A line a run, in seconds and GiB: Megatron with every layer recomputed and its fastest
    setting, burst with the least memory and its fastest setting in no more than the latter's."""
    head = [
        "step", *_SIDES, "times as fast as full", "times as fast as the fastest", "measured",
    ]  # fmt: skip
    return [head, *(_job(rows) for rows in _named(words))]


def rate_lines(words: Sequence[str]) -> Lines:
    """The same settings of the same runs, in tokens/s of a GPU and MFU."""
    lines = [["tokens/s a GPU, MFU", *_SIDES]]
    for rows in _named(words):
        rates = (
            f"{point.tokens_per_s:.0f}, {100 * point.mfu:.1f} %" if point else "-"
            for point in _four(points_of(rows))
        )
        lines.append([_step(rows), *rates])
    return lines


def _job(rows: Sequence[FrontierRow]) -> list[str]:
    full, fastest, least, ours = four = _four(points_of(rows))
    row = next(row for row in rows if row.ms)
    steps = sorted({point.steps for point in four if point})
    count = " to ".join(map(str, dict.fromkeys((steps[0], steps[-1]))))
    origin = [row.date[:10], *measured_by(row), f"{count} step{'s' * (count != '1')}"]
    return [
        _step(rows), *map(_cell, four), tables.shown(least and full and speedup(least, full), 2),
        tables.shown(ours and fastest and speedup(ours, fastest), 3), ", ".join(origin),
    ]  # fmt: skip


def _four(points: Sequence[Point]) -> list[Point | None]:
    """Megatron with every layer recomputed, its fastest setting, burst's `keep` or `auto` with the
    least memory, and its fastest setting in no more than that of Megatron's fastest one."""
    able = {point.name: point for point in points if point.ms}
    peers = [point for point in able.values() if not point.is_burst]
    fastest = min(peers, key=lambda point: point.ms, default=None)
    kept = [one for name, one in able.items() if name.startswith(("burst:keep", "burst:auto"))]
    least = min(kept, key=lambda point: (point.peak_gib, point.ms), default=None)
    gains = in_equal_memory(points)
    own = able[gains[fastest.name][1]] if fastest and fastest.name in gains else None
    return [able.get(FULL), fastest, least, own]


def _step(rows: Sequence[FrontierRow]) -> str:
    row = rows[0]
    return f"{problem_in(row)}, {row.ranks} {gpu_of(row.gpu)}"


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    name = point.name.partition(":")[2]
    return f"{point.ms / 1e3:#.3g}, {point.peak_gib:.1f} (`{name}`)"


def _named(words: Sequence[str | Path]) -> list[list[FrontierRow]]:
    """The rows of runs, as words name them that follow the CSV that they are in."""
    runs: list[list[FrontierRow]] = []
    for word in map(str, words):
        if word.endswith(".csv"):
            name, rows = Path(word).name, read([_ROOT / word], FRONTIER_CSV)
            continue
        runs.append([row for row in rows if row.run.startswith(word)])
        require(_WHO, [(
            runs[-1], f"{name} must have the runs that a page names, because a table is made of "
            "their rows", word, "name one of its runs",
        )])  # fmt: skip
    return runs


def slice_lines(path: Path, sequences: Sequence[str]) -> Lines:
    """Steps of `benchmarks/slices.py`, by length in words, "256K": burst beside each of Megatron's
    runs. The last of burst's runs counts, and of Megatron's the last with each setting and commit.
    """
    head = ["tokens, layers", "setting", "s (min-max)", "tokens/s a GPU", "TFLOP/s a GPU", "MFU",
            "GiB", "burst: times as fast"]  # fmt: skip
    rows = [row for row in read([path], SLICES_CSV) if row.ms and in_units(row.seq) in sequences]
    ours = {row.seq: row for row in rows if row.impl in _OURS}
    peers = {(row.seq, row.impl, row.versions): row for row in rows if row.impl not in _OURS}
    ordered = sorted([*ours.values(), *peers.values()], key=lambda row: row.seq)
    return [head, *(_slice(row, ours[row.seq]) for row in ordered)]


def _slice(row: SliceRow, ours: SliceRow) -> list[str]:
    share = tables.share_of_peak(row.tflops_per_gpu, row.gpu)
    digits = 3 if ours.ms < 1e3 else 2
    times = row.ms, row.ms_min, row.ms_max
    middle, least, most = (f"{ms / 1e3:.{digits}f}" for ms in times)
    gain = "-" if row is ours else f"{tables.Ratio.of(ours, row).value:.{digits}f}"
    return [
        f"{in_units(row.seq)}, {row.layers}", _NAMES[row.impl], f"{middle} ({least}-{most})",
        f"{row.tokens_per_s_per_gpu:.0f}", f"{row.tflops_per_gpu:.0f}", f"{100 * share:.1f} %",
        f"{row.peak_gib:.1f}", gain,
    ]  # fmt: skip


def trade_table(rows: Sequence[Row]) -> str:
    """Markdown: one line a length and mode, with time and memory beside full recomputation's."""

    def of_full(row: Row) -> str:
        mode = row.impl, _FULL[row.impl]
        full = (one for one in rows if one.ms and (one.seq, one.impl, one.mode) == (row.seq, *mode))
        ratio = tables.Ratio.of(next(full, None), row)
        return f"{ratio.value:.3f}" if ratio else "-"

    def times(row: Row) -> str:
        return f"{row.ms:.1f} ({row.ms_min:.1f}-{row.ms_max:.1f})" if row.ms else "-"

    columns = {
        "S": lambda row: in_units(row.seq),
        "mode": lambda row: f"{row.impl}:{row.mode}",
        "ms (min-max)": times,
        "of full recompute": of_full,
        "TFLOP/s per GPU": lambda row: f"{row.tflops_per_gpu:.3g}" if row.ms else "-",
        "GiB": lambda row: tables.shown(row.peak_gib if row.ms else None, 2),
        "status": lambda row: row.status if row.status == "ok" else f"{row.status}: {row.note}",
    }
    return tables.listed(columns, sorted(rows, key=lambda row: row.seq))


def modes_by_length(rows: Sequence[Row]) -> str:
    """Markdown: a line a mode, a column a length, with milliseconds and GiB of its last row."""
    cells = {(f"{row.impl}:{row.mode}", row.seq): row for row in rows if row.ms}
    tables.check_named("mode", (mode for mode, _ in cells), {*_MODES, *_LEFT_OUT}, "steps_table.py")
    layers = {row.seq: int(row.note.split()[0]) for row in cells.values()}
    heads = {
        n: f"{in_units(n)}, {layers[n]} layer{'s' * (layers[n] > 1)}"
        for n in sorted({seq for _, seq in cells})
    }
    lines = {mode: [name] for mode, name in _MODES.items()}
    return tables.crossed(
        ["ms, GiB"], lines, heads, lambda *key: tables.time_and_peak(cells.get(key))
    )


@optional
def draw_trade(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write `STEM_trade.png`: memory across, time upwards, one panel a length; returns its path."""
    able = [row for row in rows if row.ms and row.peak_gib is not None]
    lengths = sorted({row.seq for row in able})
    if not lengths:
        return []
    colours = colours_of(f"{row.impl}:{row.mode}" for row in able)
    across = min(len(lengths), _A_LINE)
    lines = ceil(len(lengths) / across)
    path = stem.with_name(f"{stem.name}_trade.png")
    with picture(path, 4 * across + 1, 4 * lines + 0.8) as figure:
        for place, seq in enumerate(lengths):
            axis = figure.add_subplot(lines, across, 1 + place)
            own = [row for row in able if row.seq == seq]
            for row in own:  # burst's in circles, Megatron's in squares
                name, bars = f"{row.impl}:{row.mode}", (row.ms - row.ms_min, row.ms_max - row.ms)
                axis.errorbar(
                    row.peak_gib, row.ms, [[bar] for bar in bars], color=colours[name], label=name,
                    marker="o" if row.impl == "burst" else "s", linestyle="none", capsize=3,
                )  # fmt: skip
            axis.set(title=f"{in_units(seq)} tokens", xlabel="peak GiB above weights and gradients")
            axis.set(ylabel="ms, forward + backward")
            axis.margins(0.08)
            axis.set_xlim(0, 1.06 * max(row.peak_gib for row in own))
            axis.grid(alpha=0.3)
        legend_below(figure, fontsize=8)
        figure.suptitle(f"layers with their ways to recompute: {measured_on(able)}")
    return [path]
