"""Rows of results: one a measurement, in a CSV that is appended to."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.plan.tables import nearest

_WHO = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One implementation's measurement of one pass over one problem; fields are columns.

    Attributes:
        date: when, UTC.
        versions: of what took part.
        gpu: name, clock and temperature of rank 0's device after the last repetition.
        hosts: real or pretended ones.
        ranks: of the run; `one_gpu` computes on one of them.
        link: measured ring shift and all-to-all, GB/s a rank.
        pass_: "fwd" (under no_grad) or "fwd_bwd".
        ms: median over repetitions of the slowest rank's milliseconds; None unless ok.
        ms_min, ms_max: its spread.
        tflops_per_gpu: the pass's operations / GPUs that compute / ms.
        peak_gib: memory above inputs and outputs in fwd_bwd, of the worst rank; None on CPU.
        status: "ok", "failed" or "skipped".
        note: the reason if it is not ok.
    """

    date: str
    versions: str
    gpu: str
    hosts: int
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


def columns_of(kind: type) -> tuple[str, ...]:
    """Columns of a CSV of such rows."""
    return tuple(field.name.rstrip("_") for field in fields(kind))


COLUMNS = columns_of(Row)


def append(path: Path, rows: Iterable[Any], kind: type = Row) -> None:
    """Add rows to a CSV, with a head line where it is new; on disk when this returns.

    Args:
        path: of the file.
        rows: all of one dataclass.
        kind: that class.

    Raises:
        BurstError: if the file has other columns.
    """
    is_new = not path.exists()
    check_appendable(path, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(columns_of(kind))
        writer.writerows([_cell(value) for value in asdict(row).values()] for row in rows)


def check_appendable(path: Path, kind: type = Row) -> None:
    """Refuse a file that exists and has other columns."""
    if path.exists():
        _check_columns(path, kind)


def read(paths: Sequence[Path], kind: type = Row) -> list[Any]:
    """The rows of all files, in order.

    Raises:
        BurstError: if a file is missing, has other columns, or there is no row at all.
    """
    rows = []
    for path in paths:
        _check_columns(path, kind)
        with path.open(newline="") as file:
            rows += [_row(record, kind) for record in csv.DictReader(file)]
    if not rows:
        raise BurstError(
            f"{_WHO}: there must be a measurement to show, because an empty table says nothing; "
            f"got no row in {', '.join(map(str, paths))}; run bench {_command(kind)} first"
        )
    return rows


def _command(kind: type) -> str:
    return "attention" if kind is Row else "loss"


def _check_columns(path: Path, kind: type) -> None:
    columns, got = columns_of(kind), "no such file"
    if path.exists():
        with path.open(newline="") as file:
            head = next(csv.reader(file), [])
        if tuple(head) == columns:
            return
        got = _difference(head, columns)
    raise BurstError(
        f"{_WHO}: {path} must be a CSV with the columns of bench {_command(kind)}, because rows of "
        f"all runs are compared; got {got}; name a file that bench {_command(kind)} wrote"
    )


def _difference(head: Sequence[str], columns: Sequence[str]) -> str:
    """What is missing and what is unknown, each with the name that it may stand for."""
    missing = [name for name in columns if name not in head]
    unknown = [name for name in head if name not in columns]
    if len(missing) == len(columns):
        return "none of them"
    said = [f"no column {', '.join(missing)}"] if missing else []
    said += [f"the unknown column {name!r}{nearest(name, missing)}" for name in unknown]
    return " and ".join(said) or "them twice or in another order"


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _row(record: dict[str, str], kind: type) -> Any:
    values = {}
    for field in fields(kind):
        text = record[field.name.rstrip("_")]
        if field.type in (int, str):
            values[field.name] = field.type(text)
        else:
            values[field.name] = float(text) if text else None
    return kind(**values)
