"""What `make test` leaves to `make test-all`; see also the fixture `draw`."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings


def whole(*cases: Any) -> Iterator[Any]:
    """Cases of `parametrize` that run with --all only."""
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        yield pytest.param(*values, marks=pytest.mark.whole)


def examples(few: int, most: int) -> settings:
    """How many examples Hypothesis tries: `most` with --all."""
    every = settings.get_current_profile_name() == "every"
    return settings(max_examples=most if every else few)
