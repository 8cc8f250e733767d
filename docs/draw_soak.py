"""Draws docs/soak.png and docs/soak_gpu.png from the CSVs of these names: what ranks hold during
thousands of calls and groups."""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.style import SERIES, legend_below

DOCS = Path(__file__).parent
TITLES = {  # GPUs and day, which the CSVs lack
    "soak": "what four CPU processes hold: no GPU, 2026-11-26",
    "soak_gpu": "what four ranks of one GPU hold: H100, 2026-11-27",
}
WHAT = {
    "rss_mib": "memory, MiB",
    "blocks": "Python objects,\n1000",
    "threads": "threads",
    "descriptors": "descriptors",
    "gpu_mib": "GPU memory,\nMiB",
}
OF = {
    "calls": ("calls of random masks, modes, lengths", "calls"),
    "again": ("calls of 30 kinds in turn", "calls"),
    "groups": ("groups made, used, destroyed", "groups"),
}
WIDTHS = 4.5, 3, 1.8, 0.8  # a rank's line lies in the one below it, where they are equal
FREE = "with memory that is free"


def draw(name: str) -> None:
    with (DOCS / f"{name}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["number"] != "1"]
    shown = [what for what in WHAT if any(float(row[what]) for row in rows)]
    kinds = [of for of in OF if any(row["of"] == of for row in rows)]
    figure = Figure(figsize=(11, 1.75 * len(shown) + 0.8), layout="constrained")
    axes = figure.subplots(len(shown), len(kinds), sharex="col", sharey="row", squeeze=False)
    for line, what in zip(axes, shown, strict=True):
        for axis, of in zip(line, kinds, strict=True):
            panel(axis, what, [row for row in rows if row["of"] == of])
        most = max(float(row[what]) for row in rows) / scale_of(what)
        line[0].set(ylim=(0, 1.1 * most), ylabel=WHAT[what])
    for top, bottom, of in zip(axes[0], axes[-1], kinds, strict=True):
        top.set_title(OF[of][0], fontsize=10)
        bottom.set_xlabel(OF[of][1])
    legend_below(figure)
    figure.suptitle(TITLES[name])
    figure.savefig(DOCS / f"{name}.png", dpi=120)


def panel(axis, what: str, rows: list[dict[str, str]]) -> None:
    """A line for each rank."""
    by_rank: dict[str, list[dict[str, str]]] = {}
    for row in sorted(rows, key=lambda row: row["rank"]):
        by_rank.setdefault(row["rank"], []).append(row)
    for (rank, mine), width, colour in zip(by_rank.items(), WIDTHS, SERIES, strict=False):
        values = [float(row[what]) / scale_of(what) for row in mine]
        axis.plot(numbers_of(mine), values, lw=width, color=colour, label=f"rank {rank}")
    for mine in by_rank.values() if what == "rss_mib" else ():
        free = [float(row[what]) + float(row["free_mib"]) for row in mine]
        axis.plot(numbers_of(mine), free, lw=0.7, ls=":", color="black", label=FREE)


def numbers_of(rows: list[dict[str, str]]) -> list[int]:
    """How many calls or groups there had been."""
    return [int(row["number"]) for row in rows]


def scale_of(what: str) -> int:
    """By what figures are divided."""
    return 1000 if what == "blocks" else 1


if __name__ == "__main__":
    for name in TITLES:
        draw(name)
