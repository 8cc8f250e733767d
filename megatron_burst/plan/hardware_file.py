"""Hardware from and to TOML, with precise complaints."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from megatron_burst.errors import BurstError
from megatron_burst.plan.calibrated import calibrated, is_calibration
from megatron_burst.plan.hardware import Curve, Hardware, preset, preset_names

_WHO = "hardware"


def hardware(name_or_path: str) -> Hardware:
    """A preset by name, else the TOML file of that path.

    Raises:
        BurstError: if it is neither, or the file is wrong.
    """
    names = preset_names()
    if name_or_path.lower() in names:
        return preset(name_or_path.lower())
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        return read_hardware(path)
    raise BurstError(
        f"{_WHO}: --hardware must be a preset or a TOML file, because speeds come from there; got "
        f"{name_or_path!r}{nearest(name_or_path.lower(), names)}; choose one of {', '.join(names)} "
        "or a file that megatron-burst calibrate wrote"
    )


def read_hardware(path: Path) -> Hardware:
    """Hardware from a TOML file.

    Raises:
        BurstError: if the file cannot be read, is no TOML, or lacks or has too many figures.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BurstError(
            f"{_WHO}: {path} must be a readable text file, because speeds come from there; got "
            f"{error}; name a preset ({', '.join(preset_names())}) or such a file"
        ) from error
    return parse_hardware(text, str(path))


def parse_hardware(text: str, name: str) -> Hardware:
    """Hardware from TOML, or from what calibrate wrote.

    Args:
        text: the TOML.
        name: of the file, for complaints.

    Raises:
        BurstError: if it is no TOML, or lacks or has too many figures.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BurstError(
            f"{_WHO}: {name} must be TOML, because figures are read from tables; got: {error}; "
            "mend that line"
        ) from error
    if is_calibration(table):
        return calibrated(table, name)
    return _Reader(text, name).read(Hardware, table, "")


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write a TOML file that `read_hardware` reads back equal."""
    path.write_text(as_toml(hardware))


def as_toml(hardware: Hardware) -> str:
    """Hardware as TOML."""
    lines = [f"name = {_quoted(hardware.name)}"]
    tables = {"gpu": hardware.gpu, "host": hardware.host}
    links = hardware.links
    tables |= {f"links.{f.name}": getattr(links, f.name) for f in fields(links)}
    for title, table in tables.items():
        lines += ["", f"[{title}]", *_pairs(table)]
    for kernel in hardware.kernels:
        lines += ["", "[[kernels]]", *_pairs(kernel)]
    lines += ["", "[sources]"]
    lines += [f"{_quoted(key)} = {_quoted(text)}" for key, text in hardware.sources.items()]
    return "\n".join(lines) + "\n"


def _pairs(table: object) -> list[str]:
    return [f"{f.name} = {_value(getattr(table, f.name))}" for f in fields(table)]


def _value(value: object) -> str:
    if isinstance(value, Curve):
        return "[" + ", ".join(f"[{x!r}, {y!r}]" for x, y in value.points) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'


def nearest(word: str, names: object) -> str:
    """ ", did you mean ...?" or nothing."""
    close = get_close_matches(word, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


class _Reader:
    """Turns tables into dataclasses; knows the line of what it complains about."""

    def __init__(self, text: str, name: str) -> None:
        self._lines, self._name = text.splitlines(), name

    def read(self, kind: type, table: Any, where: str) -> Any:
        """An instance of a dataclass from its table."""
        if not isinstance(table, Mapping):
            self._refuse(where, "must be a table", repr(table), "write it as a [table]")
        known = {f.name: f for f in fields(kind)}
        for key in table:
            if key not in known:
                got = f"the unknown key {_dotted(where, key)!r}{nearest(key, known)}"
                self._refuse(where, f"must hold only {', '.join(known)}", got, "rename it", key)
        values = {}
        for key, its in known.items():
            if key not in table:
                if key == "sources":
                    continue
                what = f"must hold {', '.join(known)}"
                self._refuse(where, what, f"no {_dotted(where, key)!r}", "add it")
            values[key] = self._value(its.type, table[key], _dotted(where, key))
        return kind(**values)

    def _value(self, kind: Any, value: Any, where: str) -> Any:
        if get_origin(kind) is tuple:
            if not isinstance(value, list) or not value:
                self._refuse(where, "must be a list of tables", repr(value), "write [[kernels]]")
            return tuple(self.read(get_args(kind)[0], one, where) for one in value)
        if kind is Curve:
            return self._curve(value, where)
        if is_dataclass(kind):
            return self.read(kind, value, where)
        if get_origin(kind) is not None:  # sources
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
        low = 0 if where.endswith(("latency_us", "launch_us", "_share", "reserved_gib")) else None
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = good and (value > 0 or value == low)
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
        if not pairs or xs != sorted(set(xs)) or min(n for p in value for n in p) <= 0:
            what = "must be a number or a list of [x, y] of positive numbers, x ascending"
            self._refuse(where, what, repr(value), "write for example [[1, 40.0], [128, 300.0]]")
        return Curve(tuple((float(x), float(y)) for x, y in value))

    def _refuse(self, where: str, must: str, got: str, change: str, key: str = "") -> None:
        line = self._line_of(where, key)
        raise BurstError(
            f"{_WHO}: {self._name}{f', line {line},' if line else ':'} {where or 'the file'} "
            f"{must}, because the planner uses all of it and nothing else; got {got}; {change}"
        )

    def _line_of(self, where: str, key: str) -> int | None:
        """The line of a key in its table, as well as a text search can tell."""
        table, _, last = (where, "", key) if key else where.rpartition(".")
        last = key or last
        inside = not table
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
                inside = header[1] == table
                if header[1] == (_dotted(table, last)):
                    return number
            elif inside and re.match(rf"\s*[\"']?{re.escape(last)}[\"']?\s*=", line):
                return number
        return None


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
