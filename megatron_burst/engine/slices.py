"""Masks of slices: which keys each query sees, given at run time as parts of the score matrix.

A slice is queries [q_start, q_stop), keys [k_start, k_stop) and a kind, as in MagiAttention
(arXiv 2505.13211): full; causal, in which the last query is level with the last key; inverse
causal, in which the first query is level with the first key and sees all keys from there on; or
both. So each query sees an interval of a slice's keys.
"""

from collections.abc import Iterator
from functools import cached_property
from heapq import heapreplace

import numpy as np
import torch
from torch import Tensor

from megatron_burst.comm.alone import is_first
from megatron_burst.comm.carrier import Where
from megatron_burst.comm.group import Group
from megatron_burst.engine.documents import Documents, documents_of, doubt_end, told_briefly
from megatron_burst.engine.sample import Sample, holds_whole, identity, kind_of
from megatron_burst.engine.slice_calls import CAUSAL, INVERSE, Calls, calls_of
from megatron_burst.errors import Need, require
from megatron_burst.kernels.backends import Backend
from megatron_burst.kernels.visible import Intervals, Visible
from megatron_burst.say import say, say_once
from megatron_burst.schedule.layout import Layout, Numbers, Runs, positions
from megatron_burst.schedule.mask import SLICES, Band, Places, in_rows

_WHO, _MANY = "burst attention", 64


def slices_of(
    group: Group, sample: Sample, causal: bool, sizes: tuple[int, int], layout: str, like: Tensor
) -> "Slices":
    """The slices of a sample, built once for all layers, which pass the same ones; arguments and
    errors as of `Slices`, and of `documents_of`. Tells the user how even the first sample is."""
    cache = group.samples
    key = identity(sample.slices), causal, sizes, like.shape[0], layout, Where.of(like)
    documents = None
    if layout == Layout.DOCUMENTS:
        documents = documents_of(cache, sample._replace(slices=None), sizes, layout, like)
        key = *key, id(documents)
    found = cache.recent(key)
    if found is None:
        found = cache[key] = Slices(
            sample, causal, (*sizes, like.shape[0]), Layout(layout), like.device, documents
        )
        if "slices" not in group.said and is_first():
            say(f"{_WHO}: slices of the first sample: {found.balance}")
        group.said["slices"] = None
    return found


class Slices:
    """The slices of one sample, and the intervals of every kernel call, once per sample. Nothing
    here waits for the device.

    Args:
        sample: from the caller.
        causal: whether the caller says that no query sees a later key.
        sizes: tokens on a rank, ranks, and sequences of the batch.
        layout: how tokens are sharded.
        device: where kernels run.
        documents: says where rows are, in the layout of documents.

    Attributes:
        known: a text that ranks compare.

    Raises:
        BurstError: if slices are invalid.
    """

    def __init__(
        self, sample: Sample, causal: bool, sizes: tuple[int, int, int], layout: Layout,
        device: torch.device, documents: Documents | None = None,
    ) -> None:  # fmt: skip
        require(_WHO, _of_kind(sample.slices))
        slices = sample.slices.numpy().astype(np.int64)
        self._tokens, self._shards = sizes[0] * sizes[1], (sizes[1], layout)
        self._batch = sizes[2]
        require(_WHO, _of_values(slices, self._tokens, causal))
        text = told_briefly(f"{slices.tolist()}", len(slices), "slices")
        self.known = {"slices": text} | (dict(documents.known or {}) if documents else {})
        self._slices, self._device, self._documents = slices, device, documents
        self._found: dict[tuple, Visible | Calls] = {}
        doubt_end("slices", int(slices[:, 1].max()), self._tokens, sizes[1])
        if documents is not None:
            self.arranged, self.restored = documents.arranged, documents.restored

    @property
    def balance(self) -> str:
        """How evenly ranks share the work of a sample sharded as a whole, in words."""
        cp_size, layout = self._shards
        if layout not in (Layout.ZIGZAG, Layout.CONTIGUOUS) or cp_size == 1:
            return "each rank computes its own rows"
        work = work_of_ranks(torch.from_numpy(self._slices), cp_size, layout, self._tokens)
        ratio = max(work) * len(work) / sum(work)
        return (
            f"the slowest rank computes {ratio:.2f} times the mean of (query, key) pairs; all the "
            "same with an all-to-all (--burst-intra a2a)"
        )

    def checked(self) -> dict[str, str]:
        """A text that ranks compare; what came on a GPU is checked now."""
        return self.known | dict(self._documents.checked() if self._documents else {})

    def branches(self, q: Places, keys: Places, unit: int = 1) -> tuple[()]:
        """What is seen in other kernel calls: nothing."""
        return ()

    def visible(
        self, band: Band, places: tuple[Places, Places] | Runs, unit: int, run: Backend
    ) -> Visible | Calls:
        """What a kernel call sees whose queries and keys are at these positions, in units of rows;
        or the calls, for a backend that takes no intervals. The slices say more than the band."""
        native = SLICES in run.capability.masks
        key = (places if isinstance(places, Runs) else (*places, unit)), native
        if key not in self._found and not native:
            sides = (self._places(side, unit) for side in _sides(places))
            found = calls_of(self._slices, *sides, self._device, self._batch == 1)
            self._found[key] = found
            if len(found.calls) > _MANY and is_first():
                say_once(
                    f"{_WHO}: a mask of slices takes {len(found.calls)} kernel calls for a "
                    f"tile with {run.capability.name}; --burst-backend triton takes one"
                )
        elif key not in self._found:
            q, keys = (self._positions(side, unit) for side in _sides(places))
            intervals = (
                torch.searchsorted(other, table[own]).int().contiguous()
                for own, other, table in ((q, keys, self._of_rows), (keys, q, self._of_keys))
            )
            self._found[key] = Visible(intervals=Intervals(*intervals))
        return self._found[key]

    def _places(self, side: Places | Numbers, unit: int) -> Places:
        """The positions of rows as ranges."""
        of_chunks = isinstance(side[0], int)
        return self._documents.places_of(side) if of_chunks else in_rows(side, unit)

    def _positions(self, side: Places | Numbers, unit: int) -> Tensor:
        """The position in the sample of each row, ascending: int64."""
        if isinstance(side[0], int):
            return self._documents.positions_of(side)
        spans = [torch.arange(p.start, p.stop) for p in in_rows(side, unit)]
        return torch.cat(spans).to(self._device, non_blocking=True)

    @cached_property
    def _of_rows(self) -> Tensor:
        """The keys that each position sees: int64 [tokens, most, 2]."""
        return _table(self._slices, self._tokens, self._device)

    @cached_property
    def _of_keys(self) -> Tensor:
        """The queries that see each position: the same of the transposed slices."""
        kinds = self._slices[:, 4]
        swapped = (kinds & CAUSAL) * INVERSE + (kinds & INVERSE) // INVERSE
        transposed = np.concatenate((self._slices[:, [2, 3, 0, 1]], swapped[:, None]), 1)
        return _table(transposed, self._tokens, self._device)


