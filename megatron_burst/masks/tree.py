"""Prefix trees: segments of a sample that also see the segments they continue.

Segments are in depth-first order, so the descendants of a segment are the rows right after it: a
tree is at most two slices for each segment, one in which it is a causal document, and one in which
its descendants see every key of it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_burst.slices import CAUSAL, FULL


def slices_of_tree(starts: Sequence[int], parents: Sequence[int]) -> Tensor:
    """The same mask as slices, int64 [slices, 5].

    A segment that is its parent's only child continues it: both are one document.

    Args:
        starts: where segments begin in the sample, and where the last one ends.
        parents: of each segment, -1 for none; checked by `of_parents`.
    """
    number, children = len(parents), [0] * len(parents)
    behind = list(range(1, number + 1))  # by segment, the first after it that is no descendant
    for segment in reversed(range(number)):
        parent = parents[segment]
        if parent >= 0:
            behind[parent] = max(behind[parent], behind[segment])
            children[parent] += 1
    firsts = [s for s in range(number) if parents[s] < 0 or children[parents[s]] > 1]
    slices = []
    for first, after in pairwise((*firsts, number)):
        begin, end, last = starts[first], starts[after], starts[behind[first]]
        if begin < end:
            slices.append((begin, end, begin, end, CAUSAL))
        if begin < end < last:
            slices.append((end, last, begin, end, FULL))
    return torch.tensor(slices, dtype=torch.int64, device="cpu").view(-1, 5)
