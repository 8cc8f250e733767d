"""Prefix trees: segments of a sample that also see the segments they continue.

Segments are in depth-first order, so the descendants of a segment are the rows right after it.
Within its own segment a query sees a causal document. Ancestors are seen in branches, one per depth
of the tree, in which the descendants' queries see every key of their common ancestor. So each query
meets each of its keys once, and nothing is copied.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_burst.kernels.backends import Backend, QuerySide
from megatron_burst.kernels.partial import merge_parts, sum_parts
from megatron_burst.kernels.visible import FULL, Segments, Visible
from megatron_burst.schedule.mask import Places, Span, cut


class Branch(NamedTuple):
    """A kernel call in addition to that of a tile's documents."""

    rows: Span  # query rows of the tile, from the first that sees a key to the last
    keys: Span  # key rows, from the first that is seen to the last
    visible: Visible  # which of these keys each of these queries sees


class Tree:
    """Where the segments of a tree are, by depth; on the CPU.

    A segment that is its parent's only child continues it: both are one document.

    Args:
        starts: where segments begin in the sample, and where the last one ends.
        parents: of each segment, -1 for none; checked by `of_parents`.

    Attributes:
        starts: int64, where documents begin and where the last one ends.
    """

    def __init__(self, starts: Sequence[int], parents: Sequence[int]) -> None:
        number, children = len(parents), [0] * len(parents)
        behind = list(range(1, number + 1))  # by segment, the first after it that is no descendant
        for segment in reversed(range(number)):
            parent = parents[segment]
            if parent >= 0:
                behind[parent] = max(behind[parent], behind[segment])
                children[parent] += 1
        firsts = [s for s in range(number) if parents[s] < 0 or children[parents[s]] > 1]
        depths = [0] * number
        levels: list[list[tuple[int, int, int]]] = []
        for first, after in pairwise((*firsts, number)):
            depth = depths[parents[first]] + 1 if parents[first] >= 0 else 0
            depths[first:after] = [depth] * (after - first)
            if starts[first] < starts[after] < starts[behind[first]]:
                levels += [[] for _ in range(depth + 1 - len(levels))]
                levels[depth].append((starts[first], starts[after], starts[behind[first]]))
        starts_of = [*(starts[first] for first in firsts), starts[-1]]
        self.starts = torch.tensor(starts_of, device="cpu")
        self._levels = [torch.tensor(level, device="cpu") for level in levels if level]

    def branches(self, q: Places, keys: Places, device: torch.device) -> tuple[Branch, ...]:
        """The branches of a tile whose queries and keys are at these positions."""
        found = (_branch(level, q, keys, device) for level in self._levels)
        return tuple(branch for branch in found if branch)


def rows_before(edges: Tensor, places: Places) -> Tensor:
    """How many of the rows at these ascending positions are before each edge: int32."""
    if len(places) == 1 and places[0].start == 0:
        return edges.clamp(max=len(places[0])).int()
    return torch.stack([(edges - at.start).clamp(0, len(at)) for at in places]).sum(
        0, dtype=torch.int32
    )


def _branch(level: Tensor, q: Places, keys: Places, device: torch.device) -> Branch | None:
    """The branch of one depth, given where each segment begins, ends, and its descendants end."""
    of_keys, of_q = rows_before(level[:, :2], keys), rows_before(level[:, 1:], q)
    both = torch.stack((of_q, of_keys), 1)  # [segments, queries or keys, begin or end]
    both = both[(both[..., 0] < both[..., 1]).all(1)]
    if not len(both):
        return None
    rows, seen = (Span(int(both[0, i, 0]), int(both[-1, i, 1])) for i in range(2))
    if len(both) == 1:
        return Branch(rows, seen, FULL)
    # between two segments are queries that see no key here, and keys that no query sees
    begins, ends = both[..., 0], both[..., 1]
    apart = torch.stack((begins[1:, 0], ends[:-1, 1]), 1)
    edges = torch.stack((ends[:-1], apart, begins[1:]), 1).flatten(0, 1)
    edges = torch.cat((begins[:1], edges, ends[-1:])) - begins[0]
    longest = edges.diff(dim=0).amax(0).tolist()
    of_q, of_keys = (x.contiguous().to(device, non_blocking=True) for x in edges.unbind(1))
    return Branch(rows, seen, Visible(segments=Segments(of_q, of_keys, *longest)))


def attend_branches(
    run: Backend, tensors: Sequence[Tensor], scale: float, branches: Sequence[Branch],
    into: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Merge the results of a tile's branches into its own, out [b, n, h, dv] and lse [b, h, n].

    `tensors`: q [b, n, h, dqk], k [b, m, h_kv, dqk] and v [b, m, h_kv, dv] of the tile.
    """
    (q, k, v), (out, lse) = tensors, into
    parts = [
        run.forward(q[:, b.rows.slice], k[:, b.keys.slice], v[:, b.keys.slice], scale, b.visible)
        for b in branches
    ]
    for rows, found in overlaps([b.rows for b in branches]):
        target = out[:, rows], lse[:, :, rows]
        merge_parts(
            *target, [target, *((parts[i][0][:, x], parts[i][1][:, :, x]) for i, x in found)]
        )


def add_branches(
    run: Backend, tensors: tuple[QuerySide, Tensor, Tensor], scale: float,
    branches: Sequence[Branch], into: Sequence[Tensor], deterministic: bool,
) -> None:  # fmt: skip
    """Add the gradients of a tile's branches to its own, dq, dk and dv.

    `tensors`: query side, k [b, m, h_kv, dqk] and v [b, m, h_kv, dv] of the tile.
    """
    side, *keys = tensors
    parts = [
        run.backward(
            side.rows(b.rows.slice), *(x[:, b.keys.slice] for x in keys), scale, b.visible,
            deterministic=deterministic,
        )
        for b in branches
    ]  # fmt: skip
    spans = [[b.rows for b in branches]] + 2 * [[b.keys for b in branches]]
    for index, (target, of) in enumerate(zip(into, spans, strict=True)):
        for rows, found in overlaps(of):
            whole = target[:, rows]
            sum_parts(whole, [whole, *(parts[i][index][:, some] for i, some in found)])


def overlaps(spans: Sequence[Span]) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """Runs of rows covered by the same spans, so that each is rounded once: which spans, where."""
    for rows in cut(spans, max(span.stop for span in spans)):
        found = [
            (i, rows.moved(-span.start).slice) for i, span in enumerate(spans) if span.holds(rows)
        ]
        if found:
            yield rows.slice, found
