"""Patches of Megatron and torch: few, idempotent, listed, checked against what they replace."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megatron_burst.errors import BurstError

_MARK = "__megatron_burst_original__"


@dataclass(frozen=True, slots=True)
class Patch:
    """One rebound function or method of Megatron's or torch's.

    Attributes:
        owner: module, or "module:Class".
        name: attribute of the owner.
        parameters: names that the original must have, in order.
        why: what it is for and why no public seam does.
        wrap: makes the replacement from the original.
        package: the distribution that the owner comes with.
    """

    owner: str
    name: str
    parameters: tuple[str, ...]
    why: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    package: str = "megatron-core"

    @property
    def target(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def _owner(self) -> Any:
        module, _, name = self.owner.partition(":")
        owner = importlib.import_module(module)
        return getattr(owner, name) if name else owner

    @property
    def live(self) -> bool:
        """Whether it is in force."""
        return hasattr(getattr(self._owner(), self.name, None), _MARK)

    def misfit(self) -> str | None:
        """Why the original is not the function that the patch was written for, or None."""
        if self.live:
            return None
        original = getattr(self._owner(), self.name, None)
        found = tuple(inspect.signature(original).parameters) if callable(original) else None
        if found == self.parameters:
            return None
        return (
            f"megatron_burst: {self.target} must have the parameters {self.parameters}, "
            f"because a patch replaces it; got {found} in {self.package} "
            f"{version(self.package)}; install the one that megatron_burst names in its "
            "pyproject.toml"
        )

    def apply(self) -> None:
        """Put it in force; a second time changes nothing.

        Raises:
            BurstError: if the original is not the function that the patch was written for.
        """
        if self.live:
            return
        misfit = self.misfit()
        if misfit:
            raise BurstError(misfit)
        original = getattr(self._owner(), self.name)
        replacement = functools.wraps(original)(self.wrap(original))
        setattr(replacement, _MARK, original)
        setattr(self._owner(), self.name, replacement)
