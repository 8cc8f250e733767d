"""Draws docs/soak.png and docs/soak_gpu.png from the CSVs of these names: the memory that ranks
hold during thousands of calls and groups."""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.style import SERIES

DOCS = Path(__file__).parent
TITLES = {  # GPUs and day, which the CSVs lack
    "soak": "memory of the largest of four CPU processes, 2026-11-26",
    "soak_gpu": "memory of the largest of four ranks on one H100, 2026-11-27",
}
WHAT = {"rss_mib": ("host", "-"), "gpu_mib": ("GPU", "--")}
OF = {
    "calls": "calls of random masks, modes and lengths", "again": "calls of 30 kinds in turn",
    "groups": "groups made, used and destroyed",
}  # fmt: skip


def draw(name: str) -> None:
    with (DOCS / f"{name}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["number"] != "1"]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for (of, words), colour in zip(OF.items(), SERIES, strict=False):
        mine = [row for row in rows if row["of"] == of]
        for what, (kind, line) in WHAT.items():
            largest: dict[int, float] = {}
            for row in mine:
                number = int(row["number"])
                largest[number] = max(float(row[what]), largest.get(number, 0.0))
            if any(largest.values()):
                share = [100 * number / max(largest) for number in largest]
                label = f"{kind} memory, {max(largest):,} {words}"
                axis.plot(share, largest.values(), color=colour, ls=line, label=label)
    axis.set(title=TITLES[name], xlabel="% of the run", ylabel="MiB")
    axis.set_ylim(0, 1.1 * axis.dataLim.y1)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=9)
    figure.savefig(DOCS / f"{name}.png", dpi=120)


if __name__ == "__main__":
    for name in TITLES:
        draw(name)
