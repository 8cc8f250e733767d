"""Slices for kernels that do not take all parts of a score matrix: a call for each part of a tile.

Parts of the same kind that follow each other in queries and in keys (chunks, packed samples, a
depth of trees) are segments of one call. How a tile is computed:

| calls of the tile | forward | backward |
| --- | --- | --- |
| few, with rows apart | these calls | these calls |
| few, with rows in common | by blocks, else these calls | these calls |
| many (`_MANY`) | by blocks, else another kernel at once, else these calls | the same |

By blocks: one call of the kernel, if it has blocks and most are seen whole or not at all. Another
kernel at once: one that takes all parts in a call.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_burst.kernels.backends import attend_and_raise, in_one_call
from megatron_burst.kernels.interface import SOFTCAP, Backend, Problem, QuerySide, arch_of
from megatron_burst.kernels.masks.block_sparse import is_worth
from megatron_burst.kernels.masks.parts import Parts, on_device
from megatron_burst.kernels.partial import accumulate_dtype, empty_results, merge_parts, sum_parts
from megatron_burst.kernels.visible import Segments, Visible
from megatron_burst.schedule.mask import Span, split_at_edges

_RECENT = 16  # groups that a part may continue: bounds the search
_MANY = 64  # calls of a tile; more are one call of a kernel that takes parts
_AT_ONCE = 8  # calls whose gradients are all kept until they are summed


class TileCall(NamedTuple):
    """One of the kernel calls of a tile."""

    rows: Span  # query rows of the tile, from the first that sees a key to the last
    keys: Span  # key rows, from the first that is seen to the last
    visible: Visible  # which of these keys each of these queries sees


@dataclass(frozen=True, eq=False)
class Calls:
    """The kernel calls of a tile, instead of one."""

    parts: Parts
    device: torch.device
    together: bool  # whether parts may share a call as its segments: in a batch of one

    @cached_property
    def _first_groups(self) -> list[np.ndarray]:
        """The parts of each call, up to one more than are worth it."""
        return list(islice(_groups(self.parts.table, self.together), _MANY + 1))

    @property
    def are_many(self) -> bool:
        """Whether there are more calls than are worth it."""
        return len(self._first_groups) > _MANY

    @cached_property
    def overlap(self) -> bool:
        """Whether some calls have rows in common, so that their results must be merged."""
        spans = [Span(int(group[0, 0]), int(group[-1, 1])) for group in self._first_groups]
        return not all(_alone(spans))

    @cached_property
    def calls(self) -> tuple[TileCall, ...]:
        """Each call: its rows and keys in the tile, and what is seen of these."""
        groups = _groups(self.parts.table, self.together) if self.are_many else self._first_groups
        return tuple(_call(group, self.device) for group in groups)

    @cached_property
    def merges(self) -> tuple[tuple[bool, ...], tuple[tuple[slice, list], ...]]:
        """Which calls have no row in common with others; rows that some call has, and for each the
        calls that have them with the rows within these."""
        spans = [call.rows for call in self.calls]
        return tuple(_alone(spans)), tuple(_overlaps(spans)) if spans else ()

    def _one_call(self, run: Backend, q: Tensor, k: Tensor, v: Tensor, capped: bool,
                  backward: bool = False,
                  deterministic: bool = False) -> Backend | None:  # fmt: skip
        """The kernel that takes all parts in one call."""
        if not self.are_many and (backward or not self.overlap):
            return None
        grouped, arch = q.shape[2] != k.shape[2], arch_of(q.device)
        shape = q.device.type, q.dtype, k.shape[3], v.shape[3], grouped
        problem = Problem(*shape, deterministic, arch, frozenset({SOFTCAP} if capped else ()))
        if run.capability.takes_blocks(problem) and is_worth(self.parts, q.shape[1], k.shape[1]):
            return run
        return in_one_call(problem) if self.are_many else None

    def forward(self, run: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float,
                into: tuple[Tensor, Tensor] | None = None, softcap: float = 0.0,
                largest: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `Backend.forward`."""
        into, options = into or empty_results(q, v), _score_options(softcap)
        if kernel := self._one_call(run, q, k, v, bool(softcap)):
            forward, seen = attend_and_raise(kernel, largest), Visible(parts=self.parts)
            return forward(q, k, v, scale, seen, into=into, **options)
        forward = attend_and_raise(run, largest)
        (out, lse), (alone, shared), parts = into, self.merges, {}
        for index, (call, single) in enumerate(zip(self.calls, alone, strict=True)):
            rows, keys = call.rows.slice, call.keys.slice
            target = (out[:, rows], lse[:, :, rows]) if single else None
            tensors = q[:, rows], k[:, keys], v[:, keys]
            parts[index] = forward(*tensors, scale, call.visible, into=target, **options)
        end = 0
        for rows, covering in shared:
            if end < rows.start:
                out[:, end : rows.start], lse[:, :, end : rows.start] = 0, -torch.inf
            end = rows.stop
            if not alone[covering[0][0]]:
                results = [(parts[i][0][:, x], parts[i][1][:, :, x]) for i, x in covering]
                merge_parts(out[:, rows], lse[:, :, rows], results)
        out[:, end:], lse[:, :, end:] = 0, -torch.inf
        return into

    def backward(self, run: Backend, side: QuerySide, k: Tensor, v: Tensor, scale: float,
                 into: tuple[Tensor, Tensor, Tensor] | None = None, deterministic: bool = False,
                 softcap: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `Backend.backward`; gradients are summed in the accumulation dtype."""
        wide, options = run.capability.wide_grads, _score_options(softcap)
        if kernel := self._one_call(run, side.q, k, v, bool(softcap), True, deterministic):
            seen = Visible(parts=self.parts)
            totals = kernel.backward(side, k, v, scale, seen, into=into, **options)
        else:
            options["deterministic"] = deterministic
            grads = (run.backward(side.rows(call.rows.slice), k[:, call.keys.slice],
                                  v[:, call.keys.slice], scale, call.visible,
                                  **options) for call in self.calls)  # fmt: skip
            totals = self._sums(grads, (side.q, k, v), into, wide)
        if into is None:
            return tuple(total if wide else total.to(k.dtype) for total in totals)
        for target, total in zip(into, totals, strict=True):
            if target is not total:
                target.copy_(total)
        return into

    def _sums(self, grads: Iterable[tuple[Tensor, ...]], inputs: Sequence[Tensor],
              into: Sequence[Tensor] | None, wide: bool) -> Sequence[Tensor]:  # fmt: skip
        """The sums of all calls, in `into` if one pass makes them. For every few calls each row is
        read and written once, so that few gradients are kept at a time."""
        several, totals = len(self.calls) > _AT_ONCE, into
        if totals is None or several:
            wide = wide or several
            dtypes = (accumulate_dtype(x.dtype) if wide else x.dtype for x in inputs)
            totals = [x.new_empty(x.shape, dtype=y) for x, y in zip(inputs, dtypes, strict=True)]
        for number, batch in enumerate(batched(zip(self.calls, grads, strict=True), _AT_ONCE)):
            for index, total in enumerate(totals):
                spans = [call.keys if index else call.rows for call, _ in batch]
                _add(total, spans, [of_call[index] for _, of_call in batch], anew=not number)
        for total in () if self.calls else totals:
            total.zero_()
        return totals


def _score_options(softcap: float) -> dict[str, Any]:
    """Kernels without soft caps have no such argument."""
    return {"softcap": softcap} if softcap else {}


def _add(total: Tensor, spans: Sequence[Span], parts: Sequence[Tensor], anew: bool) -> None:
    """total += parts, which have some of its rows each; `anew`: it has no value yet."""
    end = 0
    for rows, covering in _overlaps(spans):
        covered = total[:, rows]
        addends = [parts[i][:, of] for i, of in covering]
        sum_parts(covered, addends if anew else [covered, *addends])
        if anew:
            total[:, end : rows.start] = 0
        end = rows.stop
    if anew:
        total[:, end:] = 0


def _overlaps(spans: Sequence[Span]) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """Runs of rows covered by the same spans, so that each is rounded once: which spans, where."""
    for rows in split_at_edges(spans, max(span.stop for span in spans)):
        covering = [(i, rows.shifted(-span.start).slice)
                    for i, span in enumerate(spans) if span.contains(rows)]  # fmt: skip
        if covering:
            yield rows.slice, covering


def _alone(spans: Sequence[Span]) -> list[bool]:
    """Which spans have no row in common with another."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].stop))
    alone, end, start = [True] * len(spans), 0, max((span.stop for span in spans), default=0)
    for index in order:  # does one that begins before reach into it?
        alone[index] = spans[index].start >= end
        end = max(end, spans[index].stop)
    for index in reversed(order):  # does it reach into one that begins later?
        alone[index] &= spans[index].stop <= start
        start = min(start, spans[index].start)
    return alone


def _groups(parts: np.ndarray, together: bool) -> Iterator[np.ndarray]:
    """Parts that share a call, if `together`: of one band, each behind the one before it, in
    queries and in keys. `parts`: by first row and first key."""
    if not together:
        yield from parts[:, None]
        return
    left, right = _bounds(parts)
    _, kinds = np.unique(left * (1 << 31) + right, return_inverse=True)
    order = np.argsort(kinds, kind="stable")
    for band in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1) if len(order) else ():
        alike = parts[band]
        if (alike[1:, [0, 2]] >= alike[:-1, [1, 3]]).all():
            yield alike
        else:
            for first, *following in _behind(alike.tolist()):  # views are cheaper than copies
                yield alike[[first, *following]] if following else alike[first : first + 1]


