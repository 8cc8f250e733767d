"""What slices must be, and how much work they are, without a loop over pairs of slices."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from megatron_burst.errors import Need, require
from megatron_burst.kernels.masks.parts import listed
from megatron_burst.masks.sample import holds_whole, kind_of
from megatron_burst.schedule.layout import Layout, positions
from megatron_burst.slices import CAUSAL, INVERSE


def need_of_tensor(slices: object) -> Iterator[Need]:
    """Checks before anything is read."""
    shaped = holds_whole(slices) and slices.dim() == 2 and slices.shape[1] == 5
    yield (shaped and len(slices) > 0, "slices must be a tensor of int32 or int64 [slices, 5] with "
           "at least one row: where queries begin and end, where keys begin and end, and the kind",
           kind_of(slices), "pass such a tensor")  # fmt: skip
    yield (slices.device.type == "cpu", "slices must be on the CPU, because they decide what "
           "kernels are given", slices.device, "pass slices.cpu(), once per sample")  # fmt: skip


def need_of_pairs(
    slices: np.ndarray, sizes: tuple[int, int], causal: bool, cp_size: int
) -> Iterator[Need]:
    """Checks of slices; `sizes`: queries and keys of the sample."""
    q_start, q_stop, k_start, k_stop, kind = slices.T
    queries, keys = sizes
    inside = (q_start >= 0) & (q_start < q_stop) & (q_stop <= queries)
    inside &= (k_start >= 0) & (k_start < k_stop) & (k_stop <= keys)
    yield (inside.all(), f"slices must be within the {queries} queries and {keys} keys of the "
           "sample (of all ranks together), and none may be empty, because the sample has no other "
           "positions", _first(slices, ~inside), "pass positions in the whole sample")  # fmt: skip
    legal = (kind >= 0) & (kind <= 3)
    yield (legal.all(), "the kind of a slice must be 0 (full), 1 (causal), 2 (inverse causal) or 3 "
           "(both)", _first(slices, ~legal), "pass one of these kinds")  # fmt: skip
    ahead = _ahead(slices)
    yield (not (causal and ahead.any()),
           "with causal=True no slice may have a key at a later position than its query, "
           "because hops with such keys are left out", _first(slices, ahead),
           "pass causal=False")  # fmt: skip
    twice = counted_twice(slices)
    yield (twice is None,
           "slices must not overlap, because each pair of a query and a key counts once",
           "" if twice is None else " and ".join(map(str, twice)), "cut one of them")  # fmt: skip
    blind = sees_nothing(slices)
    yield (blind is None, "every query before the end of the last slice must see a key, because "
           "attention to no keys is undefined", f"query {blind}", "add a slice for it")  # fmt: skip
    end = int(q_stop.max())
    yield (cp_size == 1 or end * cp_size != queries, "slices must be those of the whole sample, "
           "because all ranks pass the same slices and later queries attend to nothing",
           f"an end at {end}, the number of queries on one of {cp_size} ranks",
           "pass the slices of the whole sample; if its other rows are padding, add a slice with "
           "these rows and one key")  # fmt: skip


def work_of_ranks(slices: Tensor, cp_size: int, layout: Layout, tokens: int) -> list[int]:
    """(query, key) pairs that each rank computes where its own rows are computed, as in rings and
    gathers; an all-to-all gives all ranks the same.

    Args:
        slices: valid ones, on the CPU.
        cp_size: ranks.
        layout: zigzag or contiguous.
        tokens: of the sample.
    """
    q_start, q_stop, k_start, k_stop, kind = slices.numpy().astype(np.int64).T
    # the pairs of a row are the sum of a constant and of a slope, from where a slice begins
    begin, end = _rows_where_before(slices.numpy(), slices.numpy(), q_start, q_stop)
    slope = (kind & CAUSAL > 0).astype(np.int64) - (kind & INVERSE > 0)
    first = k_stop - k_start - np.where(kind & CAUSAL, q_stop - 1, 0)
    first += np.where(kind & INVERSE, q_start, 0)
    steps, nonempty = np.zeros((2, tokens + 1), dtype=np.int64), begin < end
    for row, sign in ((begin, 1), (end, -1)):
        np.add.at(steps[0], row[nonempty], sign * first[nonempty])
        np.add.at(steps[1], row[nonempty], sign * slope[nonempty])
    constants, slopes = steps.cumsum(1)[:, :-1]
    pairs = np.concatenate(([0], (constants + slopes * np.arange(tokens)).cumsum()))
    shards = (positions(layout, rank, cp_size, tokens // cp_size) for rank in range(cp_size))
    return [sum(int(pairs[span.stop] - pairs[span.start]) for span in spans) for spans in shards]


def sees_later(slices: Tensor) -> bool:
    """Whether a query of some slice sees a later key.

    Raises:
        BurstError: if they are not slices.
    """
    require("burst attention", need_of_tensor(slices))
    return bool(_ahead(slices.numpy()).any())


def _ahead(slices: np.ndarray) -> np.ndarray:
    """Whether a query of each slice sees a later key."""
    q_start, q_stop, _, k_stop, kind = slices.T
    return np.where(kind & CAUSAL, k_stop > q_stop, k_stop - 1 > q_start)


def _first(slices: np.ndarray, wrong: np.ndarray) -> str:
    return f"{slices[wrong][0].tolist()}" if wrong.any() else ""


def counted_twice(slices: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Two slices that share a pair, if any."""
    first, second = _overlapping(slices)
    a, b = slices[first], slices[second]
    begin, end = np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])
    for x, y in ((a, b), (b, a), (a, a), (b, b)):  # rows where x begins before y ends
        begin, end = _rows_where_before(x, y, begin, end)
    shared = np.flatnonzero(begin < end)
    return (a[shared[0]].tolist(), b[shared[0]].tolist()) if len(shared) else None


