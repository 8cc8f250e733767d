"""Options of burst attention by name, as tables of cases have them."""

from dataclasses import fields
from typing import Any

from megatron_burst.config import BurstConfig, Force

_FORCED = [field.name for field in fields(Force)]


def burst_config(**options: Any) -> BurstConfig:
    """A configuration in which fields of `Force` are named beside the others."""
    force = Force(**{name: options.pop(name) for name in _FORCED if name in options})
    return BurstConfig(**options, force=force)
