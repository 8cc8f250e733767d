"""A search for where all ways are too many to be tried."""

from collections.abc import Callable, Sequence
from itertools import chain, combinations, product
from typing import Any

TRIALS = 30  # at most, for each thing that has several ways
_WIDTH = 5  # beginnings that go on from one thing to the next


def best_ways[Way](
    number: int, ways: Sequence[Way], value: Callable[[tuple[Way, ...]], Any]
) -> tuple[Way, ...]:
    """One of `ways` for each of so many things, with the highest value that the search finds: the
    same wherever values are the same.

    All are tried if they are few. Else from one way for all, things change theirs one at a time, as
    long as that helps; then each gets its way in turn, and the best beginnings go on; then the best
    of all changes one thing or two at a time.
    """
    values: dict[tuple[Way, ...], Any] = {}
    most = TRIALS * number - 1  # the caller makes the best one again

    def valued(choice: tuple[Way, ...]) -> Any:
        if choice not in values:
            values[choice] = value(choice)
        return values[choice]

    def climbed(best: tuple[Way, ...], sizes: Sequence[int]) -> tuple[Way, ...]:
        before = None
        while best != before:
            before = best
            for changed in chain.from_iterable(combinations(range(number), n) for n in sizes):
                if len(values) + len(ways) ** len(changed) <= most:
                    options = [ways if at in changed else best[at : at + 1] for at in range(number)]
                    best = max(product(*options), key=valued)
        return best

    if len(ways) ** number <= most or not number:
        return max(product(ways, repeat=number), key=value)
    for way in ways:
        climbed((way,) * number, (1,))
    beginnings: list[tuple[Way, ...]] = [()]
    for after in reversed(range(number)):  # worth what they are with the first or the second way
        worth = {
            longer: sorted((valued((*longer, *(way,) * after)) for way in ways[:2]), reverse=True)
            for longer in ((*begun, way) for begun in beginnings for way in ways)
            if len(values) + 2 <= most
        }
        beginnings = sorted(worth, key=worth.__getitem__, reverse=True)[:_WIDTH]
    return climbed(max(values, key=valued), (1, 2))
