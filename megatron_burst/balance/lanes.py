"""Documents into lanes of equal seconds: longest first to the emptiest, then exchanges.

A lane is what must take as long as the others: one micro-batch if ranks wait for each other in
each, else all micro-batches that the same ranks run one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from operator import le

import numpy as np

_EXCHANGES = 256  # at most, of a class
_PARTNERS = 4  # lanes, the emptiest first, that the fullest one tries
_CLOSE = 1e-3  # of a lane's seconds: closer lanes need no exchange


@dataclass(frozen=True)
class Lanes:
    """The lanes of one context-parallel size."""

    lane_of: np.ndarray  # of each bin (a sub-group's part of a micro-batch), its lane
    targets: np.ndarray  # seconds of documents that each lane should have
    room: int  # tokens that a bin holds


def filled(lengths: np.ndarray, seconds: Sequence[np.ndarray], sizes: Sequence[Lanes],
           stops: Sequence[int], placed: Sequence[int]) -> np.ndarray | None:  # fmt: skip
    """The bin of each document; None if one does not fit.

    Each goes to the lane that lacks most of its target, there to the bin with the most room. No bin
    stays empty. Bins of several context-parallel sizes are numbered one after the other; short
    documents also go to wide lanes that lack more.

    Args:
        lengths: of the documents, the longest first.
        seconds: that each takes at each size.
        sizes: lanes of each, the widest first; no more bins than documents.
        stops: the first document that is short enough for the next size.
        placed: bins of the first documents, of the widest size and no two alike.
    """
    state = _State(sizes)
    for bin_, length, cost in zip(placed, lengths.tolist(), seconds[0].tolist(), strict=False):
        state.place(bin_, length, cost)
    bins, tokens, costs = list(placed), lengths.tolist(), [x.tolist() for x in seconds]
    for number, stop in enumerate(stops):
        state.open(number)
        bins += state.by_need(tokens, costs, range(len(bins), stop))
        if len(bins) < stop:
            break
    unused, unplaced = state.empty(), tokens[len(bins) :]
    rooms = [state.room_of(bin_) for bin_ in unused]
    fits = len(rooms) == len(unplaced) and all(map(le, unplaced, rooms))
    return np.array(bins + unused) if fits else None


class _State:
    """Loads of lanes relative to their targets, and rooms of their bins."""

    def __init__(self, sizes: Sequence[Lanes]) -> None:
        self._lanes: list[range] = []  # of each size
        self._bins: list[list[int]] = []  # of each lane
        self._lane_of: list[int] = []  # of each bin
        self._size_of: list[int] = []  # of each lane
        for number, lanes in enumerate(sizes):
            first = len(self._bins)
            self._lanes.append(range(first, first + len(lanes.targets)))
            self._size_of += [number] * len(lanes.targets)
            self._bins += [[] for _ in lanes.targets]
            for lane in (lanes.lane_of + first).tolist():
                self._bins[lane].append(len(self._lane_of))
                self._lane_of.append(lane)
        self._whole = [sizes[number].room for number in self._size_of]  # room of a lane's bins
        self._rooms = [[room] * len(b) for room, b in zip(self._whole, self._bins, strict=True)]
        self._loads = np.concatenate([-lanes.targets for lanes in sizes]).tolist()
        self._empty = len(self._lane_of)
        self._open: list[tuple[float, int]] = []  # the lanes in use, by load
        self._full: list[tuple[int, int]] = []  # those that wait until a document is short enough

    def room_of(self, bin_: int) -> int:
        """Tokens that a bin still holds."""
        lane = self._lane_of[bin_]
        return self._rooms[lane][self._bins[lane].index(bin_)]

    def empty(self) -> list[int]:
        """Bins without documents, those that hold most first, then by load."""
        if not self._empty:
            return []
        unused = ((-self._whole[lane], self._loads[lane], bin_)
                  for bin_, lane in enumerate(self._lane_of)
                  if self.room_of(bin_) == self._whole[lane])  # fmt: skip
        return [bin_ for *_, bin_ in sorted(unused)]

    def place(self, bin_: int, length: int, cost: float) -> None:
        """Put a document into an empty bin."""
        lane = self._lane_of[bin_]
        self._rooms[lane][self._bins[lane].index(bin_)] -= length
        self._loads[lane] += cost
        self._empty -= 1

    def open(self, size: int) -> None:
        """Use the lanes of one more size."""
        self._open += [(self._loads[lane], lane) for lane in self._lanes[size]]
        heapify(self._open)

    def by_need(self, lengths: list[int], costs: list[list[float]], documents: range) -> list[int]:
        """Bins of documents, until as many are left as bins are empty, or one does not fit."""
        bins, rooms, loads, whole = self._bins, self._rooms, self._loads, self._whole
        heap, full, size_of = self._open, self._full, self._size_of
        filled: list[int] = []
        for at in documents:
            length = lengths[at]
            while full and -full[0][0] >= length:
                lane = heappop(full)[1]
                heappush(heap, (loads[lane], lane))
            while heap and (most := max(rooms[heap[0][1]])) < length:
                heappush(full, (-most, heappop(heap)[1]))
            if not heap or len(lengths) - at == self._empty:
                break
            lane = heap[0][1]
            place = rooms[lane].index(most)
            filled.append(bins[lane][place])
            rooms[lane][place] = most - length
            self._empty -= most == whole[lane]
            loads[lane] += costs[size_of[lane]][at]
            heapreplace(heap, (loads[lane], lane))
        return filled


def refine(lengths: np.ndarray, seconds: np.ndarray, lanes: Lanes, bin_of: np.ndarray) -> None:
    """Move documents, or swap two, between the fullest lane and one of the emptiest, as long as
    that makes both more equal; `bin_of` is changed."""
    state = _Exchanges(lengths, seconds, lanes, bin_of)
    loads, close = state.loads, state.close
    for _ in range(_EXCHANGES):
        worst = int(loads.argmax())
        for other in loads.argsort(kind="stable")[:_PARTNERS].tolist():
            if loads[worst] - loads[other] > close and state.exchange(worst, other):
                break
        else:
            break
    bin_of[:] = state.bins[:-1]


class _Exchanges:
    """Documents that change places; the last one is nothing, for which a document may go."""

    def __init__(
        self, lengths: np.ndarray, seconds: np.ndarray, lanes: Lanes, bin_of: np.ndarray
    ) -> None:
        self.bins, self._nothing = np.append(bin_of, 0), np.array([len(bin_of)])
        self._lengths, self._seconds = np.append(lengths, 0), np.append(seconds, 0.0)
        self._lane_of_bin, self._lane_of = lanes.lane_of, np.append(lanes.lane_of[bin_of], -1)
        self._count = np.bincount(bin_of, minlength=len(lanes.lane_of))
        filled = np.bincount(bin_of, lengths, len(lanes.lane_of))
        self._rooms = lanes.room - filled.astype(np.int64)
        self.loads = np.bincount(self._lane_of[:-1], seconds, len(lanes.targets)) - lanes.targets
        self.close = _CLOSE * max(float(lanes.targets.mean()), float(seconds.mean()))

    def exchange(self, worst: int, other: int) -> bool:
        """Make the best exchange between a fuller and an emptier lane; whether there is one.

        What goes for nothing goes to the bin with the most room, if it does not leave its bin
        empty.
        """
        bins, rooms, nothing = self.bins, self._rooms, self._nothing
        outgoing = (self._lane_of == worst).nonzero()[0]
        incoming = np.concatenate(((self._lane_of == other).nonzero()[0], nothing))
        other_bins = (self._lane_of_bin == other).nonzero()[0]
        bins[nothing] = other_bins[rooms[other_bins].argmax()]
        less = self._seconds[outgoing][:, None] - self._seconds[incoming]
        longer = self._lengths[outgoing][:, None] - self._lengths[incoming]
        gap = self.loads[worst] - self.loads[other]
        fits = (longer <= rooms[bins[incoming]]) & (-longer <= rooms[bins[outgoing]][:, None])
        fits[self._count[bins[outgoing]] == 1, -1] = False
        after = np.where(fits, np.abs(gap - 2 * less), np.inf)  # the two lanes' new difference
        i, j = divmod(int(after.argmin()), after.shape[1])
        if not after[i, j] < gap - self.close / 2:
            return False
        self._swap(outgoing[i], incoming[j], longer[i, j])
        self.loads[worst] -= less[i, j]
        self.loads[other] += less[i, j]
        return True

    def _swap(self, first: int, second: int, longer: int) -> None:
        """Two documents change bins; the first is so many tokens longer."""
        first_bin, second_bin = self.bins[first], self.bins[second]
        self.bins[first], self.bins[second] = second_bin, first_bin
        self._lane_of[[first, second]] = self._lane_of_bin[[second_bin, first_bin]]
        if second == self._nothing:
            self._lane_of[second] = -1
            self._count[first_bin] -= 1
            self._count[second_bin] += 1
        self._rooms[first_bin] += longer
        self._rooms[second_bin] -= longer
