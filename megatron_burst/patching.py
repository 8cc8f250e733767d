"""Patches of Megatron and torch: few, idempotent, checked against what they replace, undone.

What they replace stands in one table; `undo_all` gives all of it back.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.installed import version_of

_MARK = "__megatron_burst_original__"


@dataclass(frozen=True, slots=True)
class Patch:
    """One rebound function or method of Megatron's or torch's.

    Attributes:
        owner: module, or "module:Class".
        name: attribute of the owner.
        parameters: names that the original must have, in order; written out, as Megatron had them
            when the patch was written.
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
            f"{version_of(self.package)}; install the one that megatron_burst names in its "
            "pyproject.toml"
        )

    def apply(self) -> None:
        """Put it in force, under every name of a loaded module; a second time changes nothing.

        Raises:
            BurstError: if the original is not the function that the patch was written for.
        """
        if self.live:
            return
        misfit = self.misfit()
        if misfit:
            raise BurstError(misfit)
        owner = self._owner()
        is_class = isinstance(owner, type)
        found = (inspect.getattr_static if is_class else getattr)(owner, self.name)
        method = type(found) if isinstance(found, staticmethod | classmethod) else None
        original = found.__func__ if method else found
        replacement = functools.wraps(original)(self.wrap(original))
        setattr(replacement, _MARK, original)
        placed = method(replacement) if method else replacement
        _TABLE.append(_Replaced.by(placed, owner, self.name))


def rebind(owner: Any, name: str, value: Any) -> None:
    """Bind an attribute to a function, and with it all names that modules have for the old one.

    `from module import function`, run before, has made such a name.

    Args:
        owner: module or class; a method has no other names.
        name: of the attribute.
        value: what it is bound to.
    """
    if isinstance(owner, ModuleType):
        for module, other in _names_of(getattr(owner, name)):
            setattr(module, other, value)
    setattr(owner, name, value)


def undo_all() -> None:
    """Give back all that patches have replaced in this process, the latest first.

    Models keep the attention and the loss that they were built with. A name that somebody has bound
    anew over a patch stays theirs.
    """
    while _TABLE:
        _TABLE.pop().give_back()


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What a patch has put in place of what.

    Attributes:
        owner: module or class.
        name: of the attribute.
        original: what it was; None if the class had inherited it.
        replacement: what it is now.
    """

    owner: Any
    name: str
    original: Any
    replacement: Any

    @classmethod
    def by(cls, replacement: Any, owner: Any, name: str) -> "_Replaced":
        """Replace an attribute."""
        original = vars(owner).get(name)
        rebind(owner, name, replacement)
        return cls(owner, name, original, replacement)

    def give_back(self) -> None:
        if isinstance(self.owner, ModuleType):  # also under names that were bound since
            for module, name in _names_of(self.replacement):
                setattr(module, name, self.original)
        elif vars(self.owner).get(self.name) is self.replacement:
            if self.original is None:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)


_TABLE: list[_Replaced] = []  # of this process, in the order in which they were made


def _names_of(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Where loaded modules have a function, and under which names."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = [name for name, value in vars(module).items() if value is function]
            yield from ((module, name) for name in names)
