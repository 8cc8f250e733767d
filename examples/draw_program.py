"""A picture of what one rank does in a pass, from its program: operations by stream and link, and
what waits for what.

Run as a script, it draws docs/program.png: a backward pass on two nodes x two ranks.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import Op, Program, Stream, Transfer
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction, Spec
from megatron_burst.schedule.topology import pretend_nodes

LANES = {  # color, and what it is
    "intra": ("#f3e6c8", "transfers inside the node"),
    "compute": ("#dbe7f5", "the call's stream"),
    "side": ("#e4f0dd", "stream of what waits for other nodes"),
    "inter": ("#f6d9cc", "transfers between nodes"),
}
WIDTH, HEIGHT = 0.76, 0.8  # of a box, in lanes and rows
ARROWS = {  # what is read must be there; what is overwritten must have been read
    True: {"color": "#1f3d66", "lw": 1.3, "ls": "-"},
    False: {"color": "#c2410c", "lw": 1.3, "ls": (0, (4, 2))},
}


def save_picture(panels: Sequence[Spec], path: Path) -> None:
    """Draw the programs of resolved specs, one below the other; the path's suffix sets the
    format."""
    programs = [program_of(spec) for spec in panels]
    heights = [0.75 + 0.575 * len(rows_of(each, order(each).waits)) for each in programs]
    figure = Figure(figsize=(13, 0.4 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, spec, program in zip(axes, panels, programs, strict=True):
        draw(ax, program)
        if len(panels) > 1:
            ax.set_title(f"{spec.direction} of rank {spec.cp_rank} on {spec.topology}", loc="left")
    for data, style in ARROWS.items():
        what = "waits for data" if data else "waits for memory to be free"
        axes[-1].plot([], [], label=what, **style)
    axes[-1].legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False, fontsize=9.5
    )
    figure.savefig(path, dpi=110)


def lane(op: Op) -> str:
    return op.link if isinstance(op, Transfer) else op.stream


def rows_of(program: Program, waits: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Operations by row: those of one kind and lane that follow each other share one, unless a
    later one of them waits."""
    starts = 0

    def row(index: int) -> int:
        nonlocal starts
        one, before = program.ops[index], program.ops[index - 1]
        alike = index and type(one) is type(before) and lane(one) == lane(before)
        starts += not alike or bool(waits[index])
        return starts

    return [list(found) for _, found in groupby(range(len(program.ops)), row)]


def label(program: Program, row: list[int]) -> str:
    ops = [program.ops[index] for index in row]
    numbers = f"{row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}"
    read = dict.fromkeys(name for op in ops for name in sources(op))
    written = dict.fromkeys(ref.buffer for op in ops for ref in op.writes)
    what = f"{', '.join(read)} → {', '.join(written)}"
    return f"{numbers}  {type(ops[0]).__name__}\n{fill(what, 36)}"


def sources(op: Op) -> list[str]:
    """What an operation reads; a transfer brings what others have."""
    if isinstance(op, Transfer):
        return [f"rank {take.peer}'s {take.remote_rows.buffer}" for take in op.recvs]
    return [ref.buffer for ref in op.reads]


def draw(ax: Axes, program: Program) -> None:
    waits = order(program).waits
    rows, names = rows_of(program, waits), list(LANES)
    at = {index: (names.index(lane(program.ops[index])), -place)
          for place, row in enumerate(rows) for index in row}  # fmt: skip
    for name in Stream:  # which runs its operations in the order in which they are issued
        ax.axvline(names.index(name), color="0.7", lw=1, zorder=0)
    for row in rows:
        x, y = at[row[0]]
        corner = x - WIDTH / 2, y - HEIGHT / 2
        box = FancyBboxPatch(
            corner, WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.06",
            fc=LANES[names[x]][0], ec="0.55", lw=0.6, zorder=2,
        )  # fmt: skip
        ax.add_patch(box)
        ax.text(x, y, label(program, row), ha="center", va="center", fontsize=8.5, zorder=4)
    for index, earlier in ((i, e) for i, found in enumerate(waits) for e in found):
        arrow(ax, program, at, earlier, index)
    ax.set_xlim(-0.55, len(LANES) - 0.45)
    ax.set_ylim(-len(rows) + 0.45, 0.55)
    ax.set_xticks(range(len(LANES)), [f"{name}\n{LANES[name][1]}" for name in names], fontsize=9.5)
    ax.set_yticks([])
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def arrow(
    ax: Axes, program: Program, at: dict[int, tuple[int, int]], earlier: int, index: int
) -> None:
    """From what is waited for to what waits."""
    came, brings = program.ops[index], program.ops[earlier]
    data = {ref.buffer for ref in brings.writes} & {ref.buffer for ref in came.reads}
    (x, y), (to_x, to_y) = at[earlier], at[index]
    side = WIDTH / 2 if to_x > x else -WIDTH / 2
    ax.annotate(
        "", xy=(to_x - side, to_y + 0.1), xytext=(x + side, y - 0.1),
        arrowprops={"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, **ARROWS[bool(data)]},
        zorder=1,
    )  # fmt: skip


if __name__ == "__main__":
    shape = AttentionShape(
        batch=1, tokens=8, heads_q=2, heads_kv=2, dim_qk=8, dim_v=8, itemsize=2, stat_bytes=4,
        grad_bytes=4,
    )  # fmt: skip
    backward = Spec(
        pretend_nodes(4, 2), shape, intra="gather", heads_per_round=2, circulate=Circulate.KV,
        pulled=True, saves_remote=True, direction=Direction.BACKWARD,
    )  # fmt: skip
    save_picture([backward], Path(__file__).parents[1] / "docs" / "program.png")