def _sides(places: tuple[Places, Places] | Runs) -> tuple:
    """Queries and keys: their positions, or their chunks of every document."""
    if not isinstance(places, Runs):
        return places
    ((queries, keys),) = places.pairs  # of a mask that is not causal
    return queries, keys


def _table(slices: np.ndarray, tokens: int, device: torch.device) -> Tensor:
    """By position, the intervals of its row in the score matrix: int64 [tokens, most, 2]."""
    lanes = _lanes(slices)
    most = int(np.bincount(lanes).max())
    by_lane = np.zeros((lanes.max() + 1, most, 5), dtype=np.int64)
    by_lane[:, :, :2] = tokens  # begin and end nowhere
    order = np.lexsort((slices[:, 0], lanes))
    places = np.concatenate([np.arange(n) for n in np.bincount(lanes)])
    by_lane[lanes[order], places] = slices[order]
    table = torch.from_numpy(by_lane)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    row = torch.arange(tokens, device=device).expand(len(table), tokens).contiguous()
    index = torch.searchsorted(table[:, :, 0].contiguous(), row, right=True).sub_(1).clamp_(min=0)
    q_start, q_stop, first, last, kind = (column.gather(1, index) for column in table.unbind(2))
    begin = torch.where(kind & INVERSE > 0, first + row - q_start, first)
    end = torch.where(kind & CAUSAL > 0, last - (q_stop - 1 - row), last)
    end = torch.where((row >= q_start) & (row < q_stop), end, begin)
    begin, end = (edge.clamp(min=first, max=last) for edge in (begin, end))
    return torch.stack((begin, torch.maximum(begin, end)), -1).movedim(0, 1).contiguous()


def _lanes(slices: np.ndarray) -> np.ndarray:
    """A number for each slice; slices of the same number have no query in common."""
    starts, stops, lanes = slices[:, 0], slices[:, 1], np.zeros(len(slices), dtype=np.int64)
    ends: list[tuple[int, int]] = []  # a heap: where the last slice of each lane stops, the lane
    for place in np.argsort(starts, kind="stable"):
        start, stop = int(starts[place]), int(stops[place])
        if ends and ends[0][0] <= start:
            lanes[place] = ends[0][1]
            heapreplace(ends, (stop, ends[0][1]))
        else:
            lanes[place] = len(ends)
            ends.append((stop, len(ends)))
            ends.sort()
    return lanes


