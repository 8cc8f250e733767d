"""Options of burst attention by name, as tables of cases have them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

from megatron_burst.config import BurstConfig, Force
from megatron_burst.logs import Decision
from megatron_burst.resolve import CHOICES

_FORCED = [field.name for field in fields(Force)]


def burst_config(**options: Any) -> BurstConfig:
    """A configuration in which fields of `Force` are named beside the others."""
    force = Force(**{name: options.pop(name) for name in _FORCED if name in options})
    return BurstConfig(**options, force=force)


@contextmanager
def backward_as_a2a(heads: int = 1) -> Iterator[None]:
    """New calls that gather in forward run backward as an all-to-all, so many KV heads of a rank at
    a time, as `auto` does it for samples that are too long for tests."""
    choices = dict(CHOICES)
    choices["a2a_backward_heads"] = lambda spec, _: Decision(heads * (spec.intra == "gather"))
    with patch("megatron_burst.resolve.CHOICES", tuple(choices.items())):
        yield
