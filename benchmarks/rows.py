"""Rows of results: one a measurement, in a CSV that is appended to.

No row is deleted. A CSV may have a last column `superseded`, with the commit that replaced a row
because the code had changed; such a row stays in the file, and `read` leaves it out.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from os import SEEK_END
from pathlib import Path
from typing import Any

from benchmarks.cells import cells_of, row_of
from benchmarks.layers import writes
from megatron_burst.errors import BurstError, nearest
from megatron_burst.tools.terminal import check_writable

_WHO, _OUT = "benchmarks", "--out"
_FEW = 3  # columns that differ and are named
SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One implementation's measurement of one pass over one problem; fields are columns.

    Attributes:
        date: date and time, UTC.
        versions: versions of the packages involved.
        gpu: name, clock and temperature of rank 0's device after the last repetition, and a hash
            that tells machines apart.
        nodes: number of nodes, real or emulated.
        ranks: number of ranks in the run; `one_gpu` computes on one of them.
        link: measured ring shift and all-to-all, GB/s per rank.
        pass_: "fwd" (under no_grad) or "fwd_bwd".
        ms: milliseconds of the slowest rank, median over repetitions; None unless ok.
        ms_min, ms_max: minimum and maximum over repetitions.
        tflops_per_gpu: the pass's operations / GPUs that compute / ms.
        peak_gib: peak memory above inputs and outputs in fwd_bwd, worst rank; None on CPU.
        status: "ok", "failed" or "skipped".
        note: milliseconds of each repetition; the reason if it is not ok.
    """

    date: str
    versions: str
    gpu: str
    nodes: int
    ranks: int
    link: str
    seq: int
    batch: int
    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    mask: str
    dtype: str
    impl: str
    mode: str
    pass_: str
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    tflops_per_gpu: float | None = None
    peak_gib: float | None = None
    status: str = "ok"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow(Row):
    """The same for a packed sample or a window, which `mask` names.

    Attributes:
        num_documents: documents in the sample; 1 for a window.
        longest: tokens of the longest document.
        area: query-key pairs of the mask / pairs of one causal document.
        seed: seed of the drawn lengths.
    """

    num_documents: int
    longest: int
    area: float | None
    seed: int


def columns_of(kind: type) -> tuple[str, ...]:
    """Columns of a CSV of such rows."""
    return tuple(field.name.rstrip("_") for field in fields(kind))


COLUMNS = columns_of(Row)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A kind of CSV.

    Attributes:
        writer: who writes it.
        kind: dataclass of its rows; fields of int, float | None, bool and str are columns.
        beside_ms: columns that a row with `ms` has too; predictions lack them.
        holds: whether a row is its own, where another writer's have the same columns.
        shows_others: what shows those.
    """

    writer: str
    kind: type = Row
    beside_ms: tuple[str, ...] = ()
    holds: Callable[[Any], bool] | None = None
    shows_others: str = ""


def _of_layers(row: Row) -> bool:
    return writes(row.impl, row.mode)


def _of_attention(row: Row) -> bool:
    return not _of_layers(row)


_BESIDE_MS = "ms_min", "ms_max", "tflops_per_gpu"
ATTENTION_CSV = Sheet(
    "benchmarks.attention", Row, _BESIDE_MS, _of_attention, "benchmarks.show recompute"
)
PACKED_CSV = Sheet("benchmarks.packed", PackedRow, _BESIDE_MS)
RECOMPUTE_CSV = Sheet("benchmarks.recompute", Row, _BESIDE_MS, _of_layers, "benchmarks.show table")
ANY_CSV = Sheet("benchmarks.attention, benchmarks.recompute or predict.py")
ANY_PACKED_CSV = Sheet("benchmarks.packed or predict.py", PackedRow)


def append(path: Path, rows: Iterable[Any], sheet: Sheet = ATTENTION_CSV) -> None:
    """Add rows to a CSV, with a head line where it is new; on disk when this returns.

    Checks the first and last line only; before measuring, `check_appendable` checks all.

    Args:
        path: of the file.
        rows: all of the sheet's kind.
        sheet: the kind of CSV.

    Raises:
        BurstError: if the file's folder is missing, or it is there with other columns or cut off.
    """
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
        writer.writerows(cells_of(row) + mark for row in rows)


def check_appendable(path: Path, sheet: Sheet = ATTENTION_CSV, option: str = _OUT) -> None:
    """Refuse a file that rows cannot be added to.

    Args:
        path: of the file.
        sheet: the kind of CSV.
        option: that named it.

    Raises:
        BurstError: if its folder is missing, or it is there and is no whole CSV of that kind.
    """
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
    """The rows of all files, in order, without those that are superseded.

    Raises:
        BurstError: if a file is missing or no whole CSV of that kind, or there is no row at all.
    """
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
        row = row_of(cells, sheet.kind, where)
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
    except FileNotFoundError:
        raise _other_file(path, sheet, "no such file") from None
    except IsADirectoryError:
        raise _other_file(path, sheet, "a folder") from None
    except UnicodeDecodeError:
        raise _other_file(path, sheet, "a binary file") from None
    except (OSError, csv.Error) as error:
        raise _other_file(path, sheet, str(error)) from None


def _other_file(path: Path, sheet: Sheet, got: str) -> BurstError:
    return BurstError(
        f"{_WHO}: {path} must be a CSV with the columns of {sheet.writer}, because rows of all "
        f"runs are compared; got {got}; name a file that {sheet.writer} wrote"
    )


def _difference(head: Sequence[str], columns: Sequence[str]) -> str:
    """What is missing and what is unknown, each with the name that it may stand for; of many the
    first, as they are another program's."""
    missing = [name for name in columns if name not in head]
    unknown = [name for name in head if name not in columns]
    if len(missing) == len(columns):
        return "none of them"
    if len(missing) + len(unknown) > _FEW:
        first = f"no column {missing[0]}" if missing else f"the unknown column {unknown[0]!r}"
        return f"{first} and {len(missing) + len(unknown) - 1} other differences"
    said = [f"no column {', '.join(missing)}"] if missing else []
    said += [f"the unknown column {name!r}{nearest(name, missing)}" for name in unknown]
    return " and ".join(said) or "them twice or in another order"
