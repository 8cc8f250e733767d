"""What a kernel call sees: a band in segments, or parts of all pairs; also in plain torch."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.schedule.mask import Band

if TYPE_CHECKING:  # most runs never load it
    from megatron_burst.kernels.masks.parts import Parts


@dataclass(frozen=True, slots=True, eq=False)  # tensors cannot be compared by ==
class Segments:
    """Packed rows: queries of segment i see keys of segment i alone. For a batch of one.

    Segments may be empty on either side.
    """

    # int32 [n + 1] on the device of the tensors: where the queries of each segment begin, not
    # decreasing, from 0 to the number of query rows; the same of keys
    cu_q: Tensor
    cu_k: Tensor
    max_q: int  # queries of the longest segment; an upper bound suffices
    max_k: int  # the same of keys


@dataclass(frozen=True, slots=True)
class Visible(Band):
    """Which keys a query of a kernel call sees: a band, inside its segment; or parts.

    The band is key - (query + keys - queries) in [-left, right]: None is no bound, and the last
    query is level with the last key (bottom right), also in each segment.

    Attributes:
        segments: None: all rows are one segment.
        parts: None, or all that is seen, in a call without a band and segments.
    """

    segments: Segments | None = None
    parts: "Parts | None" = None

    def within(self, queries: int, keys: int) -> "Visible":
        """A copy without the bounds that hide nothing among `queries` queries and `keys` keys.

        Args:
            queries: rows; with segments at least those of the longest.
            keys: the same of keys.
        """
        if self.segments is not None:
            queries, keys = self.segments.max_q, self.segments.max_k
        left = None if self.left is None or self.left >= keys - 1 else self.left
        right = None if self.right is None or self.right >= queries - 1 else self.right
        return replace(self, left=left, right=right)


FULL = Visible()
CAUSAL = Visible(right=0)


def segments_of(visible: Visible, num_rows: int, num_keys: int) -> list[tuple[slice, slice]]:
    """(query rows, keys) of each segment; waits for the device if there are segments."""
    if visible.segments is None:
        return [(slice(0, num_rows), slice(0, num_keys))]
    starts = torch.stack((visible.segments.cu_q, visible.segments.cu_k)).tolist()  # waits once
    rows, keys = ([slice(*pair) for pair in pairwise(each)] for each in starts)
    return list(zip(rows, keys, strict=True))


def plain_causal(visible: Visible, name: str, packed: bool = False) -> bool:
    """Whether a call is causal, for a kernel that supports only full and causal calls.

    Raises:
        BurstError: if it is neither: the kernel was chosen for a different problem.
    """
    if visible.windowed or (visible.segments is not None and not packed):
        what = "a window" if visible.windowed else "packed documents"
        raise BurstError(
            f"burst attention: the backend {name} must be given full or causal calls, because "
            f"it supports no others; got {what}; choose the backend for a problem that says so"
        )
    return visible.causal
