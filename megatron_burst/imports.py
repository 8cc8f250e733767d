"""Calls back when a module is imported, so that this package need not import the module itself."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType


def when_imported(module: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` when the module is imported; now, if it is already. Repeating a pending request
    changes nothing. Returns what cancels the request."""
    if module in sys.modules:
        then()
        return lambda: None
    # equal for equal callbacks, also if they are partials
    parts = (then.func, then.args) if isinstance(then, functools.partial) else then
    for finder in sys.meta_path:
        if getattr(finder, "request", None) == (module, parts):
            return finder.cancel
    watcher = _ImportWatcher(module, then, (module, parts))
    sys.meta_path.insert(0, watcher)
    return watcher.cancel


class _ImportWatcher(MetaPathFinder):
    """Finds one module through the other finders of sys.meta_path, and wraps its execution."""

    def __init__(self, module: str, then: Callable[[], None], request: object) -> None:
        self.module, self.then, self.request, self.is_delegating = module, then, request, False

    def find_spec(self, name, path=None, target=None):
        if name != self.module or self.is_delegating:
            return None
        self.is_delegating = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_delegating = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self.run, spec.loader.exec_module)
        return spec

    def run(self, exec_module, module: ModuleType) -> None:
        exec_module(module)
        self.cancel()
        self.then()

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