def _behind(parts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The same for parts of one band that do not all follow each other: as many as fit to each of
    the latest groups."""
    groups: list[list[int]] = []
    ends: list[tuple[int, int]] = []  # of the last part of each group
    for index, (row, end, key, last, *_) in enumerate(parts):
        for group, (before, seen) in enumerate(ends):
            if before <= row and seen <= key:
                groups[group].append(index)
                ends[group] = end, last
                break
        else:
            if len(groups) == _RECENT:
                yield groups.pop(0)
                ends.pop(0)
            groups.append([index])
            ends.append((end, last))
    yield from groups


def _bounds(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(left, right) of each part, as of `Visible`; -1: no bound. One row sees all of its keys as a
    causal one does."""
    begin, end, first, last, low, high = parts.T
    level = (last - first) - (end - begin) + first - begin
    left, right = level - low, high - level
    left = np.where(left >= last - first - 1, -1, left)
    return left, np.where(right >= np.maximum(end - begin - 1, 1), -1, right)


def _call(group: np.ndarray, device: torch.device) -> TileCall:
    """One call; between its segments are queries without keys, and keys that no query sees."""
    begin, end, first, last = group[:, :4].T
    rows, keys = Span(int(begin[0]), int(end[-1])), Span(int(first[0]), int(last[-1]))
    left, right = (None if x[0] < 0 else int(x[0]) for x in _bounds(group[:1]))
    if len(group) == 1:
        return TileCall(rows, keys, Visible(left, right))
    # behind each segment one of queries alone, then one of keys alone
    of_q = np.stack((end[:-1], begin[1:], begin[1:]), 1).ravel() - rows.start
    of_keys = np.stack((last[:-1], last[:-1], first[1:]), 1).ravel() - keys.start
    edges = [np.concatenate(([0], x, [len(of)])).astype(np.int32)
             for x, of in ((of_q, rows), (of_keys, keys))]  # fmt: skip
    longest = (max(int(np.diff(side).max()), 1) for side in edges)
    segments = Segments(*(on_device(side, device) for side in edges), *longest)
    return TileCall(rows, keys, Visible(left, right, segments))
