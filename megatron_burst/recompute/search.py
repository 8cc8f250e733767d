"""A search for where all ways are too many to be tried."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

TRIALS = 30  # at most, for each thing that has several ways
_WIDTH = 5  # beginnings that go on from one thing to the next


def best_ways[Way](
    number: int, ways: Sequence[Way], value: Callable[[tuple[Way, ...]], Any]
) -> tuple[Way, ...]:
    """One of `ways` for each of so many things, with the highest value that the search finds: the
    same wherever values are the same.

    Each thing gets its way in turn, and the best beginnings go on. Then one thing or two at a time
    change theirs, as long as that helps.
    """
    values: dict[tuple[Way, ...], Any] = {}

    def valued(choice: tuple[Way, ...]) -> Any:
        if choice not in values:
            values[choice] = value(choice)
        return values[choice]

    best, before = max(_beginnings(number, ways, valued), key=valued), None
    changes = [places for size in (1, 2) for places in combinations(range(number), size)]
    while best != before:
        before = best
        for places in changes:
            if len(values) + len(ways) ** len(places) < TRIALS * number:
                options = [ways if at in places else best[at : at + 1] for at in range(number)]
                best = max(product(*options), key=valued)
    return best


def _beginnings[Way](
    number: int, ways: Sequence[Way], valued: Callable[[tuple[Way, ...]], Any]
) -> list[tuple[Way, ...]]:
    """The best beginnings, grown to their end; one is worth what it is with the first of `ways` for
    all that follow, or with the second."""
    beginnings: list[tuple[Way, ...]] = [()]
    for after in reversed(range(number)):
        worth = {
            longer: sorted((valued((*longer, *(way,) * after)) for way in ways[:2]), reverse=True)
            for longer in ((*begun, way) for begun in beginnings for way in ways)
        }
        beginnings = sorted(worth, key=worth.__getitem__, reverse=True)[:_WIDTH]
    return beginnings
