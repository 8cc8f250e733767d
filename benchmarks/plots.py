"""Pictures of results: TFLOP/s and memory over the sequence length, one panel a kind of problem."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import Row
from benchmarks.style import colour_of, legend_below, measured_on
from benchmarks.tables import LIBRARIES, Comparison, compare, differing
from megatron_burst.tools.units import in_units

_LINES = {"ceiling": "--", "one_gpu": ":"}  # bounds, not competitors: drawn as lines
_COLUMNS = 2


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write `STEM_tflops.png` and, where memory was measured, `STEM_memory.png`.

    Args:
        rows: of results; of their forward and backward passes, without other libraries.
        stem: path without an ending.

    Returns:
        the files.
    """
    rows = [row for row in rows if row.impl not in LIBRARIES]
    comparisons = [each for each in compare(rows) if each.problem.pass_ == "fwd_bwd"]
    pictures = {"tflops": (_speeds, "TFLOP/s per GPU, forward + backward")}
    if any(row.peak_gib is not None for each in comparisons for row in each.rows.values()):
        pictures["memory"] = (_memory, "GiB above inputs and outputs, worst rank")
    written = []
    for name, (panel, unit) in pictures.items():
        if comparisons:
            path = stem.with_name(f"{stem.name}_{name}.png")
            _figure(comparisons, panel, unit).savefig(path, dpi=130)
            written.append(path)
    return written


Panel = Callable[[Axes, list[Comparison], dict[str, str]], None]


def _figure(comparisons: list[Comparison], panel: Panel, unit: str) -> Figure:
    """Small multiples with one legend."""
    facts = [fact for fact in differing(comparisons, ("heads",)) if fact != "S"]
    panels: dict[str, list[Comparison]] = {}
    for each in sorted(comparisons, key=lambda each: each.problem.seq):
        words = each.problem.words()
        title = ", ".join(f"{fact} {words[fact]}" for fact in facts)
        panels.setdefault(title, []).append(each)
    colours = {name: colour_of(name) for each in comparisons for name in each.rows}
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.4 * lines + 0.8), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (title, members) in zip(axes, panels.items(), strict=False):
        panel(axis, members, colours)
        axis.set(title=title, xlabel="tokens of the sequence", ylabel=unit, ylim=(0, None))
        axis.set_xticks(range(len(members)), [in_units(each.problem.seq) for each in members])
        axis.grid(axis="y", alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.remove()
    legend_below(figure)
    figure.suptitle(measured_on(row for each in comparisons for row in each.rows.values()))
    return figure


def _speeds(axis: Axes, members: list[Comparison], colours: dict[str, str]) -> None:
    """Bars with their spread for implementations that communicate, crosses for failures, lines for
    the bounds."""
    bars = [name for name in colours if name.split(":")[0] not in _LINES]
    width = 0.8 / max(len(bars), 1)
    for place, name in enumerate(bars):
        offset = (place - (len(bars) - 1) / 2) * width
        for x, each in enumerate(members):
            row = each.rows.get(name)
            if row is not None and row.ms:
                style = {"color": colours[name], "yerr": spread_of(row), "label": name}
                style["error_kw"] = {"elinewidth": 0.8}
                axis.bar(x + offset, row.tflops_per_gpu, width, **style)
            elif row is not None:
                axis.plot(x + offset, 0, "x", color=colours[name], clip_on=False)
    for name in (name for name in colours if name not in bars):
        style = _LINES[name.split(":")[0]]
        _line(axis, members, name, "tflops_per_gpu", color=colours[name], linestyle=style)
    axis.set_xlim(-0.5, len(members) - 0.5)


def spread_of(row: Row) -> list[list[float]]:
    """How far the slowest and the fastest repetition are from the median, in TFLOP/s."""
    slow, fast = (row.ms / end for end in (row.ms_max, row.ms_min))
    off = max(0.0, 1 - slow), max(0.0, fast - 1)  # a CSV's figures are rounded
    return [[row.tflops_per_gpu * share] for share in off]


def _memory(axis: Axes, members: list[Comparison], colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        if name.split(":")[0] not in _LINES:
            _line(axis, members, name, "peak_gib", color=colour, marker="o")


def _line(axis: Axes, members: list[Comparison], name: str, column: str, **style) -> None:
    """One implementation over the lengths at which it has a value."""
    points = [
        (x, value)
        for x, each in enumerate(members)
        if name in each.rows and (value := getattr(each.rows[name], column)) is not None
    ]
    if points:
        style.setdefault("marker", ".")
        axis.plot(*zip(*points, strict=True), label=name, **style)
