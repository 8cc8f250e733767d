"""Files that others wrote: read up to a size, parsed and checked before anything relies on them.

What comes of one is plain data within limits, or a sentence that says what is wrong with it.
"""

import json
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megatron_burst.errors import BurstError, nearest

_MIB = 1 << 20
_DEEPEST, _LARGEST = 40, 1 << 64  # lists and tables in each other; a whole number
_LONGEST = 1000  # a line of TOML: tomllib takes quadratic time for the parts of a name


@dataclass(frozen=True, slots=True)
class Limits:
    """From where to below where a number may be, or the length of a text or list."""

    low: float = 0.0
    high: float = 1e15
    above: bool = False  # whether it must be above `low`

    def hold(self, value: float) -> bool:
        """Whether a number is within them; NaN never is."""
        return self.low <= value < self.high and not (self.above and value == self.low)

    def words(self, noun: str) -> str:
        """ "positive number below 1e+15", "whole number from 0 to below 10"."""
        if self.above and not self.low:
            return f"positive {noun} below {self.high:g}"
        return f"{noun} {'above' if self.above else 'from'} {self.low:g} to below {self.high:g}"


_PLAIN = (str, bool, int, float)
_USUAL, _SHORT = Limits(), Limits(high=201)  # of numbers, of texts
Positive = Annotated[float, Limits(above=True)]
Count = Annotated[int, Limits(high=1 << 41, above=True)]
LongText = Annotated[str, Limits(high=_MIB)]


def harmless(text: str) -> str:
    """A text with control characters, but for ends of lines, written out for terminals."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def excerpt(value: object, most: int = 80) -> str:
    """The beginning of a value of a file, in one harmless line."""
    text = value if isinstance(value, str) else repr(value)
    return " ".join(harmless(text[:most]).split()) + "..." * (len(text) > most)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads a file, or refuses it.

    All methods raise BurstError: "WHO: NAME: PLACE must ..., because WHY; got ...; CHANGE".
    """

    who: str
    name: str  # of the file, and its path
    why: str
    change: str
    most: int = 4 * _MIB  # bytes

    def refusal(self, must: str, got: object, at: str = "") -> BurstError:
        """Of what is at a place of the file."""
        where = f"{excerpt(self.name, 300)}{': ' * bool(at)}{excerpt(at)}"
        return BurstError(
            f"{self.who}: {where} must {must}, because {self.why}; got {excerpt(got, 300)}; "
            f"{self.change}"
        )

    def data(self, of_text: bool = False) -> bytes:
        """All bytes; `of_text`: whether they must be some text's."""
        try:
            with Path(self.name).open("rb") as file:
                content = file.read(self.most + 1)
        except (OSError, ValueError) as error:  # ValueError: what no path may have
            raise self.refusal("be a readable file", _reason(error)) from None
        if of_text and b"\0" in content:  # said before its size, which would be no use to change
            raise self.refusal("be a text file", "a binary file")
        if len(content) > self.most:
            raise self.refusal(f"have at most {self.most >> 10} KiB", "more")
        return content

    def text(self, errors: str = "strict") -> str:
        """As text in UTF-8; `errors`: as for `bytes.decode`."""
        try:
            return self.data(of_text=True).decode(errors=errors).replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise self.refusal("be a text file in UTF-8", _reason(error)) from None

    def json(self, text: str | None = None, at: str = "") -> Any:
        """Plain data from JSON: of the file, or of a text of it at a place."""
        return self._parsed("JSON", json.loads, self.text() if text is None else text, at)

    def toml(self, text: str | None = None) -> dict[str, Any]:
        """Plain data from TOML: of the file, or of a text."""
        text = self.text() if text is None else text
        if any(len(line) > _LONGEST for line in text.splitlines()):
            raise self.refusal(f"have at most {_LONGEST} characters a line", "more")
        return dict(self._parsed("TOML", tomllib.loads, text, ""))

    def _parsed(self, form: str, parse: Callable[[str], Any], text: str, at: str) -> Any:
        """What was parsed, if it is neither too deep nor has too large numbers."""
        try:
            data = parse(text)
        except (ValueError, RecursionError) as error:
            raise self.refusal(f"be {form}", _reason(error), at) from None
        pending = [(data, 0)]
        while pending:
            value, depth = pending.pop()
            inside = value.values() if isinstance(value, dict) else value
            if isinstance(value, list | dict):
                pending += [(part, depth + 1) for part in inside]
            if depth > _DEEPEST:
                raise self.refusal(f"nest lists and tables at most {_DEEPEST} deep", "more", at)
            large = isinstance(value, int) and abs(value) >= _LARGEST
            if large or (value != value and form == "JSON"):  # whose NaN not all readers type
                raise self.refusal("have no NaN and no whole number from 2^64 on", value, at)
        return data

    def typed(self, kind: Any, value: Any, at: str = "", closed: bool = True) -> Any:
        """Plain data as a type: a dataclass, tuple, Mapping, Literal, str, bool, int, float, a
        union of them, any of them with `Limits`, or a class with `of_data`, which raises a
        ValueError of what must hold. Numbers without `Limits` are from 0 on.

        `at`: the value's place in the file, e.g. "gpu.launch_us"; `closed`: whether tables hold no
        other keys than those of their dataclass.
        """
        return _Typed(self, closed).of(kind, value, at, _USUAL)


