"""Which keys the queries of a kernel call see: a band, inside segments; or parts of the scores."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.schedule.mask import Band

if TYPE_CHECKING:
    from megatron_burst.kernels.masks.parts import Parts


@dataclass(frozen=True, slots=True, eq=False)  # tensors cannot be compared by ==
class Segments:
    """Packed rows of a batch of one: queries see keys of their own segment, which may have none."""

    cu_q: Tensor  # int32 [segments + 1] on the rows' device: where each segment's queries begin
    cu_k: Tensor  # likewise its keys
    max_q: int  # queries of the longest segment, or more
    max_k: int  # keys of the longest segment, or more


@dataclass(frozen=True, slots=True)
class Visible(Band):
    """A band of a kernel call: in each segment, query i of n sees key j of m if
    -left <= j - (i + m - n) <= right; None is no bound. So the last query is level with the last
    key.
    """

    segments: Segments | None = None  # None: all rows are one segment
    parts: "Parts | None" = None  # all that is seen; then there is no band, and no segments

    def within(self, queries: int, keys: int) -> "Visible":
        """A copy without the bounds that hide nothing among so many queries and keys; where there
        are segments, among those of the longest."""
        if self.segments is not None:
            queries, keys = self.segments.max_q, self.segments.max_k
        left = None if self.left is None or self.left >= keys - 1 else self.left
        right = None if self.right is None or self.right >= queries - 1 else self.right
        return replace(self, left=left, right=right)


FULL = Visible()
CAUSAL = Visible(right=0)


def segments_of(visible: Visible, num_rows: int, num_keys: int) -> list[tuple[slice, slice]]:
    """(query rows, keys) of each segment; waits for the GPU if there are segments."""
    if visible.segments is None:
        return [(slice(0, num_rows), slice(0, num_keys))]
    starts = torch.stack((visible.segments.cu_q, visible.segments.cu_k)).tolist()
    rows, keys = ([slice(*bounds) for bounds in pairwise(side)] for side in starts)
    return list(zip(rows, keys, strict=True))


def plain_causal(visible: Visible, name: str, packed: bool = False) -> bool:
    """Whether a call is causal, for a kernel that supports only full and causal calls; raises
    BurstError if it is neither, because the kernel was chosen for a different problem."""
    if visible.windowed or (visible.segments is not None and not packed):
        feature = "a window" if visible.windowed else "packed documents"
        raise BurstError(
            f"burst attention: the backend {name} must be given full or causal calls, because it "
            f"supports no others; got {feature}; choose the backend for a problem with this mask"
        )
    return visible.causal
