"""A packed sample as a picture: queries x keys, each rank's in its colour, and work by rank."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from megatron_burst.resolve import how_it_runs
from megatron_burst.tools.packed import Way, rows_of_rank
from megatron_burst.tools.picture import new_figure

_COLOURS = ("#1f5fa8", "#ef8f00", "#2e7d32", "#b71c1c", "#7b1fa2", "#00838f", "#8d6e63", "#c0a000")
_PALER = ("#8fb4de", "#ffcf86", "#8fc793", "#e59a9a", "#c79bd6", "#7fc4ca", "#c9b7ae", "#e6d67a")
_STRIPES = 4  # turns of ranks' stripes in the longest document, where heads are sharded

Corners = list[tuple[float, float]]


def save_sample_picture(ways: Mapping[str, Way], title: str, path: Path) -> None:
    """Draw ways beside each other; the suffix is the format.

    Args:
        ways: by name.
        title: above all.
        path: to write.

    Raises:
        BurstError: if matplotlib (the extra `plots`) is not installed.
    """
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
    colours = _COLOURS if rank // len(_COLOURS) % 2 == 0 else _PALER
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
    whole = [_triangle(way, start, stop, start) for start, stop in _documents(way)]
    ax.add_collection(
        PolyCollection(whole, facecolors="none", edgecolors="0.15", lw=0.5), autolim=False
    )
    end = way.sample.tokens / 1024
    ax.set(xlim=(0, end), ylim=(end, 0), aspect="equal")
    ax.set_xlabel("keys, K tokens", fontsize=11)
    ax.set_title(f"{fill(name, 34)}\n{fill(how_it_runs(way.call), 34)}", fontsize=12)
    words = f"predicted: {1e3 * sum(way.seconds):.3g} ms,\n{way.tflops:.0f} TFLOP/s per GPU"
    if way.call.intra == "a2a":
        words += f"\n\neach rank has all rows,\n1/{size} of the heads"
    ax.text(0.97, 0.96, words, transform=ax.transAxes, ha="right", va="top", fontsize=11)


def _documents(way: Way) -> Iterator[tuple[int, int]]:
    return ((start, stop) for start, stop in pairwise(way.sample.edges) if stop > start)


def _rows(way: Way, rank: int) -> Sequence[range]:
    """Queries that a rank computes; of sharded heads stripes, as each rank has all rows."""
    if way.call.intra != "a2a":
        return rows_of_rank(way, rank)
    size = way.call.topology.cp_size
    step = ceil(max(way.sample.lengths) / size / _STRIPES)
    return [range(at, at + step) for at in range(rank * step, way.sample.tokens, size * step)]


def _corners(way: Way, rows: range) -> Iterator[Corners]:
    """What queries see, document by document."""
    for document, some in way.sample.within(
        (range(rows.start, min(rows.stop, way.sample.tokens)),)
    ):
        yield _triangle(way, some.start, some.stop, way.sample.edges[document])


def _triangle(way: Way, start: int, stop: int, first: int) -> Corners:
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
