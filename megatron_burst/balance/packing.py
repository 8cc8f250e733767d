"""How packed datasets fill micro-batches of equal tokens: what balanced ones are compared with."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

# documents of each micro-batch, in the order of the micro-batches
Packs = list[list[int]]


def starts_in_order(lengths: np.ndarray, limit: int, most: int | None = None) -> list[int]:
    """First document of each micro-batch, if each takes documents as they come until the next does
    not fit into `limit` tokens; of `most` micro-batches and the one after them, if given. A
    document that is longer than the limit is alone."""
    ends = np.cumsum(lengths)
    starts: list[int] = []
    start = before = 0
    while start < len(lengths) and (most is None or len(starts) <= most):
        starts.append(start)
        start = max(start + 1, int(np.searchsorted(ends, before + limit, "right")))
        before = int(ends[start - 1])
    return starts


def sequential(lengths: Sequence[int] | np.ndarray, limit: int) -> Packs:
    """Documents as they come, until the next one does not fit."""
    edges = [*starts_in_order(np.asarray(lengths), limit), len(lengths)]
    return [list(range(start, stop)) for start, stop in pairwise(edges)]


def best_fit(lengths: Sequence[int] | np.ndarray, limit: int, seed: int) -> Packs:
    """Best-fit decreasing (Ding et al., 2404.10830): the longest first, each where it leaves the
    least room. The packs are shuffled, as packed datasets are."""
    packs: Packs = []
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    tokens = np.asarray(lengths).tolist()
    for document in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        at = bisect_left(rooms, (tokens[document], -1))
        if at == len(rooms):
            rooms.append((limit, len(packs)))
            packs.append([])
        room, pack = rooms.pop(at)
        packs[pack].append(document)
        insort(rooms, (room - tokens[document], pack))
    np.random.default_rng(seed).shuffle(packs)
    return packs
