"""A picture of steps: which micro-batch each rank runs when, by each rule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_burst.tools.documents import Documents, Outcome
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.pictures import COLOURS, PALER, new_figure
from megatron_burst.tools.simulate.micro_batches import Ran
from megatron_burst.tools.units import in_units

_MOST_RANKS = 32  # data-parallel ones, in a panel
_FILLED = 0.9  # of a rank's height


def save_step_picture(job: Job, documents: Documents, path: Path) -> None:
    """Draw a panel for each rule, at its largest token limit; the suffix is the format.

    Raises:
        BurstError: if matplotlib (the extra `plots`) is not installed.
    """
    strategy = documents.strategy
    panels = list({one.rule: one for one in documents.outcomes}.values())
    count = min(strategy.dp, _MOST_RANKS)
    figure = new_figure(15, 2 * (1.2 + max(2.2, 0.28 * count)) + 1)
    axes = figure.subplots(2, 2, squeeze=False, sharex=True, sharey=True).ravel()
    end = max(one.first.seconds for one in panels)
    for ax, one in zip(axes, panels, strict=False):
        _draw_panel(ax, one, _shown(one, count))
        ax.set(xlim=(0, 1.02 * end), ylim=(1 - count, 1))
        ax.set_title(_title(one), fontsize=11)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(panels) - 2) : len(panels)]:
        ax.set_xlabel("predicted seconds, without gradients and optimizer")
    figure.suptitle(
        f"predicted for {job.hardware.name}: {job.model.base_name}, micro-batches of "
        f"{in_units(job.seq)} tokens, {strategy.layout}; the first draw.\n"
        f"{_rows(strategy, count)}", fontsize=12,
    )  # fmt: skip
    _add_legend(figure, strategy, panels)
    figure.savefig(path, dpi=100)


def _title(one: Outcome) -> str:
    return (
        f"{one.rule}, at most {one.grid.token_limit:,} tokens of a rank: "
        f"{one.first.seconds:.4g} s, ranks wait {one.first.waiting:.0%}"
    )


def _rows(strategy: Strategy, count: int) -> str:
    """What rows are."""
    within = f"{strategy.cp} context-parallel ranks" if strategy.cp > 1 else "one rank"
    if strategy.pp > 1:
        within = f"{strategy.pp} pipeline stages" + f" of {within}" * (strategy.cp > 1)
    which = "data-parallel rank"
    if count < strategy.dp:
        which += f" ({count} of {strategy.dp}, from the slowest to the fastest)"
    return f"A row is a {which} with {within}"


def _shown(one: Outcome, count: int) -> list[int]:
    """Data-parallel ranks of a panel: all, or some from the slowest to the fastest."""
    if one.grid.dp == count:
        return list(range(count))
    ends = [0.0] * one.grid.dp
    for ran in one.first.ran:
        ends[ran.dp_rank] = max(ends[ran.dp_rank], ran.stop)
    by_time = sorted(range(one.grid.dp), key=lambda rank: -ends[rank])
    return [by_time[round(n * (one.grid.dp - 1) / (count - 1))] for n in range(count)]


def _draw_panel(ax: Any, one: Outcome, ranks: Sequence[int]) -> None:
    import numpy
    from matplotlib.collections import PolyCollection

    row_of = {rank: row for row, rank in enumerate(ranks)}
    bars, colours = [], []
    for ran in (ran for ran in one.first.ran if ran.dp_rank in row_of):
        lanes = one.grid.pp * one.grid.cp
        top = ran.stage * one.grid.cp + ran.ranks.start
        high = 1 - row_of[ran.dp_rank] - _FILLED * top / lanes
        low = high - _FILLED * len(ran.ranks) / lanes
        bars.append([(ran.start, low), (ran.start, high), (ran.stop, high), (ran.stop, low)])
        colours.append(_colour(one, ran))
    corners: Any = numpy.array(bars)  # matplotlib's types name sequences only
    ax.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", lw=0.4), autolim=False
    )
    ax.axvline(one.first.seconds, color="0.3", lw=0.8, ls=":")
    ax.set_yticks([0.55 - row for row in range(len(ranks))], [f"DP {r}" for r in ranks], fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _colour(one: Outcome, ran: Ran) -> str:
    """By context-parallel size; paler: forward, or every second micro-batch where both passes are
    one bar."""
    paler = ran.what == "forward" or (ran.what == "both" and ran.number % 2 == 1)
    # powers of two: the group's own has the first colour
    place = (one.grid.cp // len(ran.ranks)).bit_length() - 1
    return (PALER if paler else COLOURS)[place % len(COLOURS)]


def _add_legend(figure: Any, strategy: Strategy, panels: Sequence[Outcome]) -> None:
    from matplotlib.patches import Patch

    sizes = sorted({len(ran.ranks) for one in panels for ran in one.first.ran}, reverse=True)
    named = {f"CP {cp}": COLOURS[(strategy.cp // cp).bit_length() - 1] for cp in sizes}
    pale = "pale: forward" if strategy.pp > 1 else "pale: every second micro-batch"
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in named.items()],
        loc="outside lower center", ncols=6, fontsize=9, frameon=False,
        title=f"micro-batches by context-parallel size; {pale}; white: waiting",
    )  # fmt: skip
