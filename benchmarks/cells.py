"""Rows to cells of a CSV, and back; lines of cells to Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import Field, asdict, fields
from typing import Any

from megatron_burst.errors import BurstError, require


def cells_of(row: Any) -> list[object]:
    """A dataclass's values as CSV cells; None is empty."""
    return [_cell(value) for value in asdict(row).values()]


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table whose first line is its head."""
    head, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def milliseconds(time: float) -> str:
    """A time in a cell, with a digit behind the point if it is short."""
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def time_and_peak(row: Any) -> str:
    """Milliseconds and GiB of a row in one cell, or why it has none; "-" without a row."""
    if row is None:
        return "-"
    if row.ms is None:
        return "out of memory" if "out of memory" in row.note else row.status
    return milliseconds(row.ms) + ("" if row.peak_gib is None else f", {row.peak_gib:.2f}")


def check_named(what: str, found: Iterable[str], names: Iterable[str], file: str) -> None:
    """That pages have a name for each of what is measured, a mode or an implementation.

    Raises:
        BurstError: if one has none.
    """
    unknown = sorted({*found} - {*names})
    require("benchmarks.show", [(
        not unknown, f"every {what} must have a name in pages, because one without would be left "
        "out", ", ".join(unknown), f"name it in benchmarks/{file}",
    )])  # fmt: skip


def row_of(cells: Sequence[str], kind: type, where: str) -> Any:
    """The row that cells stand for.

    Args:
        cells: of one line.
        kind: dataclass of the row; its fields are int, float | None, bool or str.
        where: they stand, in words that a sentence begins with.

    Raises:
        BurstError: if there are more or fewer than fields, or one is not of its field's type.
    """
    columns = fields(kind)
    if len(cells) != len(columns):
        raise BurstError(
            f"{where} must have {len(columns)} cells, because each column has one; got "
            f"{len(cells)}; fix or delete the line"
        )
    pairs = zip(columns, cells, strict=True)
    return kind(**{column.name: _value(column, text, where) for column, text in pairs})


def _value(column: Field, text: str, where: str) -> object:
    if column.type is str:
        return text
    try:
        if column.type is bool:
            return {"True": True, "False": False}[text]
        if column.type is int:
            return int(text)
        return float(text) if text else None
    except (KeyError, ValueError):
        what = {bool: "True or False", int: "a whole number"}.get(column.type, "a number")
        raise BurstError(
            f"{where} must have {what} under {column.name.rstrip('_')}, because that is compared; "
            f"got {text!r}; fix or delete the line"
        ) from None


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
