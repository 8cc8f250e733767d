"""Files that others wrote: read up to a size, parsed and checked before anything relies on them.

What comes of one is plain data within limits, or a sentence that says what is wrong with it.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megatron_burst.errors import BurstError, nearest

_KIB, _MIB = 1 << 10, 1 << 20
_DEEPEST = 40  # lists and tables in each other
_LARGEST = 1 << 64  # a whole number
_LONGEST = 1000  # a line of TOML: tomllib takes quadratic time for the parts of a name
_BLANKS = "\n\t"


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
Count = Annotated[int, Limits(high=1 << 40, above=True)]
LongText = Annotated[str, Limits(high=_MIB)]


def harmless(text: str) -> str:
    """A text with its control characters written out, so that no terminal obeys them; ends of
    lines stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in _BLANKS
        else char.encode("unicode_escape").decode() for char in text
    )  # fmt: skip


def excerpt(value: object, most: int = 80) -> str:
    """The beginning of a value of a file, in one harmless line."""
    text = value if isinstance(value, str) else repr(value)
    cut = " ".join(harmless(text[:most]).split("\n"))
    return f"{cut}..." if len(text) > most else cut


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

    def refusal(self, must: str, got: object, at: str = "", change: str = "") -> BurstError:
        """Of what is at a place of the file."""
        where = f"{excerpt(self.name, 300)}{': ' * bool(at)}{excerpt(at)}"
        return BurstError(
            f"{self.who}: {where} must {must}, because {self.why}; got {excerpt(got, 300)}; "
            f"{change or self.change}"
        )

    def data(self) -> bytes:
        """All bytes."""
        try:
            with Path(self.name).open("rb") as file:
                found = file.read(self.most + 1)
        except (OSError, ValueError) as error:  # ValueError: what no path may have
            raise self.refusal("be a readable file", _reason(error)) from None
        if len(found) > self.most:
            size = f"{self.most // _MIB} MiB" if self.most >= _MIB else f"{self.most // _KIB} KiB"
            raise self.refusal(f"have at most {size}", "more")
        return found

    def text(self, errors: str = "strict") -> str:
        """As text in UTF-8; `errors`: as for `bytes.decode`."""
        data = self.data()
        if b"\0" in data:
            raise self.refusal("be a text file", "a binary file")
        try:
            return data.decode(errors=errors).replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise self.refusal("be a text file in UTF-8", error) from None

    def json(self, text: str | None = None, at: str = "") -> Any:
        """Plain data from JSON: of the file, or of a text of it at a place."""
        try:
            found = json.loads(self.text() if text is None else text)
        except BurstError:
            raise
        except (ValueError, RecursionError) as error:
            raise self.refusal("be JSON", _reason(error), at) from None
        return self._plain(found, at)

    def toml(self, text: str | None = None) -> dict[str, Any]:
        """Plain data from TOML: of the file, or of a text."""
        text = self.text() if text is None else text
        if any(len(line) > _LONGEST for line in text.splitlines()):
            raise self.refusal(f"have at most {_LONGEST} characters a line", "more")
        try:
            found = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.refusal("be TOML", _reason(error), change="correct that line") from None
        return self._plain(found, "")

    def _plain(self, found: Any, at: str) -> Any:
        """What was parsed, if it is neither too deep nor has a number that is none."""
        left: list[tuple[Any, int]] = [(found, 0)]
        while left:
            one, depth = left.pop()
            inside: Iterable[Any] = one.values() if isinstance(one, dict) else ()
            inside = one if isinstance(one, list) else inside
            left += [(each, depth + 1) for each in inside]
            if depth > _DEEPEST:
                must = f"have at most {_DEEPEST} lists and tables in each other"
                raise self.refusal(must, "more", at)
            if isinstance(one, int) and abs(one) >= _LARGEST:
                raise self.refusal("have whole numbers below 2^64", "a larger one", at)
            if one != one:
                raise self.refusal("have numbers", one, at)
        return found

    def typed(self, kind: Any, value: Any, at: str = "", closed: bool = True) -> Any:
        """Plain data as a type: a dataclass, tuple, Mapping, Literal, str, bool, int, float, a
        union of them, any of them with `Limits`, or a class with `of_data`, which raises a
        ValueError of what must hold.

        Args:
            kind: the type. Numbers without `Limits` are from 0 on.
            value: the data.
            at: its place in the file, e.g. "gpu.launch_us".
            closed: whether tables hold no other keys than those of their dataclass.
        """
        return _Typed(self, closed).of(kind, value, at, _USUAL)


