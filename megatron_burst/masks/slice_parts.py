"""Slices in the rows of a tile: parts of its score matrix, for any kernel."""

import numpy as np

from megatron_burst.kernels.masks.parts import FAR, is_full, listed, trimmed
from megatron_burst.schedule.mask import Positions
from megatron_burst.slices import CAUSAL, INVERSE  # bits of a slice's kind


class Bands:
    """The slices of a sample as parts of its score matrix, and what tiles and chunks see of them.

    The tiles of a rank have the same queries, or few of them, so what follows from these is kept.
    """

    def __init__(self, slices: np.ndarray) -> None:
        """`slices`: int64 [slices, 5]."""
        q_start, q_stop, k_start, k_stop, kind = slices.T
        low = np.where(kind & INVERSE, k_start - q_start, -FAR)  # without a bound it is far
        high = np.where(kind & CAUSAL, k_stop - q_stop, FAR)
        self._table = np.stack((q_start, q_stop, k_start, k_stop, low, high), 1)
        self._of_q: dict[Positions, tuple[np.ndarray, np.ndarray]] = {}

    def parts(self, q: Positions, keys: Positions) -> np.ndarray:
        """The parts of a tile, as of `Parts`, by first row and first key.

        Args:
            q: positions of its queries, ascending.
            keys: the same of its keys.
        """
        if q not in self._of_q:
            self._of_q[q] = _in_queries(self._table, _Rows(q))
        parts = _in_keys(*self._of_q[q], _Rows(keys))
        for axis in (0, 1):  # adjacent rows of the same keys, then adjacent keys of the same rows
            parts = _joined(parts, axis)
        return parts[np.lexsort((parts[:, 2], parts[:, 0]))]

    def chunks(self, q: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
        """Whether any query of each chunk sees any key of each: bool [count, count].

        Args:
            q: positions where chunks of queries begin, in turns of `count`, and where the last one
                ends.
            keys: the same of keys.
            count: of chunks.
        """
        edges, keys = np.unique(q), np.unique(keys)  # documents may be empty
        bands = trimmed(self._table)
        first = np.searchsorted(edges, bands[:, 0], side="right") - 1
        counts = np.searchsorted(edges, bands[:, 1]) - first
        index, at = listed(first, counts)
        rows = bands[index]
        rows[:, 0] = np.maximum(rows[:, 0], edges[at])
        rows[:, 1] = np.minimum(rows[:, 1], edges[at + 1])
        rows = trimmed(rows)  # each within one chunk of queries
        of_q = np.searchsorted(edges, rows[:, 0], side="right") - 1
        begin = np.searchsorted(keys, rows[:, 2], side="right") - 1
        turns = np.minimum(np.searchsorted(keys, rows[:, 3]) - begin, count)
        steps = np.zeros((count, 2 * count + 1), dtype=np.int64)
        np.add.at(steps, (of_q % count, begin % count), 1)
        np.add.at(steps, (of_q % count, begin % count + turns), -1)
        seen = steps.cumsum(1)[:, :-1] > 0
        return seen[:, :count] | seen[:, count:]


class _Rows:
    """Ranges of positions, adjacent ones joined, and the row where each begins."""

    def __init__(self, places: Positions) -> None:
        ranges = [(place.start, place.stop) for place in places if len(place)]
        edges = np.array(ranges or [(0, 0)], dtype=np.int64)
        apart = np.flatnonzero(edges[1:, 0] != edges[:-1, 1])
        self.starts = edges[np.concatenate(([0], apart + 1)), 0]
        self.stops = edges[np.concatenate((apart, [len(edges) - 1])), 1]
        lengths = self.stops - self.starts
        self.rows = np.cumsum(lengths) - lengths

    def before(self, position: np.ndarray) -> np.ndarray:
        """How many rows are before each position."""
        place = np.maximum(np.searchsorted(self.starts, position, side="right") - 1, 0)
        within = np.maximum(position, self.starts[place])
        return self.rows[place] + np.minimum(within, self.stops[place]) - self.starts[place]

    def moved(self, at: np.ndarray) -> np.ndarray:
        """From the positions of these ranges to their rows: [ranges, 1]."""
        return (self.rows[at] - self.starts[at])[:, None]

    def each(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of a span, index of a range) for each range that has any of a span's positions."""
        first = np.searchsorted(self.stops, begin, side="right")
        counts = np.maximum(np.searchsorted(self.starts, end, side="left") - first, 0)
        return listed(first, counts)


def _in_queries(bands: np.ndarray, q: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """Parts of the sample in the query rows of a tile: without bounds, and with some.

    Rows that follow each other may be far from each other in the sample. That moves only a band's
    bounds, so only a part that has some is cut where ranges end.
    """
    plain = (bands[:, 4] == -FAR) & (bands[:, 5] == FAR)
    whole, bounded = bands[plain], bands[~plain]
    whole[:, :2] = q.before(whole[:, :2])
    index, at = q.each(bounded[:, 0], bounded[:, 1])
    bounded = bounded[index]
    _cut(bounded, 0, q, at)
    bounded = trimmed(bounded)
    by = q.moved(np.searchsorted(q.stops, bounded[:, 0], side="right"))
    bounded[:, :2] += by
    bounded[:, 4:] -= by
    return whole[whole[:, 0] < whole[:, 1]], bounded


def _in_keys(whole: np.ndarray, bounded: np.ndarray, keys: _Rows) -> np.ndarray:
    """The same in the key rows of the tile."""
    whole = whole.copy()
    whole[:, 2:4] = keys.before(whole[:, 2:4])
    index, at = keys.each(bounded[:, 2], bounded[:, 3])
    bounded = bounded[index]
    _cut(bounded, 2, keys, at)
    bounded[:, 2:] += keys.moved(at)
    return trimmed(np.concatenate((whole, bounded)))


def _cut(parts: np.ndarray, column: int, rows: _Rows, at: np.ndarray) -> None:
    """Cut parts to one range each."""
    parts[:, column] = np.maximum(parts[:, column], rows.starts[at])
    parts[:, column + 1] = np.minimum(parts[:, column + 1], rows.stops[at])


def _joined(parts: np.ndarray, axis: int) -> np.ndarray:
    """The same pairs: full parts that continue each other along an axis (rows, keys) are one."""
    is_whole, own, other = is_full(parts), 2 * axis, 2 - 2 * axis
    full = parts[is_whole]
    full = full[np.lexsort((full[:, own], full[:, other + 1], full[:, other]))]
    alike = (full[1:, other : other + 2] == full[:-1, other : other + 2]).all(1)
    alike &= full[1:, own] == full[:-1, own + 1]
    if not alike.any():
        return parts
    starts = np.flatnonzero(np.concatenate(([True], ~alike)))
    joined = full[starts]
    joined[:, own + 1] = full[np.concatenate((starts[1:] - 1, [len(full) - 1])), own + 1]
    joined[:, 4], joined[:, 5] = -FAR, FAR
    return np.concatenate((trimmed(joined), parts[~is_whole]))
