"""What a mask function of transformers or torchtitan consists of."""

from collections.abc import Callable


def parts_of(function: Callable) -> set[str]:
    """The names of functions that a mask function is made of, so that others can be refused."""
    if not hasattr(function, "__closure__"):
        return {type(function).__name__}
    names = {function.__qualname__.partition(".")[0]}
    for cell in function.__closure__ or ():
        inside = cell.cell_contents
        for part in inside if isinstance(inside, tuple) else (inside,):
            names |= parts_of(part) if callable(part) else set()
    return names
