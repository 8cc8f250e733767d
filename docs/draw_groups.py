"""Draws docs/groups.png: intra and inter groups of context-parallel groups, found as burst does."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_burst.comm.grid import nodes_of
from megatron_burst.schedule.topology import Topology, topology_of

INTRA, INTER, OTHER = "#1f3d66", "#c2410c", "#d6d6d2"
# title, node of each GPU of the job, ranks of the group; GPUs of a node follow each other
GROUPS = {
    "CP 12: rings inside nodes and along rails": ("a" * 4 + "b" * 4 + "c" * 4, range(12)),
    "CP 6 beside TP 2: every second GPU": ("a" * 4 + "b" * 4 + "c" * 4, range(0, 12, 2)),
    "CP 9 on uneven nodes: one flat ring": ("a" * 4 + "b" * 3 + "c" * 2, range(9)),
}


def places(nodes: str) -> list[tuple[int, int]]:
    """Where each GPU is drawn: column and row."""
    names = list(dict.fromkeys(nodes))
    return [(nodes[:gpu].count(node), names.index(node)) for gpu, node in enumerate(nodes)]


def rings(topology: Topology) -> Iterator[tuple[Sequence[int], str]]:
    """cp ranks of each ring, and its colour."""
    columns = list(zip(*topology.grid, strict=True))
    yield from ((row, INTRA) for row in topology.grid if len(row) > 1)
    yield from ((column, INTER) for column in columns if len(column) > 1)


def arrow(axis: Axes, start: tuple[int, int], end: tuple[int, int], colour: str) -> None:
    """One hop of a ring; the way back to its first rank is bent around the others."""
    across, down = abs(end[0] - start[0]), abs(end[1] - start[1])
    far = across + down > 1 and not (across and down)
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.3, "shrinkA": 13, "shrinkB": 13}
    bend = f"arc3,rad={-0.28 if far else 0}"
    axis.annotate("", end, start, arrowprops={**style, "connectionstyle": bend})


def panel(axis: Axes, title: str, nodes: str, ranks: Sequence[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of uneven nodes, which are drawn on purpose
        topology = topology_of([nodes[rank] for rank in ranks])
    at = places(nodes)
    for members, colour in rings(topology):
        spots = [at[ranks[rank]] for rank in members]
        for start, end in zip(spots, [*spots[1:], spots[0]], strict=True):
            apart = start[1] != end[1]
            arrow(axis, start, end, INTER if apart else colour)
    for gpu, (column, row) in enumerate(at):
        member = gpu in ranks
        style = {"boxstyle": "round,pad=0.35", "ec": "none", "fc": INTRA if member else OTHER}
        text = {"color": "white" if member else "#777773", "ha": "center", "va": "center"}
        axis.text(column, row, f"{gpu}", bbox=style, fontsize=9, **text)
    for number, node in enumerate(nodes_of(topology)):
        axis.text(-0.75, number, f"node {number}\n{len(node)} ranks", ha="right", va="center")
    axis.set(title=title, xlim=(-2.1, 3.8), ylim=(2.8, -0.8))
    axis.set_axis_off()


def main() -> None:
    figure = Figure(figsize=(13.5, 3.6), layout="constrained")
    for axis, (title, (nodes, ranks)) in zip(
        figure.subplots(1, len(GROUPS)), GROUPS.items(), strict=True
    ):
        panel(axis, title, nodes, ranks)
    figure.supxlabel(
        "boxes: GPUs by global rank; blue arrows: intra (a row); orange arrows: between nodes "
        "(inter: a column, on one rail)", fontsize=10,
    )  # fmt: skip
    figure.savefig(Path(__file__).with_name("groups.png"), dpi=110)


if __name__ == "__main__":
    main()
