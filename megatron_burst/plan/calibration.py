"""What was measured on a machine, as data; `megatron-burst calibrate` writes it as TOML."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megatron_burst.errors import BurstError

Kind = Literal["intra", "inter", "all_to_all", "all_gather", "copy_engine", "host"]


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """How fast a rank computes causal attention; the slowest rank's median.

    Attributes:
        backend: of the kernel.
        direction: of the pass; backward without the forward that it needs.
        head_dim: width of queries, keys and values.
        seq: tokens, all on one rank.
        tflops: TFLOP/s; masked pairs do not count: 2 matmuls forward, 5 backward.
    """

    backend: str
    direction: Literal["forward", "backward"]
    head_dim: int
    seq: int
    tflops: float


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast ranks move data, all of them at once; the slowest rank's median.

    Attributes:
        kind: "intra" and "inter": a ring shift inside and between hosts. "all_to_all",
            "all_gather": over the ranks of a host. "copy_engine": ranks of a host read the next
            one's symmetric memory. "host": pinned copies, the slower of both directions.
        message_bytes: that a rank sends (all_gather: receives) in the call.
        gb_per_s: message_bytes over the time of the call, start included, in 1e9 bytes a second.
        latency_us: of the same call with next to nothing in it.
    """

    kind: Kind
    message_bytes: int
    gb_per_s: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine.

    Attributes:
        name: what the user calls it.
        gpu: the GPU's own name.
        memory_gib: of a GPU.
        matmul_tflops: of a large dense product; bf16 on GPUs, fp32 on CPU.
        kernels: attention.
        links: transfers.
    """

    name: str
    gpu: str
    memory_gib: float
    matmul_tflops: float
    kernels: tuple[KernelSpeed, ...] = ()
    links: tuple[LinkSpeed, ...] = ()


_TABLES = {"kernels": KernelSpeed, "links": LinkSpeed}


def to_toml(calibration: Calibration) -> str:
    """The calibration as TOML: scalars, then an array of tables for each list."""
    lines = ["# Written by `megatron-burst calibrate`."]
    values = asdict(calibration)
    lines += [_line(name, value) for name, value in values.items() if name not in _TABLES]
    for table in _TABLES:
        for row in values[table]:
            lines += ["", f"[[{table}]]", *(_line(name, value) for name, value in row.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, value: str | int | float) -> str:
    if not isinstance(value, str):
        return f"{name} = {value!r}"  # every digit
    # a JSON string is a TOML basic string, but for surrogate pairs and DEL
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {text}"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write it as TOML.

    Raises:
        BurstError: if the file cannot be written.
    """
    try:
        path.write_text(to_toml(calibration), encoding="utf-8")
    except OSError as error:
        raise BurstError(
            f"calibration: {path} must be writable, because that is where figures go; got "
            f"{error.strerror}; pass another --out"
        ) from None


def read_calibration(path: Path) -> Calibration:
    """Read what `write_calibration` wrote, or a file of the same form.

    Raises:
        BurstError: if it cannot be read, is not TOML, or holds other names or types.
    """
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BurstError(
            f"calibration: {path} must be a text file that can be read, because figures are taken "
            f"from it; got {error}; pass a file that megatron-burst calibrate wrote"
        ) from None


def from_toml(text: str, source: str) -> Calibration:
    """The calibration in a TOML text; `source` names it in errors.

    Raises:
        BurstError: as `read_calibration` does.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BurstError(
            f"calibration: {source} must be TOML, because that is what calibrate writes; got "
            f"{error}; mend that line"
        ) from None
    lists = {}
    for table, row_type in _TABLES.items():
        rows = values.pop(table, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise _refusal(source, f"must have [[{table}]] tables", f"{table} = {rows!r}")
        where = (f"{source}, [[{table}]] number {number}" for number in range(1, len(rows) + 1))
        lists[table] = tuple(
            _build(row_type, row, place) for row, place in zip(rows, where, strict=False)
        )
    return _build(Calibration, values, source, lists)


def _build(kind: type, values: Mapping[str, Any], where: str, given: Mapping | None = None) -> Any:
    """An instance of a dataclass from a table, refusing what does not fit."""
    given = given or {}
    wanted = {field.name: field.type for field in fields(kind) if field.name not in given}
    for name in values:
        if name not in wanted:
            near = get_close_matches(name, wanted, n=1) or [", ".join(wanted)]
            raise _refusal(where, "must have no other names than those of calibrate", name, near[0])
    checked = {}
    for name, type_ in wanted.items():
        if name not in values:
            raise _refusal(where, f"must have {name}", "none")
        checked[name] = _value(type_, values[name], f"{where}, {name}")
    return kind(**checked, **given)


def _value(type_: Any, value: Any, where: str) -> Any:
    if get_origin(type_) is Literal:
        if value not in get_args(type_):
            raise _refusal(where, f"must be one of {', '.join(get_args(type_))}", repr(value))
        return value
    if type_ is str and isinstance(value, str):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = type_ is not int or isinstance(value, int)
    if type_ is not str and number and whole and math.isfinite(value) and value >= 0:
        return type_(value)
    words = {str: "a text", int: "a whole number, not negative", float: "a number, not negative"}
    raise _refusal(where, f"must be {words[type_]}", repr(value))


def _refusal(where: str, must: str, got: str, instead: str = "") -> BurstError:
    change = f"write {instead}" if instead else "mend it, or run megatron-burst calibrate again"
    return BurstError(f"calibration: {where} {must}, because plans rest on it; got {got}; {change}")
