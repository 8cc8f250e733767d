"""Pictures of attention: TFLOP/s and memory over the sequence length, one panel a kind of problem;
and one of all gains: burst against TransformerEngine's best mode, in time and in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Literal

from matplotlib.axes import Axes

from benchmarks import style as look
from benchmarks.compared import LIBRARIES, Comparison, Problem, check_alike, compare, differing
from benchmarks.sheets import Row
from benchmarks.tables import Ratio

_LINES = {"ceiling": "--", "one_gpu": ":"}  # bounds, not competitors: drawn as lines
_COLUMNS = 2
_ALONE = "one length of each"
_UNITS = {"tflops": "TFLOP/s per GPU", "memory": "GiB above inputs and outputs, worst rank"}
type Kind = Literal["tflops", "memory"]
_DPI = 200  # twice a README's column, for sharp screens
_MEAN = "geometric mean, and the slowest and the fastest case"


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write `STEM_tflops.png` and, where memory was measured, `STEM_memory.png`; returns the files.
    Of forward and backward passes, without other libraries, without modes that none of the rows
    could run, and of each problem only what is of one run."""
    ran = {(row.impl, row.mode) for row in rows if row.ms and row.pass_ == "fwd_bwd"}
    rows = [row for row in rows if row.impl not in LIBRARIES and (row.impl, row.mode) in ran]
    comparisons = [each.alike() for each in compare(rows) if each.problem.pass_ == "fwd_bwd"]
    kinds: list[Kind] = ["tflops"]
    if any(row.peak_gib is not None for each in comparisons for row in each.rows.values()):
        kinds.append("memory")
    written = []
    for kind in kinds if comparisons else ():
        path = stem.with_name(f"{stem.name}_{kind}.png")
        _draw(comparisons, kind, path)
        written.append(path)
    return written


