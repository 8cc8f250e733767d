"""Functions of other packages that change between releases: used only if their signature is known.

A call passes some arguments by name. A function is understood if it has those, and if for every
other argument we know a value that switches it off. A new option without a default, or a missing
argument, is a reason not to call it.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

UNKNOWN = "its release is unknown"


def load(module: str) -> Any:
    """A module, or a text saying why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages built for another torch fail in many ways
        reason = str(error).partition("\n")[0]
        return f"it cannot be imported ({reason or type(error).__name__})"


def understand_all(
    owner: Any, given: Mapping[str, Collection[str]], off: Mapping[str, Any]
) -> tuple[Callable[..., Any], ...] | str:
    """The functions named in `given`, from `understand`, or why one is not understood."""
    found = tuple(understand(owner, name, names, off) for name, names in given.items())
    refused = [x for x in found if isinstance(x, str)]
    return f"{UNKNOWN}: {refused[0]}" if refused else found


def understand(
    owner: Any, name: str, given: Collection[str], off: Mapping[str, Any]
) -> Callable[..., Any] | str:
    """A function that takes `given` by name with all else switched off, or why there is none.

    Args:
        owner: the module that should have it.
        name: the function's.
        given: arguments that every call passes.
        off: values, by name, that switch other arguments off; names that it lacks are left out.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        return f"it has no {name}"
    parameters = parameters_of(function)
    if parameters is None:
        return f"{name} has no readable signature"
    lacking = [x for x in given if x not in parameters]
    if lacking:
        return f"{name} does not take {', '.join(lacking)}"
    unknown = [
        x for x, p in parameters.items() if x not in given and x not in off and p.default is p.empty
    ]
    if unknown:
        return f"{name} requires {', '.join(unknown)}"
    return partial(function, **{x: value for x, value in off.items() if x in parameters})


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """A function's named parameters, or None if unknown; looks into torch's custom ops."""
    try:
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return None
    return parameters
