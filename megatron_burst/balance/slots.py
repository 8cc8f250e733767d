"""How many micro-batches have each context-parallel size, of which rank, and how long they take.

A slot is one micro-batch of a data-parallel rank: its context-parallel ranks, in sub-groups of one
size. Documents are numbered from the longest on, so those of a size are a range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import ceil

import numpy as np

from megatron_burst.balance.grid import BatchGrid

_PACKED = 0.98  # of the token limit that documents fill
# the longest document of a size, as shares of what it can hold, that are tried
_SHARES = 1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12
_ROUNDS = 3  # for the target and the sizes, which depend on each other
_HALVINGS = 24  # of the range of the step
_WAYS = 6  # numbers of ranks tried for the longest documents


@dataclass(frozen=True)
class SizeClass:
    """The micro-batches of one context-parallel size.

    Attributes:
        cp: the size.
        documents: which ones.
        ranks: data-parallel rank of each slot.
        targets: seconds that the documents of a sub-group should take, by slot.
        alone: the first so many documents begin in the first so many slots, one in each.
    """

    cp: int
    documents: range
    ranks: np.ndarray
    targets: np.ndarray
    alone: int = 0


@dataclass(frozen=True)
class Units:
    """What documents take, the longest first.

    Attributes:
        lengths: tokens.
        seconds: by context-parallel size.
        fixed: seconds of a micro-batch besides.
    """

    lengths: np.ndarray
    seconds: Mapping[int, np.ndarray]
    fixed: float

    def least(self, grid: BatchGrid) -> np.ndarray:
        """Seconds of a whole slot that each document takes at the best size that holds it."""
        of_slot = [
            np.where(self.lengths <= grid.token_limit * cp, each * cp / grid.cp, np.inf)
            for cp, each in self.seconds.items()
        ]
        return np.min(of_slot, axis=0)


def lay_out(units: Units, grid: BatchGrid) -> list[SizeClass] | None:
    """Sizes of micro-batches, the widest first; None if the documents do not suffice.

    In a pipeline all micro-batches are to take as long. Without one only ranks are.
    """
    return (_alike(units, grid) if grid.pp > 1 else None) or _patterned(units, grid)


# ---- without a pipeline: the same sizes on every rank -----------------------------------------


def _patterned(units: Units, grid: BatchGrid) -> list[SizeClass] | None:
    """Each data-parallel rank has as many micro-batches of a size as the others.

    Tries sets of sizes, and lengths at which documents change to the next size.
    """
    narrower = sorted(units.seconds)[:-1]
    sets = [some for n in range(len(narrower) + 1) for some in combinations(narrower, n)]
    sums = {cp: np.concatenate(([0.0], np.cumsum(one))) for cp, one in units.seconds.items()}
    tokens = np.concatenate(([0], np.cumsum(units.lengths)))
    found: list[tuple[float, list[SizeClass]]] = []
    for some, share in product(sets, _SHARES):
        limits = [-share * grid.token_limit * cp for cp in some]
        edges = [len(units.lengths), *np.searchsorted(-units.lengths, limits).tolist(), 0]
        parts = [range(start, stop) for stop, start in pairwise(edges)]
        held = [int(tokens[part.stop] - tokens[part.start]) for part in parts]
        slots = _slots_by_tokens(held, grid)
        sizes = (*some, grid.cp)
        lanes = [grid.dp * grid.cp // cp for cp in sizes]
        enough = (len(p) >= n * b for p, n, b in zip(parts, slots, lanes, strict=True))
        if sum(slots) != grid.micro_batches or not all(enough):
            continue
        step, classes = 0.0, []
        for cp, part, count, every in zip(sizes, parts, slots, lanes, strict=True):
            mean = float(sums[cp][part.stop] - sums[cp][part.start]) / every
            step += max(mean, float(units.seconds[cp][part.start]))
            ranks = np.tile(np.arange(grid.dp), count)
            classes.append(SizeClass(cp, part, ranks, np.full(len(ranks), mean / count)))
        found.append((step, classes[::-1]))
    return min(found, key=lambda one: one[0])[1] if found else None


def _slots_by_tokens(tokens: Sequence[int], grid: BatchGrid) -> list[int]:
    """Micro-batches of a rank for each size, as its documents have tokens; more than there are if
    the tokens do not fit."""
    each = _PACKED * grid.token_limit * grid.cp * grid.dp
    if len(tokens) == 1:
        return [grid.micro_batches]
    slots = [max(1, ceil(some / each)) for some in tokens]
    while sum(slots) < grid.micro_batches:
        slots[int(np.argmax(np.divide(tokens, slots)))] += 1
    return slots


# ---- in a pipeline: micro-batches that take as long as each other ------------------------------


def _alike(units: Units, grid: BatchGrid) -> list[SizeClass] | None:
    """A document is at the narrowest size that holds it and ends in time. Those that do not end in
    time on the whole group are alone in their micro-batches, on few ranks."""
    sizes = sorted(units.seconds)
    target = units.fixed + float(units.least(grid).sum()) / grid.slots
    for _ in range(_ROUNDS):
        starts = [_longer(units, grid, cp, target) for cp in sizes]
        late = int(np.count_nonzero(units.seconds[grid.cp] + units.fixed > target))
        late = min(late, grid.slots - 1)
        work = _work(units, grid, (sizes, starts), late)
        most = grid.token_limit * grid.cp * _PACKED / max(int(units.lengths[late:].sum()), 1)
        alone = units.seconds[grid.cp][:late] + units.fixed
        ranks, left = _place(alone, work, units.fixed + most * work, units, grid)
        target = float(left.max(initial=units.fixed))
    return _classes(units, grid, list(zip(sizes, starts, strict=True)), ranks, left)


def _longer(units: Units, grid: BatchGrid, cp: int, target: float) -> int:
    """How many documents, the longest, need a larger size."""
    if cp == grid.cp:
        return 0
    late = units.seconds[cp] + units.fixed > target
    return int(np.count_nonzero(late | (units.lengths > grid.token_limit * cp)))


def _work(
    units: Units, grid: BatchGrid, sizes: tuple[Sequence[int], Sequence[int]], late: int
) -> float:
    """Slot seconds of the documents that are not alone."""
    ends = [len(units.lengths), *sizes[1][:-1]]
    parts = (
        units.seconds[cp][max(start, late) : end].sum() * cp / grid.cp
        for cp, start, end in zip(*sizes, ends, strict=True)
    )
    return float(sum(parts))


def _place(
    alone: np.ndarray, work: float, most: float, units: Units, grid: BatchGrid
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of micro-batches of one document, and by rank the seconds of its others.

    A rank waits PP - 1 times for its longest micro-batch, so such documents are better together on
    few ranks, unless the others, of `most` seconds at most, then cannot hold the rest.
    """
    if not len(alone):
        return np.zeros(0, dtype=int), np.full(grid.dp, work / grid.slots + units.fixed)
    least, many = ceil(len(alone) / grid.micro_batches), min(len(alone), grid.dp)
    ways = sorted({round(n) for n in np.geomspace(least, many, _WAYS)})
    spread = [_spread(alone, way, grid) for way in ways]
    found = [_even(alone, ranks, (work, most), units.fixed, grid) for ranks in spread]
    best = min(range(len(ways)), key=lambda at: found[at][0])
    return spread[best], found[best][1]


