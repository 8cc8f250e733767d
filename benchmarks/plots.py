"""Pictures of results: TFLOP/s and memory over the sequence length, one panel a kind of problem."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import Row
from benchmarks.style import colours_of, legend_below, mark_impossible, measured_on
from benchmarks.tables import LIBRARIES, Comparison, compare, differing

_LINES = {"ceiling": "--", "one_gpu": ":"}  # bounds, not competitors: drawn as lines
_COLUMNS = 2
_ALONE = "one length of each"
_UNITS = {
    "tflops": "TFLOP/s per GPU",
    "memory": "GiB above inputs and outputs, worst rank",
}
type Kind = Literal["tflops", "memory"]


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write `STEM_tflops.png` and, where memory was measured, `STEM_memory.png`.

    Args:
        rows: of results; of their forward and backward passes, without other libraries, without
            modes that none of them could run, and of each problem only what is of one run.
        stem: path without an ending.

    Returns:
        the files.
    """
    ran = {(row.impl, row.mode) for row in rows if row.ms and row.pass_ == "fwd_bwd"}
    rows = [row for row in rows if row.impl not in LIBRARIES and (row.impl, row.mode) in ran]
    comparisons = [each.alike() for each in compare(rows) if each.problem.pass_ == "fwd_bwd"]
    kinds: list[Kind] = ["tflops"]
    if any(row.peak_gib is not None for each in comparisons for row in each.rows.values()):
        kinds.append("memory")
    written = []
    for kind in kinds if comparisons else ():
        path = stem.with_name(f"{stem.name}_{kind}.png")
        _figure(comparisons, kind).savefig(path, dpi=130)
        written.append(path)
    return written


def _figure(comparisons: list[Comparison], kind: Kind) -> Figure:
    """Small multiples with one legend; the last of a line fills it."""
    panels = _panels(comparisons)
    colours = colours_of(name for each in comparisons for name in each.rows)
    several = len(panels) - (_ALONE in panels)
    lines = -(-several // _COLUMNS) + (_ALONE in panels)
    figure = Figure(figsize=(13, 3.3 * lines + 0.9), layout="constrained")
    grid = figure.add_gridspec(lines, min(_COLUMNS, several) or 1)
    for place, (title, members) in enumerate(panels.items()):
        line, column = (lines - 1, 0) if title == _ALONE else divmod(place, _COLUMNS)
        ends = place in (several - 1, len(panels) - 1)
        axis = figure.add_subplot(grid[line, column:] if ends else grid[line, column])
        _panel(axis, list(members.values()), kind, colours)
        axis.set(title=title, xlabel="tokens of the sequence")
        axis.set_xticks(range(len(members)), list(members))
    legend_below(figure)
    where = measured_on(row for each in comparisons for row in each.rows.values())
    figure.suptitle(f"attention, forward and backward, {_UNITS[kind]}: {where}")
    return figure


def _panels(comparisons: list[Comparison]) -> dict[str, dict[str, Comparison]]:
    """By kind of problem and length; kinds of one length share the last panel."""
    facts = [fact for fact in differing(comparisons, ("heads",)) if fact != "S"]
    panels: dict[str, dict[str, Comparison]] = {}
    for each in sorted(comparisons, key=lambda each: each.problem.seq):
        words = each.problem.words()
        title = ", ".join(f"{fact} {words[fact]}" for fact in facts)
        panels.setdefault(title, {})[words["S"]] = each
    alone = {
        f"{title.replace(', ', '\n')}\n{length}": each
        for title, members in panels.items()
        for length, each in members.items()
        if len(members) == 1
    }
    several = {title: members for title, members in panels.items() if len(members) > 1}
    return several | ({_ALONE: alone} if alone else {})


def _panel(axis: Axes, members: list[Comparison], kind: Kind, colours: Mapping[str, str]) -> None:
    """Bars with their spread for implementations that communicate, crosses for those that cannot
    run, lines for the bounds."""
    bounds = [name for name in colours if name.partition(":")[0] in _LINES]
    width = 0.8 / max(1, *(len(each.rows.keys() - set(bounds)) for each in members))
    for x, each in enumerate(members):
        names = [name for name in colours if name in each.rows and name not in bounds]
        for place, name in enumerate(names):
            at = x + (place - (len(names) - 1) / 2) * width
            _bar(axis, at, width, each.rows[name], kind, color=colours[name], label=name)
    for name in bounds if kind == "tflops" else ():
        style = {"color": colours[name], "ls": _LINES[name.partition(":")[0]], "label": name}
        for x, each in enumerate(members):
            if name in each.rows and each.rows[name].ms:
                axis.hlines(each.rows[name].tflops_per_gpu, x - 0.45, x + 0.45, **style)
    axis.set(xlim=(-0.5, len(members) - 0.5), ylabel=_UNITS[kind].partition(" above")[0])
    axis.set_ylim(0, None)
    axis.grid(axis="y", alpha=0.3)


def _bar(axis: Axes, at: float, width: float, row: Row, kind: Kind, **style: str) -> None:
    value = row.tflops_per_gpu if kind == "tflops" else row.peak_gib
    if not row.ms:
        mark_impossible(axis, at, 0, style["color"])
    elif value is not None:
        spread = spread_of(row) if kind == "tflops" else None
        axis.bar(at, value, width, yerr=spread, error_kw={"elinewidth": 0.8}, **style)


def spread_of(row: Row) -> list[list[float]]:
    """How far the slowest and the fastest repetition are from the median, in TFLOP/s."""
    slow, fast = (row.ms / end for end in (row.ms_max, row.ms_min))
    off = max(0.0, 1 - slow), max(0.0, fast - 1)  # a CSV's figures are rounded
    return [[row.tflops_per_gpu * share] for share in off]
