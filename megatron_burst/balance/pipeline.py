"""A layout in a pipeline: micro-batches that take as long as each other.

A document is at the narrowest size that holds it and ends in time. Those that do not end in time
on the whole group are alone in their micro-batches, on few ranks.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import ceil

import numpy as np

from megatron_burst.balance.grid import BatchGrid
from megatron_burst.balance.slots import PACKED, SizeClass, SlotLayout, Units

_ROUNDS = 3  # for the target and the sizes, which depend on each other
_HALVINGS = 14  # of the range of the step
_WAYS = 6  # numbers of ranks tried for the longest documents
_OVER = 0.02  # of its target, that a wide micro-batch may take longer


def alike(units: Units, grid: BatchGrid) -> SlotLayout | None:
    """A layout; None if the documents do not suffice."""
    sizes = sorted(units.seconds)
    target = units.fixed + float(units.least(grid).sum()) / grid.slots
    for _ in range(_ROUNDS):
        starts = [_longer(units, grid, cp, target) for cp in sizes]
        late = int(np.count_nonzero(units.seconds[grid.cp] + units.fixed > target))
        late = min(late, grid.slots - 1)
        ends = [len(units.lengths), *starts[:-1]]  # of documents that are not alone: slot seconds
        work = float(sum(units.seconds[cp][max(start, late) : end].sum() * cp / grid.cp
                         for cp, start, end in zip(sizes, starts, ends, strict=True)))  # fmt: skip
        most = grid.token_limit * grid.cp * PACKED / max(int(units.lengths[late:].sum()), 1)
        alone = units.seconds[grid.cp][:late] + units.fixed
        ranks, other_s = _place(alone, work, units.fixed + most * work, units, grid)
        target = float(other_s.max(initial=units.fixed))
    classes = _classes(units, grid, list(zip(sizes, starts, strict=True)), ranks, other_s)
    return SlotLayout(classes, _expected(classes, units, grid)) if classes else None


def _longer(units: Units, grid: BatchGrid, cp: int, target: float) -> int:
    """How many documents, the longest, need a larger size."""
    if cp == grid.cp:
        return 0
    late = np.count_nonzero(units.seconds[cp] + units.fixed > target)
    return max(int(late), int(np.count_nonzero(units.lengths > grid.token_limit * cp)))


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
    ways = {round(least * (many / least) ** (n / (_WAYS - 1))) for n in range(_WAYS)}
    spread = np.stack([_spread(alone, way, grid) for way in sorted(ways)])
    steps, other_s = _even(alone, spread, (work, most), units.fixed, grid)
    best = int(steps.argmin())
    return spread[best], other_s[best]


def _spread(alone: np.ndarray, count: int, grid: BatchGrid) -> np.ndarray:
    """Ranks of documents that go to `count` ranks, each to the one with the least so far."""
    loads = [(0.0, rank) for rank in range(count)]
    slots, ranks = [grid.micro_batches] * count, []
    for seconds in alone.tolist():
        load, rank = loads[0]
        ranks.append(rank)
        slots[rank] -= 1
        if slots[rank]:
            heapreplace(loads, (load + seconds, rank))
        else:
            heappop(loads)
    return np.array(ranks)


def _even(alone: np.ndarray, ranks: np.ndarray, work_of: tuple[float, float], fixed: float,
          grid: BatchGrid) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """By way to place documents: the step in which the rest of the work can be done, and by rank
    the seconds of its other slots; the least such steps, found by halving.

    Args:
        alone: seconds of the documents that are placed.
        ranks: of each, by way.
        work_of: seconds of slots that the others take, and the most that one slot can.
        fixed: seconds of a micro-batch besides.
        grid: ranks and slots.
    """
    work, most = work_of
    ways = np.arange(len(ranks))[:, None]
    longest, busy_s = np.zeros((2, len(ranks), grid.dp))
    free = np.full((len(ranks), grid.dp), grid.micro_batches)
    np.maximum.at(longest, (ways, ranks), alone)
    np.add.at(busy_s, (ways, ranks), alone)
    np.subtract.at(free, (ways, ranks), 1)
    busy_s += (grid.pp - 1) * longest
    slots = grid.slots - len(alone)
    goal = work + fixed * slots
    if most * slots < goal:
        most = np.inf
    # a rank without such a document waits PP - 1 times for its other slots, which are all alike
    waits = np.maximum(free + np.where(longest > 0, 0, grid.pp - 1), 1)

    def seconds_of_slots(steps: np.ndarray) -> np.ndarray:
        seconds = (steps[:, None] - busy_s) / waits
        return np.minimum(np.maximum(seconds, fixed), most) * (free > 0)

    # between the steps in which any, and in which every rank's slots take as long as the mean slot
    mean = busy_s + waits * (goal / slots)
    low = np.where(free > 0, mean, np.inf).min(axis=1)
    high = np.where(free > 0, mean, -np.inf).max(axis=1)
    for _ in range(_HALVINGS if (low < high).any() else 0):
        middle = (low + high) / 2
        enough = (seconds_of_slots(middle) * free).sum(axis=1) >= goal
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.maximum(high, (busy_s + fixed * free).max(axis=1)), seconds_of_slots(high)


def _classes(units: Units, grid: BatchGrid, starts: Sequence[tuple[int, int]], ranks: np.ndarray,
             seconds: np.ndarray) -> list[SizeClass] | None:  # fmt: skip
    """Slots for each size, the widest first; the narrowest size has the rest.

    Args:
        units: the documents.
        grid: ranks and slots.
        starts: by size, the narrowest first: the size, and its longest document.
        ranks: of the documents that are alone.
        seconds: by rank, of each of its other slots.
    """
    other_slots = _other_slots(ranks, seconds, grid)
    targets = np.maximum(seconds[other_slots] - units.fixed, 0.0)
    tokens = np.cumsum(units.lengths[::-1])[::-1]  # from each document on
    total, slot, first, classes = len(units.lengths), 0, 0, []
    for at in reversed(range(len(starts))):
        cp, alone = starts[at][0], len(ranks) if starts[at][0] == grid.cp else 0
        stop, count = max(alone, starts[at - 1][1]) if at else total, len(other_slots) - slot
        if stop <= first:
            continue
        if at:  # leave slots for the tokens of narrower sizes
            narrower = tokens[stop] if stop < total else 0
            reserved = ceil(narrower / (PACKED * grid.token_limit * grid.cp))
            own, usable = units.seconds[cp][first + alone : stop], slot + max(0, count - reserved)
            enough = _slots_for(own, targets[slot:usable], grid.cp // cp)
            if enough is None:
                return None
            count = enough
        if not 0 < (alone + count) * (grid.cp // cp) <= total - first:
            return None
        own_slots, documents = slice(slot, slot + count), range(first, stop)
        of_alone, cost = ranks[:alone], units.seconds[cp][:alone]
        classes.append(SizeClass(cp, documents, np.concatenate((of_alone, other_slots[own_slots])),
                                 np.concatenate((cost, targets[own_slots])), alone))  # fmt: skip
        first, slot = stop, slot + count
    return classes if first == total and slot == len(other_slots) else None


def _other_slots(ranks: np.ndarray, seconds: np.ndarray, grid: BatchGrid) -> np.ndarray:
    """Rank of each slot without a document that is alone, the longest slots first."""
    free = grid.micro_batches - np.bincount(ranks, minlength=grid.dp)
    order = [r for m in range(grid.micro_batches) for r in np.flatnonzero(free > m).tolist()]
    slot_ranks = np.array(order, dtype=int)
    return slot_ranks[np.argsort(-seconds[slot_ranks], kind="stable")]


def _slots_for(seconds: np.ndarray, targets: np.ndarray, groups: int) -> int | None:
    """How many slots of so many sub-groups documents need, which end by the slots' targets; short
    documents fill them up later. None if there are too few."""
    lacks: list[float] = []  # of sub-groups, negative: what is lacking
    count = 0
    for cost in seconds.tolist():
        if not lacks or -lacks[0] < cost:
            if count == len(targets):
                return None
            for _ in range(groups):
                heappush(lacks, -float(targets[count]) * (1 + _OVER))
            count += 1
        heapreplace(lacks, lacks[0] + cost)
    return count


def _expected(classes: Sequence[SizeClass], units: Units, grid: BatchGrid) -> float:
    """Seconds of a step whose micro-batches take as long as they are to."""
    total, longest = np.zeros((2, grid.dp))
    for size in classes:
        seconds = size.targets + units.fixed
        np.add.at(total, size.ranks, seconds)
        np.maximum.at(longest, size.ranks, seconds)
    return float((total + (grid.pp - 1) * longest).max())
