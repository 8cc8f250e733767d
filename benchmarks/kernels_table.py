"""What `kernels.py` wrote, as the Markdown table of docs/backends.md.

python benchmarks/kernels_table.py benchmarks/results/kernels_h200.csv
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

_PROBLEM = ("dim", "causal", "direction", "seq", "heads_q", "heads_kv")
_LINE = _PROBLEM[:3]
Rows = list[dict[str, str]]


def table(path: Path) -> str:
    """A line for each head dimension, mask and direction; a column for each kernel.

    A cell has medians over lengths and heads, TFLOP/s and the speed beside FlashAttention-4's, and
    the least and most of that in any turn. Of equal problems the newest row counts; what failed
    is left out.
    """
    with path.open(newline="") as file:
        newest = {
            tuple(row[x] for x in (*_PROBLEM, "what")): row
            for row in csv.DictReader(file)
            if row["tflops"]
        }
    lines: dict[tuple[str, ...], dict[str, Rows]] = {}
    for row in newest.values():
        cells = lines.setdefault(tuple(row[x] for x in _LINE), {})
        cells.setdefault(row["what"], []).append(row)
    kernels = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    head = ["head dimension", "mask", "direction", *(f"`{name}`" for name in kernels)]
    body = [
        [dim, "causal" if causal == "True" else "full", direction]
        + [_cell(cells.get(name, [])) for name in kernels]
        for (dim, causal, direction), cells in lines.items()
    ]
    return "\n".join(map(_line, [head, ["---"] * len(head), *body]))


def _cell(rows: Rows) -> str:
    if not rows:
        return "-"
    speed = f"{median(_numbers(rows, 'tflops')):.0f}"
    if not all(row["ratio"] for row in rows):
        return speed
    ratio = median(_numbers(rows, "ratio"))
    least, most = min(_numbers(rows, "ratio_least")), max(_numbers(rows, "ratio_most"))
    return speed if least == most == 1 else f"{speed}, {ratio:.2f} ({least:.2f}-{most:.2f})"


def _numbers(rows: Rows, column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(path: Annotated[Path, typer.Argument(help="a CSV of kernels.py")]) -> None:
    """Print the table."""
    print(table(path))


if __name__ == "__main__":
    typer.run(main)
