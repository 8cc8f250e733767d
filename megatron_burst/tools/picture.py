"""A simulated layer's attention as a picture: ranks x time, compute and each link as lanes."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.resolve import how_it_runs
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Topology
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call
from megatron_burst.tools.simulate.call import attention_time
from megatron_burst.tools.simulate.timing import Span, Timeline
from megatron_burst.tools.units import in_units

_MOST_RANKS = 64  # in one picture
_LANES = {"compute": (0.46, 0.46), "intra": (0.24, 0.2), "inter": (0.02, 0.2)}  # bottom, height
_KINDS = {  # what it is, and its colours in even and odd rounds
    "attention": ("attention (rounds in turn dark and light)", "#1f5fa8", "#6ea3d8"),
    "merge": ("merging, summing", "#2e7d32", "#2e7d32"),
    "copy": ("packing", "#9ccc65", "#9ccc65"),
    "wait": ("waiting for a link", "#e53935", "#e53935"),
    "read": ("receiving inputs", "#ef8f00", "#ffc233"),
    "grad": ("receiving gradients", "#7b1fa2", "#b76fd0"),
}


def base_name(model: str) -> str:
    """A model's name without the folders of its file; a config.json with the last of them."""
    path = Path(model)
    if not path.suffix:
        return model
    return f"{path.parent.name}/{path.name}".lstrip("/") if path.stem == "config" else path.name


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches.

    Raises:
        BurstError: if matplotlib (the extra `plots`) is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BurstError(
            "plan: --picture needs matplotlib, because it draws; got none installed; pip install "
            "matplotlib, or leave --picture out"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_picture(job: Job, strategy: Strategy, path: Path) -> None:
    """Draw both passes side by side (many ranks) or above each other; the suffix is the format.

    Raises:
        BurstError: if matplotlib (the extra `plots`) is not installed.
    """
    call = attention_call(job, strategy)
    sample = job.packing and job.packing.sharded(strategy.cp)
    ranks = range(min(call.topology.cp_size, _MOST_RANKS))
    many = len(ranks) > 12
    shape = (1, 2) if many else (2, 1)
    height = max(3.0, (0.3 if many else 0.5) * len(ranks)) * shape[0] + 1.2
    figure = new_figure(12 * shape[1], height)
    axes = figure.subplots(*shape, squeeze=False).ravel()
    packed = "packed documents, " if job.packing else ""
    some = "" if len(ranks) == call.topology.cp_size else f", the first {len(ranks)} ranks"
    kinds = set()
    for ax, direction in zip(axes, Direction, strict=True):
        timeline = attention_time(call, job.hardware, direction, ranks=ranks, sample=sample)
        _draw_panel(ax, timeline, ranks, call.topology)
        ax.set_title(
            f"{base_name(job.model.name)} {in_units(job.seq)}, {packed}{strategy.layout}: one "
            f"layer's attention, {direction},\n{how_it_runs(call)}{some}, "
            f"{1e3 * timeline.seconds:.4g} ms"
        )
        kinds |= {_kind(span) for span in timeline.spans}
    shown = {name: colour for kind, (name, colour, _) in _KINDS.items() if kind in kinds}
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in shown.items()],
        loc="outside lower center", ncols=6, fontsize=9, frameon=False,
        title="lanes of a rank, from above: kernels, NVLink in, network in",
    )  # fmt: skip
    figure.savefig(path, dpi=100)


def _draw_panel(ax: Any, timeline: Timeline, ranks: Sequence[int], topology: Topology) -> None:
    import numpy
    from matplotlib.collections import PolyCollection

    bars, colours = [], []
    for span in timeline.spans:
        low, height = _LANES[span.lane]
        low, start, stop = low - span.rank, 1e3 * span.start, 1e3 * span.stop
        bars.append([(start, low), (start, low + height), (stop, low + height), (stop, low)])
        colours.append(_KINDS[_kind(span)][1 + span.round % 2])
    # one artist: there are tens of thousands of spans
    corners: Any = numpy.array(bars)  # matplotlib's types name sequences only
    ax.add_collection(PolyCollection(corners, facecolors=colours, linewidth=0), autolim=False)
    for before, after in pairwise(ranks):
        if topology.node_of[before] != topology.node_of[after]:
            ax.axhline(-before, color="0.3", lw=1, ls=":")
    ax.set(xlabel="ms", xlim=(0, 1e3 * timeline.seconds), ylim=(-len(ranks) + 0.95, 1.05))
    names = [f"rank {rank}, node {topology.node_of[rank]}" for rank in ranks]
    ax.set_yticks([0.5 - rank for rank in ranks], names, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _kind(span: Span) -> str:
    return "wait" if span.what.startswith("wait") else span.what
