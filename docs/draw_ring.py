"""Draws docs/schedule.png: what all ranks of a ring do in forward and backward on two nodes x two
ranks, from their programs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.program import Attend, AttendBackward, Op, Program, Transfer
from megatron_burst.schedule.ring import ring
from megatron_burst.schedule.spec import AttentionShape, Cargo, Circulate, Direction, Spec
from megatron_burst.schedule.topology import Link, pretend_nodes


def save_picture(panels: Sequence[Spec], path: Path) -> None:
    """Draw rings as ranks x steps with their hops; the path's suffix sets the format.

    Args:
        panels: what is drawn, for instance forward and backward; of all ranks, whosever spec it is.
        path: where to write; needs matplotlib (the extra `plots`).
    """
    from matplotlib.figure import Figure

    programs = [
        [ring(replace(spec, cp_rank=rank)) for rank in range(spec.topology.cp_size)]
        for spec in panels
    ]
    columns = max(_steps(program) for some in programs for program in some)
    size = (2.6 + 1.7 * columns, (0.9 + 0.85 * len(programs[0])) * len(panels) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for ax, spec, some in zip(axes, panels, programs, strict=True):
        _draw_panel(ax, spec, some, columns)
    _draw_legend(axes[-1])
    figure.savefig(path, dpi=120)


def _number(name: str) -> int:
    """The step that a ring's buffer is named after: "remote 3", "part 3.1"."""
    return int(name.split()[-1].partition(".")[0])


def _steps(program: Program) -> int:
    """Steps of a rank; after those with kernels, gradients return."""
    hops = (op for op in program.ops if isinstance(op, Transfer))
    landed = (_number(take.rows.buffer) for op in hops for take in op.recvs)
    return max(program.topology.cp_size, 1 + max(landed, default=0))


def _draw_panel(ax: Any, spec: Spec, programs: Sequence[Program], columns: int) -> None:
    topology, steps = spec.topology, range(_steps(programs[0]))
    order = [rank for row in topology.grid for rank in row]
    height: dict[int, float] = {rank: -place for place, rank in enumerate(order)}
    for program in programs:
        for step in steps:
            _draw_step(ax, program, step, spec.shape.tokens, height[program.cp_rank])
        latest = 0
        for op in program.ops:
            if isinstance(op, Transfer):
                _draw_hop(ax, op, program, height, latest)
            else:
                latest = max(latest, _latest(op))
    for row in topology.grid[:-1]:
        ax.axhline(height[row[-1]] - 0.5, color="0.6", lw=1, ls=":")
    ax.set_title(
        f"{spec.direction} on {topology}, {spec.layout}, {spec.mask}: "
        f"{spec.circulate.upper()} circulates",
        loc="left", fontsize=10,
    )  # fmt: skip
    ax.set_xlim(-0.55, columns - 0.35)
    ax.set_ylim(-len(order) + 0.45, 0.55)
    ax.set_xticks(steps, [f"step {step}" for step in steps], fontsize=8)
    names = [f"rank {rank}\nnode {topology.node_of[rank]}" for rank in order]
    ax.set_yticks([height[rank] for rank in order], names, fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _draw_legend(ax: Any) -> None:
    for (link, cargo), style in _STYLES.items():
        what = "data" if cargo is Cargo.READ else "gradient"
        where = "inside a node" if link is Link.INTRA else "between nodes"
        ax.plot([], [], label=f"{what}, {where}", **style)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=8, frameon=False)


_STYLES: dict[tuple[Link, Cargo], dict[str, Any]] = {
    (Link.INTRA, Cargo.READ): {"color": "#1f5fa8", "lw": 1.1, "ls": "-"},
    (Link.INTER, Cargo.READ): {"color": "#c2410c", "lw": 2.0, "ls": "-"},
    (Link.INTRA, Cargo.GRAD): {"color": "#1f5fa8", "lw": 1.1, "ls": (0, (3, 2))},
    (Link.INTER, Cargo.GRAD): {"color": "#c2410c", "lw": 2.0, "ls": (0, (3, 2))},
}


