"""How functions of Megatron and torch are replaced: checked against what they were, and given back.

What is replaced stands in one table, `mcore/patches.py`; `undo_all` gives all of it back.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from inspect import Parameter
from types import ModuleType
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.installed import version_of

NEWEST = 99, 0  # the last release of what is still there
EVERY_RELEASE = (0, 0), NEWEST
_MARK = "__megatron_burst_patch__"  # what a replacement has: the patch's `becomes`, the original

# Of this process, in the order in which it was done: what gives back.
_UNDO: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class Patch:
    """One name of Megatron's or torch's that burst binds anew, or only relies on.

    Attributes:
        group: patches that are put in force together.
        place: "module:function" or "module:Class.method".
        becomes: "module:function", which takes its place under every name and is called with the
            original (and more, see `apply`) before its arguments; "=module:name" takes its place
            itself, there only; "" if burst only relies on it.
        parameters: names that the original must have, in order; written out, as they were in the
            release that the patch was written for.
        others: the same in other releases that it works with.
        releases: the first and the last that have the place, as (major, minor).
        why: what it is for and why no public hook does.
        package: the distribution that it comes with.
        te: whether Megatron must have found TransformerEngine, or must not; None: either.
    """

    group: str
    place: str
    becomes: str
    parameters: tuple[str, ...]
    why: str
    package: str = "megatron-core"
    te: bool | None = None
    others: tuple[tuple[str, ...], ...] = ()
    releases: tuple[tuple[int, int], tuple[int, int]] = EVERY_RELEASE

    @property
    def target(self) -> str:
        """The place as a dotted name."""
        return self.place.replace(":", ".")

    @property
    def module(self) -> str:
        """The module that has the place."""
        return self.place.partition(":")[0]

    @property
    def live(self) -> bool:
        """Whether it is in force."""
        try:
            return self._is_in(*_owner_of(self.place))
        except (ImportError, AttributeError):
            return False

    def misfit(self) -> str | None:
        """Why the original is not the function that the patch was written for, or None."""
        if self.live:
            return None
        try:
            owner, name = _owner_of(self.place)
        except (ImportError, AttributeError) as error:
            return f"megatron_burst: {self.target} cannot be imported: {error}"
        original = getattr(owner, name, None)
        found = _parameters_of(original)
        known = self.parameters, *self.others
        # somebody's wrapper may take any options besides (mcore-bridge's apply_rotary_pos_emb)
        if found in known or _parameters_of(original, without=Parameter.VAR_KEYWORD) in known:
            return None
        return (
            f"megatron_burst: {self.target} must have the parameters {self.parameters}, "
            f"because {'a patch replaces it' if self.becomes else 'burst is called by it'}; got "
            f"{found} in {self.package} {version_of(self.package)}; install a release that "
            "megatron_burst's docs/versions.md names"
        )

    def apply(self, *given: Any) -> None:
        """Put it in force; a second time changes nothing.

        Args:
            given: passed to `becomes`, after the original.

        Raises:
            BurstError: if the original is not the function that the patch was written for.
        """
        if self.live:
            return
        misfit = self.misfit()
        if misfit:
            raise BurstError(misfit)
        if not self.becomes:
            return
        owner, name = _owner_of(self.place)
        if self.becomes.startswith("="):
            original = vars(owner).get(name)
            value = _named(self.becomes[1:])
            setattr(owner, name, value)
            on_undo(functools.partial(_give_back, owner, name, original, value))
            return
        found = (inspect.getattr_static if isinstance(owner, type) else getattr)(owner, name)
        method = type(found) if isinstance(found, staticmethod | classmethod) else None
        function = found.__func__ if method else found
        becomes: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def replacement(*args, **options):
            if not becomes:
                # not before it is called: it may import what is just being imported, see
                # `when_imported`; in a list, which torch.compile can look into
                becomes.append(_named(self.becomes))
            return becomes[0](function, *given, *args, **options)

        setattr(replacement, _MARK, (self.becomes, function))
        _rebind(owner, name, method(replacement) if method else replacement)

    def _is_in(self, owner: Any, name: str) -> bool:
        found = getattr(owner, name, None)
        if self.becomes.startswith("="):
            return found is _named(self.becomes[1:])
        while (mark := getattr(found, _MARK, None)) is not None:  # others may lie over it
            becomes, found = mark
            if becomes == self.becomes:
                return True
        return False


def when_imported(module: str, then: Callable[[], None]) -> None:
    """Call something as soon as a module is imported, by whomever; now, if it is already.

    Asking for the same again while it waits changes nothing.
    """
    if module in sys.modules:
        then()
        return
    if any(isinstance(one, _Waiting) and one.does(module, then) for one in sys.meta_path):
        return
    waiting = _Waiting(module, then)
    sys.meta_path.insert(0, waiting)
    on_undo(waiting.end)


class _Waiting(MetaPathFinder):
    """Finds one module as the others of sys.meta_path do; it only has to know of its import."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self.then, self.asks_others = module, then, False

    def does(self, module: str, then: Callable[[], None]) -> bool:
        """Whether it waits for this module, to do this."""
        return self.module == module and _parts(self.then) == _parts(then)

    def find_spec(self, name, path=None, target=None):
        if name != self.module or self.asks_others:
            return None
        self.asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks_others = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self.run, spec.loader.exec_module)
        return spec

    def run(self, exec_module, module: ModuleType) -> None:
        exec_module(module)
        self.end()
        self.then()

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _parts(then: Callable[[], None]) -> object:
    """What makes two calls the same."""
    return (then.func, then.args) if isinstance(then, functools.partial) else then


def on_undo(give_back: Callable[[], None]) -> None:
    """Have `undo_all` call something that gives back what is no function of another's."""
    _UNDO.append(give_back)


def undo_all() -> None:
    """Undo all patches in this process, the latest first.

    Models keep the attention and the loss that they were built with. A function that other code
    has replaced after the patch is not restored.
    """
    while _UNDO:
        _UNDO.pop()()


def _parameters_of(function: Any, without: Any = None) -> tuple[str, ...] | None:
    """Names of a function's parameters, but those of a kind; None if it is no function."""
    if not callable(function):
        return None
    found = inspect.signature(function).parameters.items()
    return tuple(name for name, parameter in found if parameter.kind is not without)


def _named(path: str) -> Any:
    """What a dotted path with a colon names."""
    owner, name = _owner_of(path)
    return getattr(owner, name)


def _owner_of(path: str) -> tuple[Any, str]:
    """The module or class that has what a path names, and its name there."""
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    owner = importlib.import_module(module)
    return functools.reduce(getattr, classes, owner), name


def _rebind(owner: Any, name: str, replacement: Any) -> None:
    """Bind an attribute anew, and with it all names that modules have for the old one.

    `from module import function`, run before, has made such a name; a method has none.
    """
    original = vars(owner).get(name)  # None if a class inherits it
    if isinstance(owner, ModuleType):
        for module, other in _names_of(original):
            setattr(module, other, replacement)
    setattr(owner, name, replacement)
    on_undo(functools.partial(_give_back, owner, name, original, replacement, everywhere=True))


def _give_back(
    owner: Any, name: str, original: Any, replacement: Any, everywhere: bool = False
) -> None:
    if everywhere and isinstance(owner, ModuleType):  # also under names that were bound since
        for module, other in _names_of(replacement):
            setattr(module, other, original)
    elif vars(owner).get(name) is replacement:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _names_of(function: Any) -> Iterator[tuple[ModuleType, str]]:
    """Where loaded modules have a function, and under which names."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = [name for name, value in vars(module).items() if value is function]
            yield from ((module, name) for name in names)
