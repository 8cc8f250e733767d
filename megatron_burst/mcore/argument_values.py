"""What Megatron's parsed arguments are set to."""

from argparse import Namespace
from collections.abc import Container

OFF = (False, "none")


def other_value(args: Namespace, name: str, allowed: Container[object] = OFF) -> object | None:
    """An argument's value, by name if it is an enum; None if it is not given, or allowed."""
    value = getattr(args, name, None)
    value = getattr(value, "name", value)
    return None if value is None or value in allowed else value
