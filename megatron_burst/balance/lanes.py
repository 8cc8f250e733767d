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


def filled(
    lengths: np.ndarray, seconds: np.ndarray, lanes: Lanes, placed: Sequence[int]
) -> np.ndarray | None:
    """The bin of each document; None if one does not fit.

    Each goes to the lane that lacks most of its target, there to the bin with the most room. No bin
    stays empty.

    Args:
        lengths: of the documents, the longest first.
        seconds: that each takes.
        lanes: where they go; no more bins than documents.
        placed: bins of the first documents, no two alike.
    """
    state = _State(lanes)
    for bin_, length, cost in zip(placed, lengths.tolist(), seconds.tolist(), strict=False):
        state.place(bin_, length, cost)
    found = [*placed, *state.by_need(lengths.tolist(), seconds.tolist(), len(placed))]
    unused = sorted(set(range(len(lanes.lane_of))).difference(found), key=state.load_of)
    if len(unused) != len(lengths) - len(found):  # a document did not fit
        return None
    return np.array(found + unused)


class _State:
    """Loads of lanes relative to their targets, and rooms of their bins."""

    def __init__(self, lanes: Lanes) -> None:
        self._lane_of, self._whole = lanes.lane_of.tolist(), lanes.room
        self._bins: list[list[int]] = [[] for _ in lanes.targets]
        for bin_, lane in enumerate(self._lane_of):
            self._bins[lane].append(bin_)
        self._rooms = [[lanes.room] * len(some) for some in self._bins]
        self._loads = (-lanes.targets).tolist()
        self._empty = len(self._lane_of)

    def load_of(self, bin_: int) -> tuple[float, int]:
        """What bins are sorted by."""
        return self._loads[self._lane_of[bin_]], bin_

    def place(self, bin_: int, length: int, cost: float) -> None:
        """Put a document into an empty bin."""
        lane = self._lane_of[bin_]
        self._rooms[lane][self._bins[lane].index(bin_)] -= length
        self._loads[lane] += cost
        self._empty -= 1

    def by_need(self, lengths: list[int], seconds: list[float], start: int) -> list[int]:
        """Bins of the documents from `start` on, until as many are left as bins are empty, or one
        does not fit. A lane without room waits in `full` until a document is short enough."""
        bins, rooms, loads, whole = self._bins, self._rooms, self._loads, self._whole
        heap = [(load, lane) for lane, load in enumerate(loads)]
        heapify(heap)
        full: list[tuple[int, int]] = []
        found: list[int] = []
        for at in range(start, len(lengths)):
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
            self._empty -= most == whole
            loads[lane] += seconds[at]
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
