"""What `--burst-keep auto` keeps, as a table; and a layout's peak memory against its step time."""

from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.auto import Point, budget_bytes, frontier, rows_of
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.pictures import new_figure
from megatron_burst.tools.terminal import say
from megatron_burst.tools.units import in_units

_COLUMNS = "layers on GPU", "layers on host", "GiB on GPU", "GiB on host", "ms saved"


def show_kept(console: Console, job: Job, strategy: Strategy) -> None:
    """Print what the first pipeline stage keeps, item by item."""
    gib = budget_bytes(job, strategy) / GIB
    is_given = strategy.keep_budget_gib is not None
    source = "given" if is_given else "that a step without keeping leaves"
    say(console, f"--burst-keep auto chooses within {gib:.2f} GiB ({source}):")
    rows = rows_of(job, strategy)
    if not rows:
        say(console, "nothing fits, so everything but a layer's last product is recomputed")
        return
    where = " of the first pipeline stage" if strategy.pp > 1 else ""
    numbers = (Column(name, justify="right", no_wrap=True) for name in _COLUMNS)
    table = Table(f"kept in layers{where}", *numbers, box=None, padding=(0, 3, 0, 0))
    for row in rows:
        sizes = f"{row.device_gib:.2f}", f"{row.host_gib:.2f}", f"{row.saved_ms:.1f}"
        table.add_row(row.name, str(row.device), str(row.host), *sizes)
    console.print(table)


def save_frontier(job: Job, strategy: Strategy, path: Path) -> None:
    """Draw a layout's frontier; the suffix is the format."""
    figure = new_figure(7.5, 5)
    ax, points = figure.subplots(), frontier(job, strategy)
    usable = job.hardware.gpu.usable_bytes / GIB
    kinds: dict[str, list[Point]] = {}
    for point in points:
        kinds.setdefault(point.name, []).append(point)
    ax.plot([p.peak_gib for p in points], [p.seconds for p in points], c="0.7", lw=1, zorder=1)
    for (name, some), marker in zip(kinds.items(), "soD", strict=False):
        ax.scatter([p.peak_gib for p in some], [p.seconds for p in some], marker=marker, label=name)
    if points[-1].peak_gib > usable:
        ax.axvline(usable, color="#b71c1c", lw=1, ls="--", label="usable memory")
    packed = "packed documents, " if job.packing else ""
    ax.set(
        xlabel="peak memory of a GPU, GiB", ylabel="a step, s",
        title=f"{job.model.base_name} {in_units(job.seq)}, {packed}{strategy.layout}: predicted",
    )  # fmt: skip
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