@dataclass(frozen=True, slots=True)
class _Typed:
    reader: Reader
    closed: bool

    def of(self, kind: Any, value: Any, at: str, limits: Limits) -> Any:
        if kind in _PLAIN:
            return self._plain(kind, value, at, limits)
        origin, inner = get_origin(kind), get_args(kind)
        if kind is Any:
            return value
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
            self._check(isinstance(value, list), "be a list", value, at)
            self._check(limits.hold(len(value)), "have entries", value, at)
            if inner[0] is int and all(type(one) is int and 0 <= one < 1e15 for one in value):
                return tuple(value)  # thousands of ranks, without a call for each
            return tuple(
                self.of(inner[0], each, f"{at} {number}", _USUAL)
                for number, each in enumerate(value, 1)
            )
        if origin is not None and origin is not Literal:  # a mapping
            self._check(isinstance(value, dict), "be a table", value, at)
            return {
                self._key(inner[0], key, at): self.of(inner[1], one, f"{at}.{key}", _USUAL)
                for key, one in value.items()
            }
        return self._plain(kind, value, at, limits)

    def _check(self, good: object, must: str, got: object, at: str) -> None:
        if not good:
            raise self.reader.refusal(must, got, at)

    def _one_of(self, kinds: tuple[Any, ...], value: Any, at: str, limits: Limits) -> Any:
        if value is None and type(None) in kinds:
            return None
        own = type(value)  # a whole number is no float, where there is a kind for each
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        other = [own not in (kind, *get_args(kind)[:1]) for kind in kinds]
        *others, last = (kinds[at] for at in sorted(range(len(kinds)), key=lambda at: other[at]))
        for kind in others:
            try:
                return self.of(kind, value, at, limits)
            except BurstError:
                continue
        return self.of(last, value, at, limits)

    def _table(self, kind: Any, table: Any, at: str) -> Any:
        self._check(isinstance(table, dict), "be a table", table, at)
        known = _fields(kind)
        for key in table.keys() - known.keys() if self.closed else ():
            got = f"the unknown key {excerpt(key)!r}{nearest(excerpt(key), known)}"
            raise self.reader.refusal(f"hold only {', '.join(known)}", got, at)
        for key in known.keys() - table.keys():
            if known[key].default is MISSING and known[key].default_factory is MISSING:
                raise self.reader.refusal(f"hold {', '.join(known)}", f"no {key!r}", at)
        inside = f"{at}." if at else ""
        return kind(**{
            key: self.of(its.type, table[key], inside + key, _USUAL)
            for key, its in known.items() if key in table
        })  # fmt: skip

    def _plain(self, kind: Any, value: Any, at: str, limits: Limits) -> Any:
        if get_origin(kind) is Literal:
            words = get_args(kind)
            if value not in words:
                raise self.reader.refusal(f"be one of {', '.join(words)}", repr(value), at)
        elif kind is str:
            self._check(isinstance(value, str), "be a text", value, at)
            most = _SHORT if limits is _USUAL else limits
            if not most.hold(len(value)):
                raise self.reader.refusal(f"have less than {most.high:g} characters", value, at)
        elif kind is bool:
            self._check(isinstance(value, bool), "be true or false", value, at)
        else:
            return self._number(kind, value, at, limits)
        return value

    def _key(self, kind: type, key: str, at: str) -> Any:
        """JSON's names of entries are texts."""
        whole = kind is int and key.isdecimal() and len(key) < 20
        return self.of(kind, int(key) if whole else key, at, _USUAL)

    def _number(self, kind: type, value: Any, at: str, limits: Limits) -> Any:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if good and limits.hold(value) and (kind is not int or value == int(value)):
            return kind(value)
        what = limits.words("whole number" if kind is int else "number")
        raise self.reader.refusal(f"be a {what}", repr(value), at)


@cache
def _fields(kind: Any) -> Mapping[str, Field]:
    return {field.name: field for field in fields(kind)}


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "lists or tables too deep in each other"
    return getattr(error, "strerror", None) or str(error)
