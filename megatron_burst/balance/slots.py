"""How many micro-batches have each context-parallel size, of which rank, and how long they take.

A slot is one micro-batch of a data-parallel rank: its context-parallel ranks, in sub-groups of one
size. Documents are numbered from the longest on, so those of a size are a range.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import ceil

import numpy as np

from megatron_burst.balance.grid import BatchGrid

PACKED = 0.98  # of the token limit that documents fill
# the longest document of a size, as shares of what it can hold, that are tried
_SHARES = 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12


@dataclass(frozen=True)
class SizeClass:
    """The micro-batches of one context-parallel size."""

    cp: int  # the size
    documents: range  # which ones
    ranks: np.ndarray  # data-parallel rank of each slot
    targets: np.ndarray  # seconds that the documents of a sub-group should take, by slot
    alone: int = 0  # the first so many documents begin in the first so many slots, one in each


@dataclass(frozen=True)
class SlotLayout:
    """The micro-batches of a step."""

    classes: list[SizeClass]  # by size, the widest first
    expected: float  # seconds of the step, if all take as long as they are to


@dataclass(frozen=True)
class Units:
    """What documents take, the longest first."""

    lengths: np.ndarray  # tokens
    seconds: Mapping[int, np.ndarray]  # by context-parallel size
    fixed: float  # seconds of a micro-batch besides

    def least(self, grid: BatchGrid) -> np.ndarray:
        """Seconds of a whole slot that each document takes at the best size that holds it."""
        return np.min([np.where(self.lengths <= grid.token_limit * cp, x * cp / grid.cp, np.inf)
                       for cp, x in self.seconds.items()], axis=0)  # fmt: skip


def patterned(units: Units, grid: BatchGrid) -> SlotLayout | None:
    """Each data-parallel rank has as many micro-batches of a size as the others.

    Tries sets of sizes, and lengths at which documents change to the next size.
    """
    sums = {cp: np.concatenate(([0.0], np.cumsum(x))) for cp, x in units.seconds.items()}

    def mean(cp: int, part: range) -> float:
        return float(sums[cp][part.stop] - sums[cp][part.start]) * cp / grid.cp / grid.dp

    def step(pattern: list[tuple[int, range, int]]) -> float:
        return sum(max(mean(cp, p), float(units.seconds[cp][p.start])) for cp, p, _ in pattern)

    best = min(_patterns(units, grid), key=step, default=[])
    classes = []
    for cp, part, count in reversed(best):
        ranks = np.tile(np.arange(grid.dp), count)
        classes.append(SizeClass(cp, part, ranks, np.full(len(ranks), mean(cp, part) / count)))
    return SlotLayout(classes, step(best)) if best else None


def _patterns(units: Units, grid: BatchGrid) -> Iterator[list[tuple[int, range, int]]]:
    """Size, documents, and micro-batches of a rank, the narrowest size first."""
    narrower = sorted(units.seconds)[:-1]
    sets = [sizes for n in range(len(narrower) + 1) for sizes in combinations(narrower, n)]
    tokens, shorter = np.concatenate(([0], np.cumsum(units.lengths))).tolist(), -units.lengths
    edge_of = {
        (cp, share): int(np.searchsorted(shorter, -share * grid.token_limit * cp))
        for cp, share in product(narrower, _SHARES)
    }
    for sizes, share in product(sets, _SHARES if narrower else _SHARES[:1]):
        edges = [len(units.lengths), *(edge_of[cp, share] for cp in sizes), 0]
        parts = [range(start, stop) for stop, start in pairwise(edges)]
        slots = _slots_by_tokens([tokens[p.stop] - tokens[p.start] for p in parts], grid)
        pattern = list(zip((*sizes, grid.cp), parts, slots, strict=True))
        enough = (len(part) >= count * grid.dp * grid.cp // cp for cp, part, count in pattern)
        if sum(slots) == grid.micro_batches and all(enough):
            yield pattern


def _slots_by_tokens(tokens: Sequence[int], grid: BatchGrid) -> list[int]:
    """Micro-batches of a rank for each size, as its documents have tokens; more than there are if
    the tokens do not fit."""
    room = PACKED * grid.token_limit * grid.cp * grid.dp
    if len(tokens) == 1:
        return [grid.micro_batches]
    slots = [max(1, ceil(of_size / room)) for of_size in tokens]
    while sum(slots) < grid.micro_batches:
        most = max(range(len(slots)), key=lambda size: tokens[size] / slots[size])
        slots[most] += 1
    return slots