def _draw_step(ax: Any, program: Program, step: int, tokens: int, y: float) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    topology, label = program.topology, "gradients\nreturn"
    color: Any = "0.93"
    home = step >= topology.cp_size
    if not home:
        row, column = topology.coord(program.cp_rank)
        round_, place = divmod(step, topology.intra_size)
        owner = topology.rank_at(row - round_, column - place)
        color = colormaps["turbo"](0.1 + 0.8 * owner / max(topology.cp_size - 1, 1))
        label = f"shard {owner}\n{_work(program, step, tokens)}"
    box = FancyBboxPatch(
        (step - 0.3, y - 0.22), 0.6, 0.44, boxstyle="round,pad=0.02", fc=color, ec="none",
        alpha=1 if home else 0.4, zorder=2,
    )  # fmt: skip
    ax.add_patch(box)
    paper = {"fc": "white", "ec": "none", "alpha": 0.6, "pad": 0.5}  # hops may run behind it
    ax.text(step, y, label, ha="center", va="center", fontsize=7.5, zorder=4, bbox=paper)


def _work(program: Program, step: int, tokens: int) -> str:
    """Briefly, which parts of the two shards meet in a step."""
    found = [kernel for kernel in map(_kernel, program.ops) if kernel and kernel[0] == step]
    if not found:
        return "idle"
    ((_, queries, keys, mask),) = found
    if mask.causal:
        return "causal"
    if keys < tokens:
        return "½ kv"
    return "½ q" if queries < tokens else "full"


def _kernel(op: Op) -> tuple[int, int, int, Mask] | None:
    """Step, rows of queries and of keys, and mask of a kernel."""
    if isinstance(op, Attend):
        side, made = op.q, op.into[0]
    elif isinstance(op, AttendBackward):
        side, made = op.sides[0], op.dq
    else:
        return None
    assert side.rows and op.kv.rows  # a ring has a tile's
    return _number(made.buffer), len(side.rows), len(op.kv.rows), op.mask


def _latest(op: Op) -> int:
    """The latest step whose buffers an operation uses."""
    names = (ref.buffer for ref in (*op.reads, *op.writes))
    return max((_number(name) for name in names if name[-1].isdigit()), default=0)


def _draw_hop(
    ax: Any, hop: Transfer, program: Program, height: dict[int, float], latest: int
) -> None:  # fmt: skip
    """Draw from the end of the step whose buffer is sent to the start of the one that needs it; a
    gradient from the `latest` step, in which its sum was complete."""
    ((give,), (take,)) = hop.sends, hop.recvs
    sent = _number(give.rows.buffer)
    start = sent if hop.cargo is Cargo.READ else max(sent, latest)
    link = program.topology.link(program.cp_rank, give.peer)
    lift = 0.1 if hop.cargo is Cargo.READ else -0.1
    ax.annotate(
        "",
        xy=(_number(take.rows.buffer) - 0.33, height[give.peer] + lift),
        xytext=(start + 0.33, height[program.cp_rank] + lift),
        arrowprops={
            "arrowstyle": "-|>",
            "connectionstyle": "arc3,rad=0.06",
            "shrinkA": 0,
            "shrinkB": 0,
            **_STYLES[link, hop.cargo],
        },
        zorder=3,
    )


if __name__ == "__main__":
    shape = AttentionShape(
        batch=1, tokens=8, heads_q=1, heads_kv=1, dim_qk=8, dim_v=8, itemsize=2, stat_bytes=4,
        grad_bytes=4,
    )  # fmt: skip
    both = [
        Spec(pretend_nodes(4, 2), shape, circulate=circulate, direction=direction)
        for direction, circulate in zip(Direction, Circulate, strict=True)
    ]
    save_picture(both, Path(__file__).parent / "schedule.png")