def _spread(alone: np.ndarray, count: int, grid: BatchGrid) -> np.ndarray:
    """Ranks of documents that go to `count` ranks, each to the one with the least so far."""
    loads, slots = np.zeros(count), np.zeros(count, dtype=int)
    ranks = np.zeros(len(alone), dtype=int)
    for at, seconds in enumerate(alone.tolist()):
        rank = ranks[at] = int(np.where(slots < grid.micro_batches, loads, np.inf).argmin())
        loads[rank] += seconds
        slots[rank] += 1
    return ranks


def _even(
    alone: np.ndarray, ranks: np.ndarray, rest: tuple[float, float], fixed: float, grid: BatchGrid
) -> tuple[float, np.ndarray]:
    """The step in which the rest of the work can be done, and by rank the seconds of its other
    slots; the least such step, found by halving."""
    work, most = rest
    longest = np.zeros(grid.dp)
    np.maximum.at(longest, ranks, alone)
    taken = np.bincount(ranks, alone, grid.dp) + (grid.pp - 1) * longest
    free = grid.micro_batches - np.bincount(ranks, minlength=grid.dp)
    goal = work + fixed * float(free.sum())
    if most * float(free.sum()) < goal:
        most = np.inf
    # a rank without such a document waits PP - 1 times for its other slots, which are all alike
    waits = np.maximum(free + np.where(longest > 0, 0, grid.pp - 1), 1)

    def each(step: float) -> np.ndarray:
        return np.clip((step - taken) / waits, fixed, most) * (free > 0)

    low, high = 0.0, float(taken.max()) + goal * (1 + grid.pp)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = float((each(middle) * free).sum()) >= goal
        low, high = (low, middle) if enough else (middle, high)
    return max(high, float((taken + fixed * free).max())), each(high)


def _classes(
    units: Units,
    grid: BatchGrid,
    starts: Sequence[tuple[int, int]],
    ranks: np.ndarray,
    left: np.ndarray,
) -> list[SizeClass] | None:
    """Slots for each size, the widest first; they are filled up with the next longest documents."""
    free = grid.micro_batches - np.bincount(ranks, minlength=grid.dp)
    order = [r for m in range(grid.micro_batches) for r in np.flatnonzero(free > m).tolist()]
    others = np.array(order, dtype=int)
    targets = np.maximum(left[others] - units.fixed, 0.0)
    upto = np.concatenate(([0.0], np.cumsum(targets)))
    tokens = np.concatenate(([0], np.cumsum(units.lengths)))
    every, slot, first, found = len(units.lengths), 0, 0, []
    for at in reversed(range(len(starts))):
        cp, alone = starts[at][0], len(ranks) if starts[at][0] == grid.cp else 0
        stop, end = max(alone, starts[at - 1][1]) if at else every, len(others)
        if stop <= first:
            continue
        if at:
            work = units.seconds[cp] * cp / grid.cp
            need = upto[slot] + float(work[first + alone : stop].sum())
            rest = ceil((tokens[every] - tokens[stop]) / (_PACKED * grid.token_limit * grid.cp))
            end = min(int(np.searchsorted(upto, need * (1 - 1e-9))), len(others) - rest)
            end = max(end, slot)
            room = max(upto[end] - need, 0.0)
            stop += int(np.searchsorted(np.cumsum(work[stop:]), room, "right"))
        if not 0 < (alone + end - slot) * (grid.cp // cp) <= stop - first:
            return None
        found.append(SizeClass(
            cp, range(first, stop), np.concatenate((ranks[:alone], others[slot:end])),
            np.concatenate((units.seconds[cp][:alone], targets[slot:end])), alone,
        ))  # fmt: skip
        first, slot = stop, end
    return found if first == every and slot == len(others) else None
