"""Draws docs/soak.png from docs/soak.csv: what ranks hold during thousands of calls and groups."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
WHAT = {"rss_mib": "memory, MiB", "threads": "threads", "descriptors": "descriptors"}
OF = {"calls": "calls of random masks, modes, lengths", "groups": "groups made, used, destroyed"}


def main() -> None:
    with (DOCS / "soak.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots(len(WHAT), len(OF), sharex="col")
    for line, (what, label) in enumerate(WHAT.items()):
        for column, (of, title) in enumerate(OF.items()):
            axis = axes[line][column]
            for rank in sorted({row["rank"] for row in rows}):
                mine = [row for row in rows if (row["of"], row["rank"]) == (of, rank)]
                axis.plot([int(row["number"]) for row in mine], [float(row[what]) for row in mine],
                          lw=1, label=f"rank {rank}")  # fmt: skip
            axis.set_ylim(0, 1.15 * max(float(row[what]) for row in rows if row["of"] == of))
            axis.set_ylabel(label if column == 0 else "")
            axis.set_title(title if line == 0 else "", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(DOCS / "soak.png", dpi=120)


if __name__ == "__main__":
    main()
