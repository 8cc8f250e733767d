"""What `kernels.py` wrote, as the Markdown table of docs/backends.md.

python benchmarks/kernels_table.py benchmarks/results/kernels_h200.csv
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its own folder alone

from benchmarks.kernels import KERNELS_CSV, Row
from benchmarks.rows import read
from megatron_burst.tools.terminal import in_one_sentence

_PROBLEM = ("dim", "causal", "direction", "seq", "heads_q", "heads_kv")
_LINE = _PROBLEM[:3]


def table(path: Path) -> str:
    """A line for each head dimension, mask and direction; a column for each kernel.

    A cell has medians over lengths and heads, TFLOP/s and the speed beside FlashAttention-4's, and
    the least and most of that in any turn. Of equal problems the newest row counts; what failed
    is left out.

    Raises:
        BurstError: if it is no CSV of kernels.py, or has no row.
    """
    measured = [row for row in read([path], KERNELS_CSV) if row.tflops]
    newest = {(_key(row, _PROBLEM), row.what): row for row in measured}
    lines: dict[tuple, dict[str, list[Row]]] = {}
    for row in newest.values():
        cells = lines.setdefault(_key(row, _LINE), {})
        cells.setdefault(row.what, []).append(row)
    kernels = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    head = ["head dimension", "mask", "direction", *(f"`{name}`" for name in kernels)]
    body = [
        [str(dim), "causal" if causal else "full", direction]
        + [_cell(cells.get(name, [])) for name in kernels]
        for (dim, causal, direction), cells in lines.items()
    ]
    return "\n".join(map(_line, [head, ["---"] * len(head), *body]))


def _key(row: Row, columns: Iterable[str]) -> tuple:
    return tuple(getattr(row, column) for column in columns)


def _cell(rows: list[Row]) -> str:
    if not rows:
        return "-"
    speed = f"{median(row.tflops for row in rows):.0f}"
    if not all(row.ratio for row in rows):
        return speed
    ratio = median(row.ratio for row in rows)
    least, most = min(row.ratio_least for row in rows), max(row.ratio_most for row in rows)
    return speed if least == most == 1 else f"{speed}, {ratio:.2f} ({least:.2f}-{most:.2f})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(path: Annotated[Path, typer.Argument(help="a CSV of kernels.py")]) -> None:
    """Print the table."""
    with in_one_sentence():
        print(table(path))


if __name__ == "__main__":
    typer.run(main)
