"""Integers as users pass them: Python's, numpy's, or in an array or tensor.

A bool counts nothing, so it is refused; and so is a float, also 4.0: it comes from a
division, which leaves a rest for other sizes.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from operator import index
from typing import Any

from megatron_burst.errors import require

MOST = 1 << 31  # tokens of a sample or a micro-batch: its pairs, and sums of many, fit 64 bits
TOKENS = "it counts tokens"


def as_integer(value: Any) -> int | None:
    """The int that a value is; None if it is none."""
    if type(value) is int:  # most are, and there may be millions
        return value
    is_bool = "bool" in str(getattr(value, "dtype", type(value).__name__))
    if is_bool or getattr(value, "ndim", 0):
        return None
    try:
        return index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor without data
        return None


def as_list(values: Any, axes: tuple[int, ...] = (1,)) -> list[Any] | None:
    """The entries of a sequence, or of an array or tensor with so many axes; None if it is none."""
    ordered = isinstance(values, Iterable) and not isinstance(
        values, str | bytes | Mapping | AbstractSet
    )
    if not ordered or getattr(values, "ndim", 1) not in axes:
        return None
    try:
        return values.tolist() if hasattr(values, "tolist") else list(values)
    except (TypeError, ValueError, RuntimeError):
        return None


def integer(
    who: str, name: str, value: Any, least: int = 0, most: int = MOST, why: str = TOKENS
) -> int:
    """A value as an int; refuses one that is none, or not from `least` to `most`."""
    number = as_integer(value)
    must = f"{name} must be an integer from {least} to {most}, because {why}"
    fits = number is not None and least <= number <= most
    require(who, [(fits, must, shown(value), "pass an int in this range")])
    return number


def integers(
    who: str, name: str, values: Any, least: int = 0, most: int = MOST, why: str = TOKENS
) -> list[int]:
    """A sequence, array or tensor with one axis as a list of ints; refuses other values, and ints
    that are not from `least` to `most`."""

    def read(entry: Any) -> int | None:
        number = as_integer(entry)
        return number if number is not None and least <= number <= most else None

    must = f"{name} must be a sequence of integers from {least} to {most}, because {why}"
    change = "pass a list of int, or an array or tensor of integers with one axis"
    return entries(who, must, values, read, change)


def entries[Entry](
    who: str, must: str, values: Any, read: Callable[[Any], Entry | None], change: str,
    axes: tuple[int, ...] = (1,),
) -> list[Entry]:  # fmt: skip
    """What `read` makes of each entry of a sequence, or of an array or tensor with so many axes;
    refuses other values, and entries that make None."""
    listed = as_list(values, axes)
    require(who, [(listed is not None, must, shown(values), change)])
    results = [read(entry) for entry in listed]
    if None in results:
        at = results.index(None)
        require(who, [(False, must, f"{shown(listed[at])} at index {at}", change)])
    return results


def shown(value: Any) -> str:
    """A value in one short line."""
    if type(value) is int and value.bit_length() > 256:  # Python prints no more than 4,300 digits
        return f"an int of {value.bit_length()} bits"
    if hasattr(value, "dtype") and getattr(value, "shape", ()):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    try:
        return " ".join(repr(value).split())[:80]
    except Exception:  # of the value's own, or of such an int in it
        return f"a {type(value).__name__}"
