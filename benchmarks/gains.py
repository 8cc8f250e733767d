"""One picture of all gains: burst against TransformerEngine's best mode, in time and in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ratios import Ratio
from benchmarks.rows import Row
from benchmarks.style import BURST, INK, legend_below, measured_on
from benchmarks.tables import Comparison, Problem, check_alike, compare

_DPI = 200  # twice a README's column, for sharp screens
_ON_CUDNN = "burst:backend=cudnn"
_MEAN = "burst: mean, least and most of several problems"
_ALONE, _SAME = "burst's kernel alone, no transfers", "burst on TransformerEngine's kernel"


@dataclass(frozen=True, slots=True)
class Gains:
    """The problems of one kind on one set of GPUs.

    Attributes:
        label: the kind and the GPUs.
        speed: for each problem, burst's ratio to TransformerEngine's fastest mode.
        memory: for each problem, peak memory of that mode / burst's.
        kernel: as speed, of burst's kernel alone, without transfers: what burst could reach.
        same_kernel: as speed, of burst on cuDNN, TransformerEngine's kernel, where it ran.
    """

    label: str
    speed: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    same_kernel: list[float] = field(default_factory=list)


def gains_of(rows: Sequence[Row]) -> list[Gains]:
    """Gains in forward and backward by kind of mask, nodes and GPUs; one node first.

    A kind of which only one problem was measured is left out: it has no spread.
    """
    kinds: dict[str, Gains] = {}
    for each in sorted(compare(rows), key=_place):
        burst, te = each.burst, each.best_te
        if each.problem.pass_ != "fwd_bwd" or burst is None or te is None:
            continue
        check_alike(each, [burst, te, each.ceiling, each.rows.get(_ON_CUDNN)])
        label = _label(each.problem)
        gains = kinds.setdefault(label, Gains(label))
        gains.speed.append(Ratio.of(burst, te).value)
        gains.memory.extend(_memory(each))
        others = (gains.kernel, each.ceiling), (gains.same_kernel, each.rows.get(_ON_CUDNN))
        for found, row in others:
            found += [ratio.value] if (ratio := Ratio.of(row, te)) else []
    return [gains for gains in kinds.values() if len(gains.speed) > 1]


def _place(each: Comparison) -> tuple:
    return each.problem.nodes, _kind(each.problem), each.problem.ranks


def _kind(problem: Problem) -> str:
    if problem.mask == "causal":
        return "causal"
    return "sliding window" if problem.mask.startswith("window") else "packed documents"


def _label(problem: Problem) -> str:
    gpus = problem.ranks // problem.nodes
    place = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    if problem.nodes > 1:
        place = f"{problem.nodes} emulated nodes x {place}"
    return f"{_kind(problem)}\n{place}"


def _memory(each: Comparison) -> list[float]:
    ours, theirs = each.burst.peak_gib, each.best_te.peak_gib
    return [theirs / ours] if ours and theirs else []


def draw_gains(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each kind: its mean, with a line from the least to the most of its
    problems."""
    gains = gains_of(rows)
    figure = Figure(figsize=(8, 0.62 * len(gains) + 1.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _bars(left, [each.speed for each in gains], "times as fast")
    _bars(right, [each.memory for each in gains], "TransformerEngine's memory / burst's")
    alone, same = (
        {y: geometric_mean(found) for y, found in enumerate(every) if found}
        for every in ([each.kernel for each in gains], [each.same_kernel for each in gains])
    )
    ends = [y - 0.4 for y in alone], [y + 0.4 for y in alone]
    left.vlines(list(alone.values()), *ends, colors="black", ls="--", lw=1.4, label=_ALONE)
    left.plot(same.values(), same.keys(), "D", color="white", markeredgecolor=INK, label=_SAME)
    for axis in (left, right):
        axis.set_xlim(0, None)
    left.set_yticks(range(len(gains)), [each.label for each in gains])
    left.invert_yaxis()
    legend_below(figure, columns=2, fontsize=9)
    figure.suptitle(
        "attention, forward and backward: TransformerEngine's fastest mode / burst\n"
        f"{measured_on(rows)}", fontsize=11,
    )  # fmt: skip
    figure.savefig(path, dpi=_DPI)


def _bars(axis: Axes, kinds: Sequence[Sequence[float]], unit: str) -> None:
    """Geometric means as bars, and as figures in a column; 1 as a line."""
    for y, values in enumerate(kinds):
        if not values:
            continue
        mean = geometric_mean(values)
        spread = [[mean - min(values)], [max(values) - mean]]
        axis.barh(
            y, mean, 0.62, color=BURST, alpha=0.75, xerr=spread, label=_MEAN,
            error_kw={"ecolor": INK, "capsize": 3, "elinewidth": 1.2},
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
