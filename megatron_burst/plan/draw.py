"""Schedules of all ranks as text and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_burst.plan.schedule import Hop, Schedule, Step
from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.mask import Mask, Tile
from megatron_burst.schedule.topology import Link

_ARROWS = {
    (Link.INTRA, Cargo.READ): "→",
    (Link.INTER, Cargo.READ): "⇒",
    (Link.INTRA, Cargo.GRAD): "⇢",
    (Link.INTER, Cargo.GRAD): "⇛",
}
LEGEND = (
    "[r]: the shard of rank r visits; →r: its data goes on to rank r inside the host, ⇒r: on "
    "another host; ⇢r ⇛r: likewise the sum of a gradient, from the step before"
)


def as_text(schedules: Sequence[Schedule]) -> str:
    """One line a rank, one column a step.

    Args:
        schedules: of ranks 0..P-1, all of one kind.
    """
    first = schedules[0]
    steps = range(len(first.steps))
    cells = [[_cell(schedule.steps[step], schedule) for step in steps] for schedule in schedules]
    widths = [max(len(row[step]) for row in cells) for step in steps]
    widths = [max(width, len(f"step {step}")) for step, width in zip(steps, widths, strict=True)]
    lines = [title(first), LEGEND]
    lines.append("        " + "  ".join(f"step {s}".ljust(widths[s]) for s in steps))
    for rank, row in enumerate(cells):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"rank {rank:<3}{line}".rstrip())
    return "\n".join(lines)


def title(schedule: Schedule) -> str:
    """What a schedule is for, in one line."""
    return (
        f"{schedule.direction} on {schedule.topology}, {schedule.layout}, {schedule.mask}: "
        f"{schedule.circulate.upper()} circulates"
    )


def _cell(step: Step, schedule: Schedule) -> str:
    work = "home" if step.owner is None else f"[{step.owner}] {_work(step.tiles, schedule.tokens)}"
    hops = " ".join(f"{_ARROWS[_link(hop, schedule), hop.cargo]}{hop.dest}" for hop in step.hops)
    return f"{work} {hops}".strip()


def _work(tiles: tuple[Tile, ...], tokens: int) -> str:
    """Which part of the two shards meets, briefly."""
    if not tiles:
        return "idle"
    (tile,) = tiles
    if tile.mask is Mask.CAUSAL:
        return "causal"
    if len(tile.kv) < tokens:
        return "½ kv"
    return "½ q" if len(tile.q) < tokens else "full"


def _link(hop: Hop, schedule: Schedule) -> Link:
    return schedule.topology.link(schedule.cp_rank, hop.dest)


def save_picture(panels: Sequence[Sequence[Schedule]], path: Path) -> None:
    """Draw schedules as ranks x steps with their hops; the suffix of the path is the format.

    Args:
        panels: for each panel the schedules of ranks 0..P-1, for instance forward and backward.
        path: where to write; needs matplotlib (the extra `plots`).
    """
    from matplotlib.figure import Figure

    ranks = len(panels[0])
    columns = max(len(schedules[0].steps) for schedules in panels)
    size = (2.6 + 1.7 * columns, (0.9 + 0.85 * ranks) * len(panels) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, (ax, schedules) in enumerate(zip(axes, panels, strict=True)):
        _draw_panel(ax, schedules, columns, with_legend=panel == len(panels) - 1)
    figure.savefig(path, dpi=120)


def _draw_panel(ax: Any, schedules: Sequence[Schedule], columns: int, with_legend: bool) -> None:
    topology = schedules[0].topology
    order = [rank for row in topology.grid for rank in row]
    height: dict[int, float] = {rank: -place for place, rank in enumerate(order)}
    for schedule in schedules:
        for index, step in enumerate(schedule.steps):
            _draw_step(ax, step, schedule, index, height[schedule.cp_rank])
            for hop in step.hops:
                _draw_hop(ax, hop, schedule, index, height)
    for row in topology.grid[:-1]:
        ax.axhline(height[row[-1]] - 0.5, color="0.6", lw=1, ls=":")
    ax.set_title(title(schedules[0]), loc="left", fontsize=10)
    ax.set_xlim(-0.55, columns - 0.35)
    ax.set_ylim(-len(order) + 0.45, 0.55)
    steps = range(len(schedules[0].steps))
    ax.set_xticks(steps, [f"step {step}" for step in steps], fontsize=8)
    names = [f"rank {rank}\nhost {topology.host_of[rank]}" for rank in order]
    ax.set_yticks([height[rank] for rank in order], names, fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if with_legend:
        for (link, cargo), style in _STYLES.items():
            what = "data" if cargo is Cargo.READ else "gradient"
            where = "inside a host" if link is Link.INTRA else "between hosts"
            ax.plot([], [], label=f"{what}, {where}", **style)
        ax.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=8, frameon=False
        )


_STYLES: dict[tuple[Link, Cargo], dict[str, Any]] = {
    (Link.INTRA, Cargo.READ): {"color": "#1f5fa8", "lw": 1.1, "ls": "-"},
    (Link.INTER, Cargo.READ): {"color": "#c2410c", "lw": 2.0, "ls": "-"},
    (Link.INTRA, Cargo.GRAD): {"color": "#1f5fa8", "lw": 1.1, "ls": (0, (3, 2))},
    (Link.INTER, Cargo.GRAD): {"color": "#c2410c", "lw": 2.0, "ls": (0, (3, 2))},
}


def _draw_step(ax: Any, step: Step, schedule: Schedule, index: int, y: float) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    size, owner = schedule.topology.cp_size, step.owner
    home = owner is None
    color = "0.93" if owner is None else colormaps["turbo"](0.1 + 0.8 * owner / max(size - 1, 1))
    box = FancyBboxPatch(
        (index - 0.3, y - 0.22), 0.6, 0.44, boxstyle="round,pad=0.02", fc=color, ec="none",
        alpha=1 if home else 0.4, zorder=2,
    )  # fmt: skip
    ax.add_patch(box)
    label = (
        "gradients\ngo home"
        if home
        else f"shard {step.owner}\n{_work(step.tiles, schedule.tokens)}"
    )
    paper = {"fc": "white", "ec": "none", "alpha": 0.6, "pad": 0.5}  # hops may run behind it
    ax.text(index, y, label, ha="center", va="center", fontsize=7.5, zorder=4, bbox=paper)


def _draw_hop(ax: Any, hop: Hop, schedule: Schedule, index: int, height: dict[int, float]) -> None:
    style = _STYLES[_link(hop, schedule), hop.cargo]
    read = hop.cargo is Cargo.READ  # used in the step after it lands; a gradient in that step
    lift, shift = (0.1, 0) if read else (-0.1, -1)
    ax.annotate(
        "",
        xy=(hop.lands + 0.67 + shift, height[hop.dest] + lift),
        xytext=(index + 0.33 + shift, height[schedule.cp_rank] + lift),
        arrowprops={
            "arrowstyle": "-|>",
            "connectionstyle": "arc3,rad=0.06",
            "shrinkA": 0,
            "shrinkB": 0,
            **style,
        },
        zorder=3,
    )
