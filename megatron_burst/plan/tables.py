"""Dataclasses from and to TOML, with complaints that name the line."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from megatron_burst.errors import BurstError
from megatron_burst.plan.hardware import Curve

_MAY_BE_ZERO = ("latency_us", "launch_us", "_share", "reserved_gib")


def as_tables(value: object) -> str:
    """A dataclass as TOML: its plain fields first, then a table for each of the others."""
    lines: list[str] = []
    _write(value, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(value: Any, title: str, lines: list[str]) -> None:
    """Lines of a dataclass or of a mapping of texts, and of the tables in it."""
    pairs = value if isinstance(value, Mapping) else {
        f.name: getattr(value, f.name) for f in fields(value)
    }  # fmt: skip
    tables = {key: one for key, one in pairs.items() if _is_table(one)}
    if isinstance(value, Mapping):
        lines += [f"{_quoted(key)} = {_value(one)}" for key, one in pairs.items()]
    else:
        lines += [f"{key} = {_value(one)}" for key, one in pairs.items() if key not in tables]
    for key, table in tables.items():
        for one in table if isinstance(table, tuple) else (table,):
            name = _dotted(title, key)
            if isinstance(one, Mapping) or any(not _is_table(v) for v in _values(one)):
                lines += ["", f"[[{name}]]" if isinstance(table, tuple) else f"[{name}]"]
            _write(one, name, lines)


def _values(table: Any) -> list[object]:
    return [getattr(table, f.name) for f in fields(table)]


def _is_table(value: object) -> bool:
    if isinstance(value, Curve):
        return False
    return isinstance(value, (tuple, Mapping)) or is_dataclass(value)


def _value(value: object) -> str:
    if isinstance(value, Curve):
        return "[" + ", ".join(f"[{x!r}, {y!r}]" for x, y in value.points) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)  # every digit


def _quoted(text: str) -> str:
    # a JSON string is a TOML basic string, but for surrogate pairs and DEL
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def nearest(word: str, names: Iterable[str]) -> str:
    """ ", did you mean ...?" or nothing."""
    close = get_close_matches(word, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


class TomlFile:
    """A TOML file that is read into dataclasses.

    Args:
        text: of the file.
        name: of the file, for complaints.

    Raises:
        BurstError: if it is no TOML.
    """

    def __init__(self, text: str, name: str) -> None:
        self._lines, self._name = text.splitlines(), name
        try:
            self.table: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise BurstError(
                f"hardware: {name} must be TOML, because figures are read from tables; got: "
                f"{error}; mend that line"
            ) from error

    @classmethod
    def at(cls, path: Path) -> "TomlFile":
        """The file of a path.

        Raises:
            BurstError: if it cannot be read, too.
        """
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise BurstError(
                f"hardware: {path} must be a readable text file, because speeds come from there; "
                f"got {error}; name a preset, or a file that megatron-burst calibrate wrote"
            ) from error

    def read(self, kind: type) -> Any:
        """An instance of a dataclass from the whole file.

        Raises:
            BurstError: if a figure is wrong, missing or too many, with its line.
        """
        return self._read(kind, self.table, "")

    def _read(self, kind: type, table: Any, where: str) -> Any:
        if not isinstance(table, Mapping):
            self._refuse(where, "must be a table", repr(table), "write it as a [table]")
        known = {f.name: f for f in fields(kind)}
        for key in table:
            if key not in known:
                got = f"the unknown key {_dotted(where, key)!r}{nearest(key, known)}"
                self._refuse(where, f"must hold only {', '.join(known)}", got, "rename it", key)
        values = {}
        for key, its in known.items():
            if key in table:
                values[key] = self._value(its.type, table[key], _dotted(where, key))
            elif not _has_default(its):
                what = f"must hold {', '.join(known)}"
                self._refuse(where, what, f"no {_dotted(where, key)!r}", "add it")
        return kind(**values)

    def _value(self, kind: Any, value: Any, where: str) -> Any:
        if kind is Curve:
            return self._curve(value, where)
        if isinstance(kind, type) and is_dataclass(kind):
            return self._read(kind, value, where)
        if get_origin(kind) is tuple:
            if not isinstance(value, list) or not value:
                name = where.rpartition(".")[2]
                self._refuse(where, "must be a list of tables", repr(value), f"write [[{name}]]")
            one = get_args(kind)[0]
            return tuple(self._read(one, v, f"{where} {n}") for n, v in enumerate(value, 1))
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                words = f"must be one of {', '.join(get_args(kind))}"
                self._refuse(where, words, repr(value), "choose one of them")
            return value
        if get_origin(kind) is not None:  # a mapping of texts
            if not isinstance(value, Mapping) or any(
                not isinstance(v, str) for v in value.values()
            ):
                self._refuse(where, "must hold texts", repr(value), "write name = 'source'")
            return dict(value)
        if kind is str:
            if not isinstance(value, str):
                self._refuse(where, "must be a text", repr(value), "put it in quotes")
            return value
        return self._number(kind, value, where)

    def _number(self, kind: type, value: Any, where: str) -> Any:
        low = 0 if where.endswith(_MAY_BE_ZERO) else None
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = good and math.isfinite(value) and (value > 0 or value == low)
        if good and kind is int:
            good = value == int(value)
        if good and where.endswith("_share"):
            good = value < 1
        if not good:
            what = "a positive whole number" if kind is int else "a positive number"
            what = "a share from 0 to below 1" if where.endswith("_share") else what
            self._refuse(where, f"must be {what}", repr(value), "mend it")
        return kind(value)

    def _curve(self, value: Any, where: str) -> Curve:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = [[1, value]]
        pairs = isinstance(value, list) and value and all(
            isinstance(p, list) and len(p) == 2 and all(isinstance(n, (int, float)) for n in p)
            for p in value
        )  # fmt: skip
        xs = [p[0] for p in value] if pairs else []
        good = pairs and xs == sorted(set(xs))
        if not good or not all(0 < n < math.inf for p in value for n in p):
            what = "must be a number or a list of [x, y] of positive numbers, x ascending"
            self._refuse(where, what, repr(value), "write for example [[1, 40.0], [128, 300.0]]")
        return Curve(tuple((float(x), float(y)) for x, y in value))

    def _refuse(self, where: str, must: str, got: str, change: str, key: str = "") -> NoReturn:
        line = self._line_of(where, key)
        raise BurstError(
            f"hardware: {self._name}{f', line {line},' if line else ':'} {where or 'the file'} "
            f"{must}, because the planner uses all of it and nothing else; got {got}; {change}"
        )

    def _line_of(self, where: str, key: str) -> int | None:
        """The line of a key in its table, as well as a text search can tell."""
        table, _, last = (where, "", key) if key else where.rpartition(".")
        if not last:
            return None
        place, number = table, 1
        if numbered := re.fullmatch(r"(.*) (\d+)", table):
            place, number = numbered[1], int(numbered[2])
        inside, seen = not table, 0
        for line, text in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", text):
                seen += header[1] == place
                inside = header[1] == place and seen == number
                if header[1] == _dotted(table, last):
                    return line
            elif inside and re.match(rf"\s*[\"']?{re.escape(last)}[\"']?\s*=", text):
                return line
        return None


def _has_default(field: Field) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
