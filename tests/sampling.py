"""What `make test` leaves to `make test-all`; see also the fixture `draw`."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings


def whole(*cases: Any) -> Iterator[Any]:
    """Cases of `parametrize` that run with --all only."""
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        yield pytest.param(*values, marks=pytest.mark.whole)


def crossed(cases: Iterable[Any], places: Sequence[tuple], few: int) -> list[Any]:
    """Each case in each place, for `parametrize`: with --all; else in `few` places by turns, so
    that every place has some of the cases."""
    found = []
    for turn, case in enumerate(cases):
        mine = {(turn * few + step) % len(places) for step in range(few)}
        for at, place in enumerate(places):
            marks = () if at in mine else pytest.mark.whole
            found.append(pytest.param(case, *place, marks=marks))
    return found


def seeds(cases: int, few: int, most: int) -> list[Any]:
    """Seeds of tests that draw so many cases each: `most` with --all, or as many as the environment
    variable MASKS asks for, a number of cases (e.g. 3000)."""
    if "MASKS" in os.environ:
        return list(range(int(os.environ["MASKS"]) // cases))
    return [*range(few), *whole(*range(few, most))]


def examples(few: int, most: int) -> settings:
    """How many examples Hypothesis tries: `most` with --all."""
    every = settings.get_current_profile_name() == "every"
    return settings(max_examples=most if every else few)
