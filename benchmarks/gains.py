"""One picture of all gains: burst against TransformerEngine's best mode, in time and in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ratios import Ratio
from benchmarks.rows import Row
from benchmarks.style import BURST, legend_below, measured_on
from benchmarks.tables import Comparison, Problem, compare

_PIXELS = 800  # width of a README's column
_DPI = 100
_POINT = "#12344d"
_ON_CUDNN = "burst:backend=cudnn"
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
    """Draw a bar for each kind, with a point for each of its problems."""
    gains = gains_of(rows)
    size = _PIXELS / _DPI, (0.62 * len(gains) + 1.6)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    alone, same = (
        {y: geometric_mean(found) for y, found in enumerate(of) if found}
        for of in ([each.kernel for each in gains], [each.same_kernel for each in gains])
    )
    _bars(left, [each.speed for each in gains], "times as fast", alone)
    left.plot(same.values(), same.keys(), "D", color="white", markeredgecolor=_POINT, label=_SAME)
    _bars(right, [each.memory for each in gains], "times less memory", {})
    left.set_yticks(range(len(gains)), [each.label for each in gains])
    left.invert_yaxis()
    figure.suptitle(f"attention; 1 is TransformerEngine's fastest mode: {measured_on(rows)}")
    legend_below(figure, fontsize=9)
    figure.savefig(path, dpi=_DPI)


def _bars(
    axis: Axes, kinds: Sequence[Sequence[float]], unit: str, alone: Mapping[int, float]
) -> None:
    """Geometric means as bars, each problem as a point, 1 as a line; means of the kernel alone as
    thin lines, or as a figure where they are beyond the edge."""
    edge = 1.18 * max(max(values, default=1) for values in kinds)
    for y, values in enumerate(kinds):
        if not values:
            continue
        mean, far = geometric_mean(values), max(values)
        axis.barh(y, mean, 0.62, color=BURST, alpha=0.75)
        axis.plot(values, [y] * len(values), "|", color=_POINT, markersize=9, label="one problem")
        kernel = alone.get(y, 0.0)
        if kernel > edge:
            said = f"kernel alone: {kernel:.2f} \N{RIGHTWARDS ARROW}"
            axis.annotate(said, (edge, y + 0.41), ha="right", va="center", fontsize=8)
        elif kernel:
            axis.plot([kernel] * 2, [y - 0.4, y + 0.4], "--", lw=1.2, color="black", label=_ALONE)
            far = max(far, kernel)
        axis.annotate(
            f"{mean:.2f}", (far, y), (6, 0), textcoords="offset points", va="center",
            fontweight="bold",
        )  # fmt: skip
    axis.axvline(1, color="black", lw=1)
    axis.set(xlabel=unit, xlim=(0, edge))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
