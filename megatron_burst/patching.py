"""Replaces functions of Megatron and torch, after checking their signatures, and restores them.

One table, `mcore/patches.py`, lists what is replaced; `undo_all` restores all of it.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from types import ModuleType
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.installed import version_of

type Releases = tuple[tuple[int, int], tuple[int, int]]  # the first and the last with a place
NEWEST = 99, 0  # last release of a place that still exists
EVERY_RELEASE = (0, 0), NEWEST
_MARK = "__megatron_burst_patch__"  # on a replacement: (`becomes`, the original)

# Packages with three quarters of all names, which import no function of Megatron's; torch alone
# imports functions of torch's.
_LARGE = ("torch", "sympy", "networkx", "numpy", "mpmath")

# Undo functions of this process, in the order of patching.
_UNDO: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class Patch:
    """One function of Megatron or torch that burst replaces, or only relies on."""

    group: str  # patches that are applied together
    place: str  # "module:function" or "module:Class.method"
    # "module:function": called in its place, under every name, with the original (and more, see
    # `apply`) before its arguments; "=module:name": replaces it as is, in this place only; "":
    # burst only relies on it
    becomes: str
    parameters: tuple[str, ...]  # names, in order, in the release that the patch was written for
    why: str  # its purpose, and why no public hook serves it
    package: str = "megatron-core"  # the distribution that contains the place
    te: bool | None = None  # whether Megatron must have found TransformerEngine; None: either
    others: tuple[tuple[str, ...], ...] = ()  # parameters in other supported releases
    releases: Releases = EVERY_RELEASE  # with this place, as (major, minor)

    @property
    def target(self) -> str:
        """The place as a dotted name."""
        return self.place.replace(":", ".")

    @property
    def module(self) -> str:
        """The module of the place."""
        return self.place.partition(":")[0]

    @property
    def live(self) -> bool:
        """Whether it is applied."""
        try:
            return self._is_in(_named(self.place))
        except (ImportError, AttributeError):
            return False

    def misfit(self) -> str | None:
        """How the original differs from the function that the patch was written for, or None."""
        if self.live:
            return None
        try:
            owner, name = _owner_of(self.place)
        except (ImportError, AttributeError) as error:
            return f"megatron_burst: {self.target} cannot be imported: {error}"
        original = getattr(owner, name, None)
        parameters = _parameters_of(original)
        known = self.parameters, *self.others
        # someone's wrapper may take any further options (mcore-bridge's apply_rotary_pos_emb)
        if parameters in known or _parameters_of(original, Parameter.VAR_KEYWORD) in known:
            return None
        return (
            f"megatron_burst: {self.target} must have the parameters {self.parameters}, "
            f"because {'a patch replaces it' if self.becomes else 'burst is called by it'}; got "
            f"{parameters} in {self.package} {version_of(self.package)}; install a release that "
            "megatron_burst's docs/versions.md names"
        )

    def apply(self, *arguments: Any) -> None:
        """Apply it, if it fits; `becomes` gets the arguments, after the original. Idempotent."""
        if self.live:
            return
        if misfit := self.misfit():
            raise BurstError(misfit)
        owner, name = _owner_of(self.place)
        if self.becomes.startswith("="):
            _rebind(owner, name, _named(self.becomes[1:]), everywhere=False)
        elif self.becomes:
            replacement = self._wrapped(owner, name, arguments)
            _rebind(owner, name, replacement, everywhere=isinstance(owner, ModuleType))

    def _wrapped(self, owner: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        """The original, whose calls go to `becomes`."""
        original = (inspect.getattr_static if isinstance(owner, type) else getattr)(owner, name)
        method = type(original) if isinstance(original, staticmethod | classmethod) else None
        function = original.__func__ if method else original
        becomes: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def replacement(*args, **options):
            if not becomes:
                # loaded at the first call: it may import what is being imported now, see
                # `imports.when_imported`; in a list, which torch.compile can trace
                becomes.append(_named(self.becomes))
            return becomes[0](function, *arguments, *args, **options)

        setattr(replacement, _MARK, (self.becomes, function))
        return method(replacement) if method else replacement

    def _is_in(self, function: Any) -> bool:
        if self.becomes.startswith("="):
            return function is _named(self.becomes[1:])
        while (mark := getattr(function, _MARK, None)) is not None:  # others may have wrapped it
            becomes, function = mark
            if becomes == self.becomes:
                return True
        return False


def on_undo(give_back: Callable[[], None]) -> None:
    """Have `undo_all` call this too, to undo what is not a replaced function."""
    _UNDO.append(give_back)


def undo_all() -> None:
    """Undo all patches in this process, the latest first. Models keep the attention and the loss
    that they were built with; a function that other code has replaced since is not restored."""
    while _UNDO:
        _UNDO.pop()()


def _parameters_of(function: Any, without: Any = None) -> tuple[str, ...] | None:
    """Names of a function's parameters, except those of one kind; None if it is not a function."""
    if not callable(function):
        return None
    parameters = inspect.signature(function).parameters.items()
    return tuple(name for name, parameter in parameters if parameter.kind is not without)


def _named(path: str) -> Any:
    """The object at "module:name"."""
    owner, name = _owner_of(path)
    return getattr(owner, name)


def _owner_of(path: str) -> tuple[Any, str]:
    """The module or class that holds the object at a path, and its name there."""
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    owner = importlib.import_module(module)
    return functools.reduce(getattr, classes, owner), name


def _rebind(owner: Any, name: str, replacement: Any, everywhere: bool) -> None:
    """Rebind an attribute, and `everywhere` every name that loaded modules have for its old value,
    as an earlier `from module import function` makes; methods have none."""
    original = vars(owner).get(name)  # None if a class inherits it
    if everywhere:
        for module, alias in _names_of(original):
            setattr(module, alias, replacement)
    setattr(owner, name, replacement)
    on_undo(functools.partial(_give_back, owner, name, original, replacement, everywhere))


def _give_back(owner: Any, name: str, original: Any, replacement: Any, everywhere: bool) -> None:
    if everywhere:  # also names bound since
        for module, alias in _names_of(replacement):
            setattr(module, alias, original)
    elif vars(owner).get(name) is replacement:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _names_of(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every (module, name) of loaded modules that refers to a function."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    skipped = [name for name in _LARGE if name != package]
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and path.partition(".")[0] not in skipped:
            names = [name for name, value in vars(module).items() if value is function]
            yield from ((module, name) for name in names)