def _overlapping(slices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of slices that have queries in common and keys in common: indices of both. Searched
    along the axis on which fewer overlap."""
    axes = []
    for start, stop in slices[:, :2].T, slices[:, 2:4].T:
        order = np.argsort(start, kind="stable")
        # those that begin before a slice ends; slices are compared with later ones only
        until = np.searchsorted(start[order], stop[order], side="left")
        axes.append((order, np.maximum(until - np.arange(len(order)) - 1, 0)))
    order, counts = min(axes, key=lambda axis: axis[1].sum())
    first, second = (order[index] for index in listed(np.arange(len(order)) + 1, counts))
    overlap = np.ones(len(first), dtype=bool)
    for start, stop in slices[:, :2].T, slices[:, 2:4].T:
        overlap &= (start[first] < stop[second]) & (start[second] < stop[first])
    return first[overlap], second[overlap]


def _rows_where_before(
    x: np.ndarray, y: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [begin, end) cut to those where x's first key is before y's last one."""
    slope = (x[:, 4] & INVERSE > 0).astype(np.int64) - (y[:, 4] & CAUSAL > 0)
    first = x[:, 2] - np.where(x[:, 4] & INVERSE, x[:, 0], 0)
    last = y[:, 3] - np.where(y[:, 4] & CAUSAL, y[:, 1] - 1, 0)
    room = last - first  # first + slope * row < last
    begin = np.where(slope < 0, np.maximum(begin, 1 - room), begin)
    end = np.where(slope > 0, np.minimum(end, room), end)
    return begin, np.where((slope == 0) & (room <= 0), begin, end)


def sees_nothing(slices: np.ndarray) -> int | None:
    """The first query that sees no key, before the last that sees one; None if all do."""
    begin, end = _rows_where_before(slices, slices, slices[:, 0], slices[:, 1])
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    begin, end = begin[begin < end], end[begin < end]
    covered = np.concatenate(([0], np.maximum.accumulate(end)[:-1])) if len(end) else end
    gaps = np.flatnonzero(begin > covered)
    return int(covered[gaps[0]]) if len(gaps) else None if len(end) else 0
