"""Numbers of a model's file, and what is said of those that cannot be read."""

import re
from collections.abc import Mapping
from typing import Any

from megatron_burst.errors import BurstError, nearest


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
        if value is None or not re.fullmatch(r"\d+(\.0*)?", str(value)):
            close = "" if value is not None else nearest(key, self._table)
            raise BurstError(
                f"plan: {self._name} must hold a number {key!r}, because a model's time and "
                f"memory depend on it; got {value!r}{close}; add it"
            )
        return int(float(value))

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
    except (TypeError, ValueError):
        number = -1
    if number < 1 or isinstance(value, bool):
        raise unread(name, option, repr(value))
    return number


def unread(name: str, option: str, got: str) -> BurstError:
    """The refusal of an option of a file."""
    return BurstError(
        f"plan: {name} must hold a {option} that can be read, because the time of attention "
        f"depends on it; got {got}; correct it"
    )
