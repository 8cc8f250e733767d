"""Numbers as people write them."""

import re

from megatron_burst.errors import BurstError

_MOST = 1 << 40  # no job is larger, and floats lose precision
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole_number(text: str, option: str, who: str = "plan") -> int:
    """The number in "1M", "1048576", "128k" or "1.5M"; K is 1024. A refusal names `who` and the
    option.

    Raises:
        BurstError: if it is not a positive whole number, or above 1024G.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?)\s*", text.replace("_", ""))
    value = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1 <= value <= _MOST or value != int(value):
        raise BurstError(
            f"{who}: {option} must be a positive whole number up to 1024G, because it is "
            f"a count; got {text!r}; write for example 1048576, 128k or 1M (K is 1024)"
        )
    return int(value)


def whole_numbers(text: str, option: str, who: str) -> tuple[int, ...]:
    """The numbers in a list such as "64K,1M"; refuses as `whole_number` does."""
    return tuple(whole_number(word, option, who) for word in text.split(","))


def in_units(count: int) -> str:
    """65536 as "64K", 1048576 as "1M"; as `whole_number` reads it."""
    for unit in ("G", "M", "K"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def digits(number: float, count: int) -> str:
    """So many digits, never as a power of ten."""
    return f"{number:.{count}g}" if number < 10**count else f"{number:.0f}"
