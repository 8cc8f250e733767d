"""Draws docs/soak.png and docs/soak_gpu.png from the CSVs of these names: what ranks hold during
thousands of calls and groups."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
WHAT = {
    "rss_mib": "memory, MiB",
    "blocks": "Python objects, 1000",
    "threads": "threads",
    "descriptors": "descriptors",
    "gpu_mib": "GPU memory, MiB",
}
OF = {
    "calls": "calls of random masks, modes, lengths",
    "again": "calls of 30 kinds in turn",
    "groups": "groups made, used, destroyed",
}


def draw(name: str) -> None:
    with (DOCS / f"{name}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["number"] != "1"]
    shown = {what: label for what, label in WHAT.items() if any(float(row[what]) for row in rows)}
    kinds = {of: title for of, title in OF.items() if any(row["of"] == of for row in rows)}
    figure = Figure(figsize=(11, 1.75 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), len(kinds), sharex="col", sharey="row")
    for line, (what, label) in enumerate(shown.items()):
        scale = 1000 if what == "blocks" else 1
        for column, (of, title) in enumerate(kinds.items()):
            axis = axes[line][column]
            for rank in sorted({row["rank"] for row in rows}):
                mine = [row for row in rows if (row["of"], row["rank"]) == (of, rank)]
                numbers = [int(row["number"]) for row in mine]
                values = [float(row[what]) / scale for row in mine]
                (drawn,) = axis.plot(numbers, values, lw=1, label=f"rank {rank}")
                if what == "rss_mib":
                    free = [x + float(row["free_mib"]) for x, row in zip(values, mine, strict=True)]
                    axis.plot(numbers, free, lw=0.7, ls=":", color=drawn.get_color())
            axis.set_ylim(0, 1.1 * max(float(row[what]) for row in rows) / scale)
            axis.set_ylabel(label if column == 0 else "")
            axis.set_title(title if line == 0 else "", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(DOCS / f"{name}.png", dpi=120)


if __name__ == "__main__":
    for name in ("soak", "soak_gpu"):
        draw(name)
