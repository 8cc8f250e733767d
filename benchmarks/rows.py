"""CSVs of results, one row a measurement: read, checked, appended to.

No row is deleted. A CSV may have a last column `superseded`, with the commit that replaced a row
because the code had changed; such a row stays in the file, and `read` leaves it out.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, asdict, fields
from os import SEEK_END
from pathlib import Path
from typing import Any

from benchmarks.sheets import ATTENTION_CSV, Sheet, columns_of
from megatron_burst.errors import BurstError, nearest
from megatron_burst.tools.terminal import check_writable

_WHO, _OUT = "benchmarks", "--out"
_FEW = 3  # columns that differ and are named
SUPERSEDED = "superseded"


def append(path: Path, rows: Iterable[Any], sheet: Sheet = ATTENTION_CSV) -> None:
    """Add rows to a CSV, with a head line where it is new; on disk when this returns. Checks the
    first and last line; before measuring, `check_appendable` checks all."""
    is_new = not path.exists()
    check_writable(sheet.writer, _OUT, path)
    mark = []
    if not is_new:
        mark = [""] if _check_head(_lines(path, sheet), path, sheet) else []
        _check_end(path, sheet, _OUT)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(columns_of(sheet.kind))
        writer.writerows([*map(_cell, asdict(row).values()), *mark] for row in rows)


def check_appendable(path: Path, sheet: Sheet = ATTENTION_CSV, option: str = _OUT) -> None:
    """Refuse a file that rows cannot be added to: without a folder, or no such whole CSV."""
    check_writable(sheet.writer, option, path)
    if not path.exists():
        return
    for _ in _rows(path, sheet):  # whose lines are looked at
        pass
    _check_end(path, sheet, option)


def is_packed(path: Path) -> bool:
    """Whether a file has columns of packed samples; no if there is none."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return "num_documents" in file.readline()


def read(paths: Sequence[Path], sheet: Sheet = ATTENTION_CSV) -> list[Any]:
    """The rows of all files but superseded ones; BurstError if one is no such CSV, or empty."""
    rows = [row for path in paths for row, mark in _rows(path, sheet) if not mark]
    if not rows:
        raise BurstError(
            f"{_WHO}: {', '.join(map(str, paths))} must hold a measurement, because without one "
            f"there is nothing to show; got no row; run {sheet.writer} first"
        )
    return rows


def _rows(path: Path, sheet: Sheet) -> Iterator[tuple[Any, str]]:
    """Each row, with the commit that superseded it or ""."""
    lines = _lines(path, sheet)
    is_marked = _check_head(lines, path, sheet)
    for number, cells in lines:
        where = f"{_WHO}: {path}, line {number},"
        mark = cells.pop() if is_marked else ""
        row = _row_of(cells, sheet.kind, where)
        _check_row(row, sheet, where)
        yield row, mark


def _check_head(lines: Iterator[tuple[int, list[str]]], path: Path, sheet: Sheet) -> bool:
    """Whether rows have the column `superseded`; refuses other columns."""
    columns = columns_of(sheet.kind)
    _, head = next(lines, (0, []))
    is_marked = head[-1:] == [SUPERSEDED]
    known = head[:-1] if is_marked else head
    if tuple(known) != columns:
        raise _other_file(path, sheet, _difference(known, columns))
    return is_marked


def _check_end(path: Path, sheet: Sheet, option: str) -> None:
    with path.open("rb") as file:
        file.seek(-1, SEEK_END)
        if file.read() != b"\n":
            raise BurstError(
                f"{sheet.writer}: the last line of {path} must end, because rows are added below "
                f"it; got one that is cut off; fix or delete it, or pass another {option}"
            )


def _check_row(row: Any, sheet: Sheet, where: str) -> None:
    if sheet.holds and not sheet.holds(row):
        raise BurstError(
            f"{where} must be a row of {sheet.writer}, because only its rows are compared with "
            f"each other; got one of {row.impl}:{row.mode}; show that with {sheet.shows_others}"
        )
    for name in sheet.beside_ms:
        if row.ms is not None and getattr(row, name) is None:
            raise BurstError(
                f"{where} must have a number under {name} beside ms, because measurements are "
                f"shown with it; got none, as in a prediction; name a file that {sheet.writer} "
                "wrote"
            )


def _lines(path: Path, sheet: Sheet) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and cells of the lines that are not empty."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        words = {FileNotFoundError: "no such file", IsADirectoryError: "a folder",
                 UnicodeDecodeError: "a binary file"}  # fmt: skip
        raise _other_file(path, sheet, words.get(type(error), str(error))) from None


def _other_file(path: Path, sheet: Sheet, got: str) -> BurstError:
    return BurstError(
        f"{_WHO}: {path} must be a CSV with the columns of {sheet.writer}, because rows of all "
        f"runs are compared; got {got}; name a file that {sheet.writer} wrote"
    )


def _difference(head: Sequence[str], columns: Sequence[str]) -> str:
    """What is missing or unknown, with the names that this may stand for; of many the first."""
    missing = [name for name in columns if name not in head]
    unknown = [name for name in head if name not in columns]
    if len(missing) == len(columns):
        return "none of them"
    if len(missing) + len(unknown) > _FEW:
        first = f"no column {missing[0]}" if missing else f"the unknown column {unknown[0]!r}"
        return f"{first} and {len(missing) + len(unknown) - 1} other differences"
    differences = [f"no column {', '.join(missing)}"] if missing else []
    differences += [f"the unknown column {name!r}{nearest(name, missing)}" for name in unknown]
    return " and ".join(differences) or "them twice or in another order"


def _row_of(cells: Sequence[str], kind: type, where: str) -> Any:
    """The row of a line's cells, or BurstError; `where` they stand begins a sentence."""
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
