"""Slices for kernels that take no intervals: a kernel call for each part of a slice in a tile.

Parts of the same kind that follow each other in queries and in keys (chunks, packed samples, a
depth of trees) are segments of one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_burst.engine.tree import Branch, overlaps
from megatron_burst.kernels.backends import Backend, QuerySide
from megatron_burst.kernels.partial import accumulate_dtype, merge_parts
from megatron_burst.kernels.visible import Segments, Visible
from megatron_burst.schedule.mask import Mask, Places, Span, meet

CAUSAL, INVERSE = 1, 2  # bits of a slice's kind
_RECENT = 16  # groups that a part may continue: bounds the search


@dataclass(frozen=True, slots=True)
class Calls:
    """The kernel calls of a tile, instead of one."""

    calls: tuple[Branch, ...]

    def forward(
        self, run: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `Backend.forward`."""
        if into is None:
            out = q.new_empty(*q.shape[:3], v.shape[3])
            sums = accumulate_dtype(q.dtype)
            into = out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=sums)
        out, lse = into
        spans = [call.rows for call in self.calls]
        alone, parts = _alone(spans), {}
        for index, (call, single) in enumerate(zip(self.calls, alone, strict=True)):
            rows, keys = call.rows.slice, call.keys.slice
            target = (out[:, rows], lse[:, :, rows]) if single else None
            tensors = q[:, rows], k[:, keys], v[:, keys]
            parts[index] = run.forward(*tensors, scale, call.visible, into=target)
        end = 0
        for rows, found in overlaps(spans) if spans else ():
            if end < rows.start:
                out[:, end : rows.start], lse[:, :, end : rows.start] = 0, -torch.inf
            end = rows.stop
            if not alone[found[0][0]]:
                some = [(parts[i][0][:, x], parts[i][1][:, :, x]) for i, x in found]
                merge_parts(out[:, rows], lse[:, :, rows], some)
        out[:, end:], lse[:, :, end:] = 0, -torch.inf
        return into

    def backward(
        self, run: Backend, side: QuerySide, k: Tensor, v: Tensor, scale: float,
        into: tuple[Tensor, Tensor, Tensor] | None = None, deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `Backend.backward`; gradients are summed in the accumulation dtype, call by call."""
        tensors, sums = (side.q, k, v), accumulate_dtype(k.dtype)
        totals = [torch.zeros_like(x, dtype=sums) for x in tensors]
        for call in self.calls:
            rows, keys = call.rows.slice, call.keys.slice
            grads = run.backward(
                side.rows(rows), k[:, keys], v[:, keys], scale, call.visible,
                deterministic=deterministic,
            )  # fmt: skip
            for total, place, grad in zip(totals, (rows, keys, keys), grads, strict=True):
                total[:, place] += grad
        if into is None:
            wide = run.capability.wide_grads
            return tuple(total if wide else total.to(k.dtype) for total in totals)
        for target, total in zip(into, totals, strict=True):
            target.copy_(total)
        return into


def _alone(spans: Sequence[Span]) -> list[bool]:
    """Which spans have no row in common with another."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].stop))
    found, end = [True] * len(spans), 0
    for one, other in pairwise(order):
        end = max(end, spans[one].stop)
        if spans[other].start < end:
            found[other] = False
    end = max((span.stop for span in spans), default=0)
    for one in reversed(order):
        if spans[one].stop > end:
            found[one] = False
        end = min(end, spans[one].start)
    return found


def calls_of(
    slices: np.ndarray, q: Places, keys: Places, device: torch.device, together: bool
) -> Calls:
    """The calls of a tile.

    Args:
        slices: int64 [slices, 5].
        q: positions of its queries, ascending.
        keys: the same of its keys.
        device: where kernels run.
        together: whether segments may share a call: in a batch of one.
    """
    parts = [
        (tile.q.moved(row + start - queries.start), tile.kv.moved(column + first - seen.start),
         tile.mask.left, tile.mask.right)
        for row, queries in _in_rows(q) for column, seen in _in_rows(keys)
        for start, first, tile in _parts(slices, queries, seen)
    ]  # fmt: skip
    parts.sort(key=lambda part: (part[0].start, part[1].start))
    groups: list[list] = []
    for part in _joined(parts):
        fits = (group for group in groups[-_RECENT:] if together and _continues(group[-1], part))
        group = next(fits, None)
        if group is None:
            groups.append([part])
        else:
            group.append(part)
    return Calls(tuple(_call(group, device) for group in groups))


def _in_rows(places: Places) -> list[tuple[int, range]]:
    """Ranges with their first row, adjacent ones joined."""
    found: list[tuple[int, range]] = []
    row = 0
    for place in places:
        if found and found[-1][1].stop == place.start:
            found[-1] = found[-1][0], range(found[-1][1].start, place.stop)
        elif len(place):
            found.append((row, place))
        row += len(place)
    return found


def _parts(slices: np.ndarray, q: range, keys: range):
    """Of each slice that has a pair there: where its queries and its keys begin, and the tile."""
    low = np.maximum(slices[:, [0, 2]], [q.start, keys.start])
    high = np.minimum(slices[:, [1, 3]], [q.stop, keys.stop])
    for index in np.flatnonzero((low < high).all(1)):
        q_start, q_stop, k_start, k_stop, kind = slices[index].tolist()
        (start, first), (stop, last) = low[index].tolist(), high[index].tolist()
        band = Mask(
            q_start - k_start if kind & INVERSE else None,
            k_stop - q_stop if kind & CAUSAL else None,
        )
        if tile := meet(range(start, stop), range(first, last), band):
            yield start, first, tile


def _joined(parts: Sequence[tuple]) -> list[tuple]:
    """The same parts, those with all of the same keys and adjacent queries joined (the children of
    a segment of a tree)."""
    found: list[tuple] = []
    last: dict[tuple, int] = {}  # by keys and band, the index of the last part
    for q, keys, *band in parts:
        which = keys.start, keys.stop, *band
        before = last.get(which)
        if before is not None and band == [None, None] and found[before][0].stop == q.start:
            found[before] = (Span(found[before][0].start, q.stop), keys, *band)
        else:
            last[which] = len(found)
            found.append((q, keys, *band))
    return found


def _continues(before: tuple, part: tuple) -> bool:
    """Whether a part is behind another one of its kind, in queries and in keys."""
    behind = before[0].stop <= part[0].start and before[1].stop <= part[1].start
    return behind and before[2:] == part[2:]


def _call(group: list[tuple], device: torch.device) -> Branch:
    """One call; between its segments are queries without keys, and keys that no query sees."""
    (first, *_), (*_, last) = group, group
    rows, keys = Span(first[0].start, last[0].stop), Span(first[1].start, last[1].stop)
    if len(group) == 1:
        return Branch(rows, keys, Visible(*first[2:]))
    edges = [[0], [0]]
    for one, other in pairwise(group):
        edges[0] += [one[0].stop - rows.start, other[0].start - rows.start]
        edges[1] += [one[1].stop - keys.start, one[1].stop - keys.start]
        # a segment of queries alone, then one of keys alone
        edges[0].append(other[0].start - rows.start)
        edges[1].append(other[1].start - keys.start)
    edges[0].append(len(rows))
    edges[1].append(len(keys))
    of_q, of_keys = (torch.tensor(each, dtype=torch.int32).to(device) for each in edges)
    longest = (max(np.diff(each).max(), 1) for each in edges)
    return Branch(rows, keys, Visible(*first[2:], Segments(of_q, of_keys, *map(int, longest))))
