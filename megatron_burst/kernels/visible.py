"""Which keys a query of a kernel call sees, as data."""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_burst.schedule.mask import Band


@dataclass(frozen=True, slots=True, eq=False)  # tensors cannot be compared by ==
class Segments:
    """Packed rows: queries of segment i see keys of segment i alone. For a batch of one.

    Segments may be empty on either side.

    Attributes:
        cu_q: int32 [n + 1] on the device of the tensors: where the queries of each segment begin,
            not decreasing, from 0 to the number of query rows.
        cu_k: the same of keys.
        max_q: queries of the longest segment; an upper bound suffices.
        max_k: the same of keys.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class Visible(Band):
    """Which keys a query of a kernel call sees: a band, inside its segment.

    The band is key - (query + keys - queries) in [-left, right]: None is no bound, and the last
    query is level with the last key (bottom right), also in each segment.

    Attributes:
        segments: None: all rows are one segment.
    """

    segments: Segments | None = None

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
