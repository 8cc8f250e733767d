"""Numbers of a model's file, and what is said of those that cannot be read."""

import re
from collections.abc import Mapping
from typing import Any

from megatron_burst.errors import BurstError, nearest
from megatron_burst.files import excerpt

MOST_LAYERS, _HEADS, _LARGEST = 10_000, 4096, 1 << 31  # of a model, and any of its sizes


class Sizes:
    """Looks sizes up in a table, and complains about missing ones."""

    def __init__(self, table: Mapping[str, Any], name: str) -> None:
        self._table, self._name = table, name

    def __call__(self, key: str, default: int | None = None) -> int:
        """The number of a key.

        Raises:
            BurstError: if it is there but no number, or is not there and has no default.
        """
        value = self._table.get(key)
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # of each layer, all alike
            value = value[0]
        if value is None and default is not None:
            return default
        digits = re.fullmatch(r"(\d{1,15})(\.0*)?", str(value))
        most = MOST_LAYERS if "layers" in key else _LARGEST
        most = _HEADS if "heads" in key or "groups" in key else most
        if value is None or not digits or int(digits[1]) > most:
            close = "" if value is not None else nearest(key, self._table)
            raise BurstError(
                f"plan: {self._name} must hold a number {key!r} up to {most}, because a model's "
                f"time and memory depend on it; got {excerpt(repr(value))}{close}; set it"
            )
        return int(digits[1])

    def truth(self, key: str, default: bool = False) -> bool:
        """Whether a key is on."""
        value = self._table.get(key, default)
        return str(value).lower() not in ("false", "0", "none", "no")


def positive(value: Any, option: str, name: str) -> int:
    """The number of an option of a file.

    Raises:
        BurstError: if it is no positive whole number.
    """
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 1 <= number <= _LARGEST or isinstance(value, bool):
        raise unread(name, option, repr(value))
    return number


def unread(name: str, option: str, got: str) -> BurstError:
    """The refusal of an option of a file."""
    return BurstError(
        f"plan: {name} must hold a {option} that can be read, because the time of attention "
        f"depends on it; got {excerpt(got)}; correct it"
    )
