"""Documents into lanes of equal seconds: longest first to the emptiest, then exchanges.

A lane is what must take as long as the others: one micro-batch if ranks wait for each other in
each, else all micro-batches that the same ranks run one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

_EXCHANGES = 256  # at most, of a class
_PARTNERS = 4  # lanes, the emptiest first, that the fullest one tries
_CLOSE = 1e-3  # of a lane's seconds: closer lanes need no exchange


@dataclass(frozen=True)
class Lanes:
    """The lanes of one context-parallel size.

    Attributes:
        lane_of: of each bin (a sub-group's part of a micro-batch), its lane.
        targets: seconds of documents that each lane should have.
        room: tokens that a bin holds.
    """

    lane_of: np.ndarray
    targets: np.ndarray
    room: int


def filled(lengths: np.ndarray, seconds: np.ndarray, lanes: Lanes) -> np.ndarray | None:
    """The bin of each document; None if one does not fit.

    Each goes to the lane that lacks most of its target, there to the bin with the most room. No bin
    stays empty.

    Args:
        lengths: of the documents, the longest first.
        seconds: that each takes.
        lanes: where they go; no more bins than documents.
    """
    return filled_together(lengths, [seconds], [lanes], [len(lengths)], [])


def filled_together(
    lengths: np.ndarray,
    seconds: Sequence[np.ndarray],
    sizes: Sequence[Lanes],
    stops: Sequence[int],
    placed: Sequence[int],
) -> np.ndarray | None:
    """The same with lanes of several context-parallel sizes, whose bins are numbered one after the
    other: short documents also go to wide lanes that lack more.

    Args:
        lengths: of the documents, the longest first.
        seconds: that each takes at each size.
        sizes: lanes of each, the widest first.
        stops: the first document that is short enough for the next size.
        placed: bins of the first documents, of the widest size and no two alike.
    """
    state = _State(sizes)
    for bin_, length, cost in zip(placed, lengths.tolist(), seconds[0].tolist(), strict=False):
        state.place(bin_, length, cost)
    found, tokens = list(placed), lengths.tolist()
    costs = [each.tolist() for each in seconds]
    for number, stop in enumerate(stops):
        state.open(number)
        found += state.by_need(tokens, costs, range(len(found), stop))
        if len(found) < stop:
            break
    unused = state.empty()
    rest = lengths[len(found) :]
    if len(unused) != len(rest) or any(
        length > state.room_of(bin_) for bin_, length in zip(unused, rest.tolist(), strict=True)
    ):
        return None
    return np.array(found + unused)


class _State:
    """Loads of lanes relative to their targets, and rooms of their bins."""

    def __init__(self, sizes: Sequence[Lanes]) -> None:
        self._lanes: list[range] = []  # of each size
        self._bins: list[list[int]] = []  # of each lane
        self._lane_of: list[int] = []  # of each bin
        self._size_of: list[int] = []  # of each lane
        for number, one in enumerate(sizes):
            first = len(self._bins)
            self._lanes.append(range(first, first + len(one.targets)))
            self._size_of += [number] * len(one.targets)
            self._bins += [[] for _ in one.targets]
            for lane in (one.lane_of + first).tolist():
                self._bins[lane].append(len(self._lane_of))
                self._lane_of.append(lane)
        self._whole = [sizes[number].room for number in self._size_of]  # room of a lane's bins
        each = zip(self._whole, self._bins, strict=True)
        self._rooms = [[room] * len(bins) for room, bins in each]
        self._loads = np.concatenate([-one.targets for one in sizes]).tolist()
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
        some = [
            (-self._whole[lane], self._loads[lane], bin_)
            for bin_, lane in enumerate(self._lane_of)
            if self.room_of(bin_) == self._whole[lane]
        ]
        return [bin_ for *_, bin_ in sorted(some)]

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

    def by_need(self, lengths: list[int], costs: list[list[float]], some: range) -> list[int]:
        """Bins of some documents, until as many of all are left as bins are empty, or one does not
        fit."""
        bins, rooms, loads, whole = self._bins, self._rooms, self._loads, self._whole
        heap, full, size_of = self._open, self._full, self._size_of
        found: list[int] = []
        for at in some:
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
            found.append(bins[lane][place])
            rooms[lane][place] = most - length
            self._empty -= most == whole[lane]
            loads[lane] += costs[size_of[lane]][at]
            heapreplace(heap, (loads[lane], lane))
        return found


def refine(lengths: np.ndarray, seconds: np.ndarray, lanes: Lanes, bin_of: np.ndarray) -> None:
    """Move documents, or swap two, between the fullest lane and one of the emptiest, as long as
    that makes both more equal; `bin_of` is changed."""
    rooms = lanes.room - np.bincount(bin_of, lengths, len(lanes.lane_of)).astype(np.int64)
    loads = np.bincount(lanes.lane_of[bin_of], seconds, len(lanes.targets)) - lanes.targets
    close = _CLOSE * max(float(lanes.targets.mean()), float(seconds.mean()))
    for _ in range(_EXCHANGES):
        worst = int(loads.argmax())
        for other in np.argsort(loads, kind="stable")[:_PARTNERS].tolist():
            if loads[worst] - loads[other] > close and _exchange(
                lengths, seconds, lanes, bin_of, rooms, loads, (worst, other), close
            ):
                break
        else:
            return


def _exchange(lengths, seconds, lanes, bin_of, rooms, loads, pair, close) -> bool:
    """Make the best exchange between a fuller and an emptier lane; whether there is one.

    Also tried: a document for nothing, which goes to the bin with the most room, if it does not
    leave its bin empty.
    """
    worst, other = pair
    lane_of = lanes.lane_of[bin_of]
    mine, theirs = np.flatnonzero(lane_of == worst), np.flatnonzero(lane_of == other)
    roomiest = max(np.flatnonzero(lanes.lane_of == other).tolist(), key=lambda b: rooms[b])
    their_bins = np.append(bin_of[theirs], roomiest)
    less = seconds[mine][:, None] - np.append(seconds[theirs], 0.0)
    longer = lengths[mine][:, None] - np.append(lengths[theirs], 0)
    gap = loads[worst] - loads[other]
    fits = (longer <= rooms[their_bins]) & (-longer <= rooms[bin_of[mine]][:, None])
    fits[np.bincount(bin_of, minlength=len(rooms))[bin_of[mine]] == 1, -1] = False
    after = np.where(fits, np.abs(gap - 2 * less), np.inf)  # the two lanes' new difference
    i, j = divmod(int(after.argmin()), after.shape[1])
    if not after[i, j] < gap - close / 2:
        return False
    mine_bin, their_bin = bin_of[mine[i]], their_bins[j]
    bin_of[mine[i]] = their_bin
    if j < len(theirs):
        bin_of[theirs[j]] = mine_bin
    rooms[mine_bin] += longer[i, j]
    rooms[their_bin] -= longer[i, j]
    loads[worst] -= less[i, j]
    loads[other] += less[i, j]
    return True
