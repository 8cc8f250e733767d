"""A simulated pass as a picture: ranks x time, with compute and each link as lanes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_burst.plan.timing import Span, Timeline
from megatron_burst.schedule.topology import Topology

MOST_RANKS = 64  # that a picture shows
_LANES = {"compute": (0.46, 0.46), "intra": (0.24, 0.2), "inter": (0.02, 0.2)}  # bottom, height
_COLOURS = {
    "attention": ("#1f5fa8", "#6ea3d8"),  # of even and odd rounds
    "merge": ("#2e7d32", "#2e7d32"),
    "copy": ("#9ccc65", "#9ccc65"),
    "wait": ("#e53935", "#e53935"),
    "read": ("#ef8f00", "#ffc233"),
    "grad": ("#7b1fa2", "#b76fd0"),
}
_NAMES = {
    "attention": "attention (rounds in turn dark and light)",
    "merge": "merging, summing",
    "copy": "packing",
    "wait": "waiting for a link",
    "read": "data that arrives",
    "grad": "gradients that arrive",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One pass.

    Attributes:
        title: of the panel.
        timeline: what happened.
    """

    title: str
    timeline: Timeline


def save_timelines(panels: Sequence[Panel], topology: Topology, path: Path) -> None:
    """Draw passes side by side (many ranks) or above each other; the suffix is the format.

    Args:
        panels: the passes, of the same ranks.
        topology: of their group.
        path: where to write; needs matplotlib (the extra `plots`).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in panels[0].timeline.spans})
    many = len(ranks) > 12
    shape = (1, len(panels)) if many else (len(panels), 1)
    height = max(3.0, (0.3 if many else 0.5) * len(ranks)) * shape[0] + 1.2
    figure = Figure(figsize=(12 * shape[1], height), layout="constrained")
    axes = figure.subplots(*shape, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, panel, ranks, topology)
    kinds = {_kind(span) for panel in panels for span in panel.timeline.spans}
    patches = [
        Patch(color=_COLOURS[kind][0], label=_NAMES[kind]) for kind in _NAMES if kind in kinds
    ]
    lanes = "lanes of a rank, from above: kernels, NVLink in, network in"
    figure.legend(
        handles=patches, loc="outside lower center", ncols=6, fontsize=9, frameon=False, title=lanes
    )
    figure.savefig(path, dpi=100)


def _draw_panel(ax: Any, panel: Panel, ranks: Sequence[int], topology: Topology) -> None:
    import numpy
    from matplotlib.collections import PolyCollection

    place = {rank: -index for index, rank in enumerate(ranks)}
    bars, colours = [], []
    for span in panel.timeline.spans:
        low, height = _LANES[span.lane]
        low, start, stop = place[span.rank] + low, 1e3 * span.start, 1e3 * span.stop
        bars.append([(start, low), (start, low + height), (stop, low + height), (stop, low)])
        colours.append(_COLOURS[_kind(span)][span.round % 2])
    # one artist: there are tens of thousands of spans
    corners: Any = numpy.array(bars)  # its types name sequences only
    every = PolyCollection(corners, facecolors=colours, linewidth=0)
    ax.add_collection(every, autolim=False)
    for before, after in pairwise(ranks):
        if topology.node_of[before] != topology.node_of[after]:
            ax.axhline(place[before], color="0.3", lw=1, ls=":")
    ax.set(
        title=panel.title, xlabel="ms", xlim=(0, 1e3 * panel.timeline.seconds),
        ylim=(-len(ranks) + 0.95, 1.05),
    )  # fmt: skip
    names = [f"rank {rank}, node {topology.node_of[rank]}" for rank in ranks]
    ax.set_yticks([place[rank] + 0.5 for rank in ranks], names, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _kind(span: Span) -> str:
    return "wait" if span.what.startswith("wait") else span.what