def _draw(comparisons: list[Comparison], kind: Kind, path: Path) -> None:
    """Small multiples with one legend; the last of a line fills it."""
    panels = _panels(comparisons)
    colours = look.colours_of(name for each in comparisons for name in each.rows)
    several = len(panels) - (_ALONE in panels)
    lines = -(-several // _COLUMNS) + (_ALONE in panels)
    with look.picture(path, 13, 3.3 * lines + 0.9) as figure:
        grid = figure.add_gridspec(lines, min(_COLUMNS, several) or 1)
        for place, (title, members) in enumerate(panels.items()):
            line, column = (lines - 1, 0) if title == _ALONE else divmod(place, _COLUMNS)
            ends = place in (several - 1, len(panels) - 1)
            axis = figure.add_subplot(grid[line, column:] if ends else grid[line, column])
            _panel(axis, list(members.values()), kind, colours)
            axis.set(title=title, xlabel="tokens of the sequence")
            axis.set_xticks(range(len(members)), list(members))
        look.legend_below(figure, columns=5)
        where = look.measured_on(row for each in comparisons for row in each.rows.values())
        figure.suptitle(f"attention, forward and backward, {_UNITS[kind]}: {where}")


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
    """Bars with their spread, crosses for what cannot run, lines for the bounds."""
    bounds = [name for name in colours if name.partition(":")[0] in _LINES]
    styles = {n: {"color": colour, "label": look.words_of(n)} for n, colour in colours.items()}
    width = 0.8 / max(1, *(len(each.rows.keys() - set(bounds)) for each in members))
    for x, each in enumerate(members):
        names = [name for name in colours if name in each.rows and name not in bounds]
        for place, name in enumerate(names):
            at = x + (place - (len(names) - 1) / 2) * width
            _bar(axis, at, width, each.rows[name], kind, **styles[name])
    for name in bounds if kind == "tflops" else ():
        style = styles[name] | {"ls": _LINES[name.partition(":")[0]]}
        for x, each in enumerate(members):
            if name in each.rows and each.rows[name].ms:
                axis.hlines(each.rows[name].tflops_per_gpu, x - 0.45, x + 0.45, **style)
    axis.set(xlim=(-0.5, len(members) - 0.5), ylabel=_UNITS[kind].partition(" above")[0])
    axis.set_ylim(0, None)
    axis.grid(axis="y", alpha=0.3)


def _bar(axis: Axes, at: float, width: float, row: Row, kind: Kind, **style: str) -> None:
    value = row.tflops_per_gpu if kind == "tflops" else row.peak_gib
    if not row.ms:
        look.mark_impossible(axis, at, 0, style["color"])
    elif value is not None:
        spread = spread_of(row) if kind == "tflops" else None
        axis.bar(at, value, width, yerr=spread, error_kw={"elinewidth": 0.8}, **style)


def spread_of(row: Row) -> list[list[float]]:
    """How far the slowest and the fastest repetition are from the median, in TFLOP/s."""
    slow, fast = (row.ms / end for end in (row.ms_max, row.ms_min))
    off = max(0.0, 1 - slow), max(0.0, fast - 1)  # a CSV's figures are rounded
    return [[row.tflops_per_gpu * share] for share in off]


@dataclass(frozen=True, slots=True)
class Gains:
    """The problems of one kind on one set of GPUs."""

    label: str  # the kind and the GPUs
    # for each problem, TransformerEngine's fastest mode over burst, in time and in peak memory
    speed: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def gains_of(rows: Sequence[Row]) -> list[Gains]:
    """Gains in forward and backward by kind of mask, nodes and GPUs; one node first. A kind with
    only one measured problem is left out: it has no spread."""
    kinds: dict[str, Gains] = {}
    every = compare(rows)
    every.sort(key=lambda one: (one.problem.nodes, _kind(one.problem), one.problem.ranks))
    for each in every:
        burst, te, problem = each.burst, each.best_te, each.problem
        if problem.pass_ != "fwd_bwd" or burst is None or te is None:
            continue
        check_alike(each, [burst, te])
        gpus = problem.ranks // problem.nodes
        place = f"{gpus} GPU{'s' * (gpus > 1)}"
        if problem.nodes > 1:
            place = f"{problem.nodes} emulated nodes x {place}"
        label = f"{_kind(problem)}\n{place}"
        gains = kinds.setdefault(label, Gains(label))
        gains.speed.append(Ratio.of(burst, te).value)
        if burst.peak_gib and te.peak_gib:
            gains.memory.append(te.peak_gib / burst.peak_gib)
    return [gains for gains in kinds.values() if len(gains.speed) > 1]


def _kind(problem: Problem) -> str:
    if problem.mask == "causal":
        return "causal"
    return "sliding window" if problem.mask.startswith("window") else "packed documents"


def draw_gains(rows: Sequence[Row], path: Path) -> None:
    """A bar for each kind: its mean, with a line from the least to the most of its problems."""
    gains = gains_of(rows)
    with look.picture(path, 8, 0.62 * len(gains) + 1.8, _DPI) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _bars(left, [each.speed for each in gains], "times as fast as TransformerEngine")
        _bars(right, [each.memory for each in gains], "TransformerEngine's memory / burst's")
        for axis in (left, right):
            axis.set_xlim(0, None)
        left.set_yticks(range(len(gains)), [each.label for each in gains])
        left.invert_yaxis()
        look.legend_below(figure, fontsize=9)
        title = "attention, forward and backward, beside TransformerEngine's fastest mode"
        figure.suptitle(f"{title}\n{look.measured_on(rows)}", fontsize=11)


def _bars(axis: Axes, kinds: Sequence[Sequence[float]], unit: str) -> None:
    """Geometric means as bars, and as figures in a column; 1 as a line."""
    for y, values in enumerate(kinds):
        if not values:
            continue
        mean = geometric_mean(values)
        spread = [[mean - min(values)], [max(values) - mean]]
        axis.barh(
            y, mean, 0.62, color=look.BURST, alpha=0.75, xerr=spread, label=_MEAN,
            error_kw={"ecolor": look.INK, "capsize": 3, "elinewidth": 1.2},
        )  # fmt: skip
        axis.text(
            1.02, y, f"{mean:.2f}", transform=axis.get_yaxis_transform(), va="center",
            fontweight="bold",
        )  # fmt: skip
    axis.text(1.02, -0.62, "mean", transform=axis.get_yaxis_transform(), fontsize=9)
    axis.axvline(1, color="black", lw=1)
    axis.set(xlabel=unit)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
