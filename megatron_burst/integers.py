"""Integers as users pass them: Python's, numpy's, or in an array or tensor.

A bool counts nothing, so it is refused; and so is a float, also 4.0: it comes from a
division, which leaves a rest for other sizes.
"""

from collections.abc import Iterable, Mapping
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


def as_list(values: Any) -> list[Any] | None:
    """The entries of a sequence, array or tensor with one axis; None if it is none."""
    ordered = isinstance(values, Iterable) and not isinstance(
        values, str | bytes | Mapping | AbstractSet
    )
    if not ordered or getattr(values, "ndim", 1) != 1:
        return None
    try:
        return values.tolist() if hasattr(values, "tolist") else list(values)
    except (TypeError, ValueError, RuntimeError):
        return None


def integer(
    who: str, name: str, value: Any, least: int = 0, most: int = MOST, why: str = TOKENS
) -> int:
    """A value as an int.

    Raises:
        BurstError: if it is none, or not from `least` to `most`.
    """
    number = as_integer(value)
    must = f"{name} must be an integer from {least} to {most}, because {why}"
    fits = number is not None and least <= number <= most
    require(who, [(fits, must, shown(value), "pass an int in this range")])
    assert number is not None
    return number


def integers(
    who: str, name: str, values: Any, least: int = 0, most: int = MOST, why: str = TOKENS
) -> list[int]:
    """A sequence, array or tensor with one axis as a list of ints.

    Raises:
        BurstError: if it is none, or one is not from `least` to `most`.
    """
    entries = as_list(values)
    must = f"{name} must be a sequence of integers from {least} to {most}, because {why}"
    change = "pass a list of int, or an array or tensor of integers with one axis"
    require(who, [(entries is not None, must, shown(values), change)])
    assert entries is not None
    numbers = [as_integer(entry) for entry in entries]
    wrong = [
        f"{shown(entry)} at index {at}"
        for at, (entry, number) in enumerate(zip(entries, numbers, strict=True))
        if number is None or not least <= number <= most
    ]
    require(who, [(not wrong, must, "".join(wrong[:1]), change)])
    return [number for number in numbers if number is not None]


def shown(value: Any) -> str:
    """A value in one short line."""
    if hasattr(value, "dtype") and getattr(value, "shape", ()):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    try:
        return " ".join(repr(value).split())[:80]
    except Exception:  # an int of more digits than Python prints
        return f"a {type(value).__name__}"