def _of_kind(slices: object) -> Iterator[Need]:
    """Checks before anything is read."""
    shaped = holds_whole(slices) and slices.dim() == 2 and slices.shape[1] == 5
    yield (
        shaped and len(slices) > 0,
        "slices must be a tensor of int32 or int64 [slices, 5], at least one: where queries begin "
        "and end, where keys begin and end, and the kind",
        kind_of(slices),
        "pass such a tensor",
    )
    yield (
        slices.device.type == "cpu",
        "slices must be on the CPU, because they decide what kernels are given",
        slices.device,
        "pass slices.cpu(), once per sample",
    )


def _of_values(slices: np.ndarray, tokens: int, causal: bool) -> Iterator[Need]:
    """Checks of slices."""
    q_start, q_stop, k_start, k_stop, kind = slices.T
    inside = (q_start >= 0) & (q_start < q_stop) & (q_stop <= tokens)
    inside &= (k_start >= 0) & (k_start < k_stop) & (k_stop <= tokens)
    yield (
        inside.all(),
        f"slices must be within the sample of {tokens} tokens (of all ranks together), none empty, "
        "because there is nothing else",
        _first(slices, ~inside),
        "pass positions in the whole sample",
    )
    known = (kind >= 0) & (kind <= 3)
    yield (
        known.all(),
        "the kind of a slice must be 0 (full), 1 (causal), 2 (inverse causal) or 3 (both)",
        _first(slices, ~known),
        "pass one of them",
    )
    ahead = _ahead(slices)
    yield (
        not (causal and ahead.any()),
        "with causal=True no slice may have a key behind a query, because such hops are left out",
        _first(slices, ahead),
        "pass causal=False",
    )
    twice = _counted_twice(slices)
    yield (
        twice is None,
        "slices must not overlap, because a pair of a query and a key counts once",
        "" if twice is None else " and ".join(map(str, twice)),
        "cut one of them",
    )
    blind = _sees_nothing(slices)
    yield (
        blind is None,
        "every query before the last one of all slices must see a key, because attention to "
        "nothing is none",
        f"query {blind}",
        "add a slice for it",
    )


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
    steps, there = np.zeros((2, tokens + 1), dtype=np.int64), begin < end
    for row, sign in ((begin, 1), (end, -1)):
        np.add.at(steps[0], row[there], sign * first[there])
        np.add.at(steps[1], row[there], sign * slope[there])
    constants, slopes = steps.cumsum(1)[:, :-1]
    pairs = np.concatenate(([0], (constants + slopes * np.arange(tokens)).cumsum()))
    every = (positions(layout, rank, cp_size, tokens // cp_size) for rank in range(cp_size))
    return [sum(int(pairs[span.stop] - pairs[span.start]) for span in spans) for spans in every]


def sees_later(slices: Tensor) -> bool:
    """Whether a query of some slice sees a later key.

    Raises:
        BurstError: if they are not slices.
    """
    require(_WHO, _of_kind(slices))
    return bool(_ahead(slices.numpy()).any())


def _ahead(slices: np.ndarray) -> np.ndarray:
    """Whether a query of each slice sees a later key."""
    q_start, q_stop, _, k_stop, kind = slices.T
    return np.where(kind & CAUSAL, k_stop > q_stop, k_stop - 1 > q_start)


def _first(slices: np.ndarray, wrong: np.ndarray) -> str:
    return f"{slices[wrong][0].tolist()}" if wrong.any() else ""


def _counted_twice(slices: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Two slices that share a pair, if any."""
    order = np.argsort(slices[:, 0], kind="stable")
    ordered = slices[order]
    # those that begin before a slice ends; slices are compared with later ones only
    until = np.searchsorted(ordered[:, 0], ordered[:, 1], side="left")
    counts = np.maximum(until - np.arange(len(ordered)) - 1, 0)
    one = np.repeat(np.arange(len(ordered)), counts)
    other = one + 1 + np.arange(len(one)) - np.repeat(np.cumsum(counts) - counts, counts)
    a, b = ordered[one], ordered[other]
    begin, end = np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])
    for x, y in ((a, b), (b, a), (a, a), (b, b)):  # rows where x begins before y ends
        begin, end = _rows_where_before(x, y, begin, end)
    found = np.flatnonzero(begin < end)
    return (a[found[0]].tolist(), b[found[0]].tolist()) if len(found) else None


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


def _sees_nothing(slices: np.ndarray) -> int | None:
    """The first query that sees no key, before the last that sees one; None if all do."""
    begin, end = slices[:, 0].copy(), slices[:, 1].copy()
    begin, end = _rows_where_before(slices, slices, begin, end)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    begin, end = begin[begin < end], end[begin < end]
    reached = np.concatenate(([0], np.maximum.accumulate(end)[:-1])) if len(end) else end
    gaps = np.flatnonzero(begin > reached)
    return int(reached[gaps[0]]) if len(gaps) else None if len(end) else 0