@dataclass(frozen=True, slots=True)
class _Typed:
    reader: Reader
    closed: bool

    def of(self, kind: Any, value: Any, at: str, limits: Limits) -> Any:
        origin, inner = get_origin(kind), get_args(kind)
        if kind is Any:
            return value
        if kind in _PLAIN or origin is Literal:
            return self._plain(kind, value, at, limits)
        if origin is Annotated:
            return self.of(inner[0], value, at, inner[1])
        if origin in (Union, UnionType):
            return self._one_of(inner, value, at, limits)
        if hasattr(kind, "of_data"):
            try:
                return kind.of_data(value)
            except ValueError as error:
                raise self.reader.refusal(str(error), value, at) from None
        if is_dataclass(kind):
            return self._table(kind, value, at)
        if origin is tuple:
            noun = f"list of tables, [[{at}]] in TOML" if is_dataclass(inner[0]) else "list"
            self._check(isinstance(value, list), f"be a {noun}", value, at)
            self._check(limits.hold(len(value)), "have entries", value, at)
            if inner[0] is int and all(type(part) is int and 0 <= part < 1e15 for part in value):
                return tuple(value)  # thousands of ranks, without a call for each
            return tuple(
                self.of(inner[0], part, f"{at} {number}", _USUAL)
                for number, part in enumerate(value, 1)
            )
        self._check(isinstance(value, dict), "be a table", value, at)
        digits = inner[0] is int and all(len(key) < 20 and key.isdecimal() for key in value)
        return {  # JSON's names of entries are texts
            self.of(inner[0], int(key) if digits else key, at, _USUAL):
            self.of(inner[1], part, f"{at}.{key}", _USUAL) for key, part in value.items()
        }  # fmt: skip

    def _check(self, good: object, must: str, got: object, at: str) -> None:
        if not good:
            raise self.reader.refusal(must, got, at)

    def _one_of(self, kinds: tuple[Any, ...], value: Any, at: str, limits: Limits) -> Any:
        if value is None and NoneType in kinds:
            return None
        *others, last = sorted(  # a whole number is no float, where there is a kind for each
            (kind for kind in kinds if kind is not NoneType),
            key=lambda kind: type(value) not in (kind, *get_args(kind)[:1]),
        )
        for kind in others:
            with suppress(BurstError):
                return self.of(kind, value, at, limits)
        return self.of(last, value, at, limits)

    def _table(self, kind: Any, table: Any, at: str) -> Any:
        self._check(isinstance(table, dict), "be a table", table, at)
        by_name = {field.name: field for field in fields(kind)}
        for key in table.keys() - by_name.keys() if self.closed else ():
            got = f"the unknown key {excerpt(key)!r}{nearest(excerpt(key), by_name)}"
            raise self.reader.refusal(f"hold only {', '.join(by_name)}", got, at)
        for key in by_name.keys() - table.keys():
            if by_name[key].default is MISSING and by_name[key].default_factory is MISSING:
                raise self.reader.refusal(f"hold {', '.join(by_name)}", f"no {key!r}", at)
        inside = f"{at}." if at else ""
        return kind(**{
            key: self.of(field.type, table[key], inside + key, _USUAL)
            for key, field in by_name.items() if key in table
        })  # fmt: skip

    def _plain(self, kind: Any, value: Any, at: str, limits: Limits) -> Any:
        if get_origin(kind) is Literal:
            must = f"be one of {', '.join(get_args(kind))}"
            self._check(value in get_args(kind), must, repr(value), at)
        elif kind is str:
            self._check(isinstance(value, str), "be a string", value, at)
            most = _SHORT if limits is _USUAL else limits
            self._check(most.hold(len(value)), f"be under {most.high:g} characters", value, at)
        elif kind is bool:
            self._check(isinstance(value, bool), "be true or false", value, at)
        return value if kind not in (int, float) else self._number(kind, value, at, limits)

    def _number(self, kind: type, value: Any, at: str, limits: Limits) -> Any:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if good and limits.hold(value) and (kind is not int or value == int(value)):
            return kind(value)
        noun = limits.words("whole number" if kind is int else "number")
        raise self.reader.refusal(f"be a {noun}", repr(value), at)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "lists or tables too deep in each other"
    return getattr(error, "strerror", None) or str(error)
