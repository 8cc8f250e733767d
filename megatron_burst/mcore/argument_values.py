"""What Megatron's parsed arguments, or fields of its configurations, are set to."""

import sys
from argparse import Namespace
from collections.abc import Container

OFF = (False, "none")


def other_value(options: object, name: str, allowed: Container[object] = OFF) -> object | None:
    """An option's value, by name if it is an enum; None if there is none, or it is allowed."""
    value = getattr(options, name, None)
    value = getattr(value, "name", value)
    return None if value is None or value in allowed else value


def global_args() -> Namespace | None:
    """Megatron's parsed command line; None where there is none, or only Megatron-Core."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)  # get_args() fails without a command line
