"""Calls back when a module is imported, so that nothing is imported earlier than its user wants."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType


def when_imported(module: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` as soon as anyone imports the module; now, if it is already imported.

    Repeating a pending request changes nothing.

    Returns:
        what ends the waiting.
    """
    if module in sys.modules:
        then()
        return lambda: None
    for one in sys.meta_path:
        if isinstance(one, _Waiting) and one.does(module, then):
            return one.end
    waiting = _Waiting(module, then)
    sys.meta_path.insert(0, waiting)
    return waiting.end


class _Waiting(MetaPathFinder):
    """Finds one module through the other finders of sys.meta_path, to learn of its import."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self.then, self.asks_others = module, then, False

    def does(self, module: str, then: Callable[[], None]) -> bool:
        """Whether it waits for this module to call this."""
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
    """What identifies a callback."""
    return (then.func, then.args) if isinstance(then, functools.partial) else then
