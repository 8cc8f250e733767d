"""Pictures of plans: a layer's attention over time, ranks x time, compute and each link as lanes; a
packed sample, queries x keys, each rank's in its colour, and work by rank."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.schedule.modes import describe_mode
from megatron_burst.schedule.spec import Direction
from megatron_burst.schedule.topology import Topology
from megatron_burst.tools.job.strategy import Job, Strategy, attention_call
from megatron_burst.tools.packed import Way, rows_of_rank
from megatron_burst.tools.simulate.call import attention_time
from megatron_burst.tools.simulate.timing import Span, Timeline
from megatron_burst.tools.units import in_units

_MOST_RANKS = 64  # in one picture
_MOST_ROWS, _MOST_NODES = 16, 3  # above, some ranks of a node and some nodes are drawn
_PART = 0.1, 0.15  # of a pass, which is drawn larger beside it
_LEAST = 0.8  # points around a transfer, so that one that is shorter than a pixel is seen
_LANES = {"compute": (0.46, 0.46), "intra": (0.24, 0.2), "inter": (0.02, 0.2)}  # bottom, height
_KINDS = {  # what it is, and its colours in even and odd rounds
    "attention": ("attention (rounds in turn dark and light)", "#1f5fa8", "#6ea3d8"),
    "merge": ("merging, summing", "#2e7d32", "#2e7d32"),
    "copy": ("packing", "#9ccc65", "#9ccc65"),
    "wait": ("waiting for a link", "#e53935", "#e53935"),
    "read": ("receiving inputs", "#ef8f00", "#ffc233"),
    "grad": ("receiving gradients", "#7b1fa2", "#b76fd0"),
}
COLOURS = ("#1f5fa8", "#ef8f00", "#2e7d32", "#b71c1c", "#7b1fa2", "#00838f", "#8d6e63", "#c0a000")
PALER = ("#8fb4de", "#ffcf86", "#8fc793", "#e59a9a", "#c79bd6", "#7fc4ca", "#c9b7ae", "#e6d67a")
_STRIPES = 4  # turns of ranks' stripes in the longest document, where heads are sharded

Corners = list[tuple[float, float]]


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches.

    Raises:
        BurstError: if matplotlib (the extra `plots`) is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BurstError(
            "plan: --picture needs matplotlib, which draws it; got an environment without it; run "
            "pip install matplotlib, or leave the option out"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_picture(job: Job, strategy: Strategy, path: Path) -> None:
    """Draw both passes, of many ranks a part of each larger too; the suffix is the format."""
    call = attention_call(job, strategy)
    sample = job.packing and job.packing.sharded(strategy.cp)
    ranks = range(min(call.topology.cp_size, _MOST_RANKS))
    drawn = _drawn(ranks, call.topology)
    is_folded = len(drawn) < len(ranks)
    figure = new_figure(12, max(3.0, 0.5 * len(drawn) + is_folded) * 2 + 1.2)
    axes = figure.subplots(2, 1 + is_folded, squeeze=False, width_ratios=(3, 2)[: 1 + is_folded])
    kinds = set()
    for line, direction in zip(axes, Direction, strict=True):
        timeline = attention_time(
            call, job.hardware, direction, ranks=ranks, with_spans=True, sample=sample
        )
        ms = 1e3 * timeline.seconds
        _draw_panel(line[0], timeline, drawn, call.topology)
        line[0].set_title(f"{direction}: {ms:.4g} ms")
        for ax in line[1:]:
            _draw_panel(ax, timeline, drawn, call.topology)
            ax.set(
                title=f"{_PART[1] - _PART[0]:.0%} of it", xlim=[x * ms for x in _PART], yticks=()
            )
        kinds |= {_kind(span) for span in timeline.spans}
    figure.suptitle(_title(job, strategy, describe_mode(call), _shown(ranks, drawn, call.topology)))
    _add_legend(figure, kinds)
    figure.savefig(path, dpi=100)


def _title(job: Job, strategy: Strategy, how: str, some: str) -> str:
    packed = "packed documents, " if job.packing else ""
    return (
        f"{job.model.base_name} {in_units(job.seq)}, predicted for {job.hardware.name}, {packed}"
        f"{strategy.layout}: one layer's attention,\n{how}{some}"
    )


def _add_legend(figure: Any, kinds: Collection[str]) -> None:
    from matplotlib.patches import Patch

    shown = {name: colour for kind, (name, colour, _) in _KINDS.items() if kind in kinds}
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in shown.items()],
        loc="outside lower center", ncols=6, fontsize=9, frameon=False,
        title="lanes of a rank, from above: kernels, NVLink in, network in",
    )  # fmt: skip


def _drawn(ranks: range, topology: Topology) -> list[int]:
    """The ranks that have a row: all, or the first and the last one of each node; of many nodes
    the first two and the last, as those between them do the same with other shards."""
    if len(ranks) <= _MOST_ROWS:
        return list(ranks)
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(topology.node_of[rank], []).append(rank)
    some = list(nodes.values())
    some = some if len(some) <= _MOST_NODES else [*some[:2], some[-1]]
    return [rank for node in some for rank in dict.fromkeys((node[0], node[-1]))]


def _shown(ranks: range, drawn: Sequence[int], topology: Topology) -> str:
    """Which ranks have a row, in words; "" for all."""
    some = "" if len(ranks) == topology.cp_size else f", the first {len(ranks)} ranks"
    if topology.intra_size > 1 and len(drawn) < len(ranks):
        some += "; the first and the last rank of a node"
    nodes, others = ({topology.node_of[rank] for rank in which} for which in (drawn, ranks))
    if left := len(others - nodes):
        some += f", the other {left} nodes alike"
    return some


def _draw_panel(ax: Any, timeline: Timeline, ranks: Sequence[int], topology: Topology) -> None:
    import numpy
    from matplotlib.collections import PolyCollection

    bars, colours, edges, rows = [], [], [], {rank: row for row, rank in enumerate(ranks)}
    for span in timeline.spans:
        if span.rank not in rows:
            continue
        low, height = _LANES[span.lane]
        low, start, stop = low - rows[span.rank], 1e3 * span.start, 1e3 * span.stop
        bars.append([(start, low), (start, low + height), (stop, low + height), (stop, low)])
        colours.append(_KINDS[_kind(span)][1 + span.round % 2])
        edges.append(0 if span.lane == "compute" else _LEAST)
    # one artist: there are tens of thousands of spans
    corners: Any = numpy.array(bars)  # matplotlib's types name sequences only
    ax.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="face", linewidths=edges),
        autolim=False,
    )
    for before, after in pairwise(ranks):
        if topology.node_of[before] != topology.node_of[after]:
            ax.axhline(-rows[before], color="0.3", lw=1, ls=":")
    ax.set(xlabel="ms", xlim=(0, 1e3 * timeline.seconds), ylim=(-len(ranks) + 0.95, 1.05))
    names = [f"rank {rank}, node {topology.node_of[rank]}" for rank in ranks]
    ax.set_yticks([0.5 - row for row in rows.values()], names, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _kind(span: Span) -> str:
    return "wait" if span.what.startswith("wait") else span.what


def save_sample_picture(ways: Mapping[str, Way], title: str, path: Path) -> None:
    """Draw ways, by name, beside each other under a title; the suffix is the format."""
    figure = new_figure(4.1 * len(ways) + 0.4, 6.3)
    axes = figure.subplots(2, len(ways), squeeze=False, height_ratios=(2.6, 1), sharey="row")
    most = max(1.25, *(1.2 * way.imbalance for way in ways.values()))
    for column, (name, way) in enumerate(ways.items()):
        _draw_sample(axes[0][column], name, way)
        _draw_work(axes[1][column], way, most)
    axes[0][0].set_ylabel("queries, K tokens", fontsize=11)
    axes[1][0].set_ylabel("work of a rank / mean", fontsize=11)
    figure.suptitle(fill(title, 34 * len(ways)), fontsize=13)
    figure.savefig(path, dpi=110)


def _colour(rank: int) -> str:
    colours = COLOURS if rank // len(COLOURS) % 2 == 0 else PALER
    return colours[rank % len(colours)]


def _draw_sample(ax: Any, name: str, way: Way) -> None:
    """Who computes which pairs; each document is a triangle."""
    from matplotlib.collections import PolyCollection

    size = way.call.topology.cp_size
    slices = [(rank, _corners(way, rows)) for rank in range(size) for rows in _rows(way, rank)]
    shapes = [(rank, some) for rank, every in slices for some in every]
    ax.add_collection(
        PolyCollection([s for _, s in shapes], facecolors=[_colour(r) for r, _ in shapes], lw=0),
        autolim=False,
    )
    edges = pairwise(way.sample.edges)
    whole = [_triangle(start, stop, start) for start, stop in edges if stop > start]
    ax.add_collection(
        PolyCollection(whole, facecolors="none", edgecolors="0.15", lw=0.5), autolim=False
    )
    end = way.sample.tokens / 1024
    ax.set(xlim=(0, end), ylim=(end, 0), aspect="equal")
    ax.set_xlabel("keys, K tokens", fontsize=11)
    ax.set_title(f"{fill(name, 34)}\n{fill(describe_mode(way.call), 34)}", fontsize=12)
    words = f"predicted: {1e3 * sum(way.seconds):.3g} ms,\n{way.tflops:.0f} TFLOP/s per GPU"
    if way.call.intra == "a2a":
        words += f"\n\neach rank has all rows,\n1/{size} of the heads"
    ax.text(0.97, 0.96, words, transform=ax.transAxes, ha="right", va="top", fontsize=11)


def _rows(way: Way, rank: int) -> Sequence[range]:
    """Queries that a rank computes; of sharded heads stripes, as each rank has all rows."""
    if way.call.intra != "a2a":
        return rows_of_rank(way, rank)
    size = way.call.topology.cp_size
    step = ceil(max(way.sample.lengths) / size / _STRIPES)
    return [range(at, at + step) for at in range(rank * step, way.sample.tokens, size * step)]


def _corners(way: Way, rows: range) -> Iterator[Corners]:
    """What queries see, document by document."""
    present = range(rows.start, min(rows.stop, way.sample.tokens))
    for document, queries in way.sample.within((present,)):
        yield _triangle(queries.start, queries.stop, way.sample.edges[document])


def _triangle(start: int, stop: int, first: int) -> Corners:
    """Queries of a document and their keys up to the diagonal, in K tokens."""
    corners = ((first, start), (start, start), (stop, stop), (first, stop))
    return [(x / 1024, y / 1024) for x, y in corners]


def _draw_work(ax: Any, way: Way, most: float) -> None:
    """A bar for each rank."""
    mean = sum(way.work) / len(way.work)
    ranks = range(len(way.work))
    ax.bar(ranks, [work / mean for work in way.work], 0.8, color=[_colour(r) for r in ranks])
    ax.axhline(1, color="0.3", lw=0.8, ls=":")
    ax.set(ylim=(0, most))
    ax.set_xlabel("rank", fontsize=11)
    ax.set_xticks(ranks[:: ceil(len(ranks) / 16)])
    ax.set_title(f"slowest / mean: {way.imbalance:.2f}", fontsize=12)
    ax.spines[["top", "right"]].set_visible(False)
