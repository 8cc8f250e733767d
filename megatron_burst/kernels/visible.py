"""What a kernel call sees: a band in segments; in plain torch, and as varlen kernels take it."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_burst.errors import BurstError
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


def segments_of(visible: Visible, num_rows: int, num_keys: int) -> list[tuple[slice, slice]]:
    """(query rows, keys) of each segment; waits for the device if there are segments."""
    if visible.segments is None:
        return [(slice(0, num_rows), slice(0, num_keys))]
    starts = torch.stack((visible.segments.cu_q, visible.segments.cu_k)).tolist()  # waits once
    rows, keys = ([slice(*pair) for pair in pairwise(each)] for each in starts)
    return list(zip(rows, keys, strict=True))


def hidden(visible: Visible, q: Tensor, k: Tensor, level: int) -> Tensor:
    """[n_q, n_kv]: keys outside the band of each query; the first is level with key `level`."""
    row = torch.arange(q.shape[1], device=q.device).unsqueeze(1)
    ahead = torch.arange(k.shape[1], device=q.device) - (row + level)
    outside = torch.zeros_like(ahead, dtype=torch.bool)
    if visible.right is not None:
        outside |= ahead > visible.right
    if visible.left is not None:
        outside |= ahead < -visible.left
    return outside


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


def is_varlen(visible: Visible) -> bool:
    """Whether to call FlashAttention-2's varlen kernel: for segments, and for windows.

    Without segments FlashAttention-2 treats a bound of at least the number of keys as no bound, and
    no right bound as that number: wrong with more queries than keys (flash_api.cpp:
    `window_size_right >= seqlen_k`, `window_size_right = seqlen_k`). The varlen kernel takes the
    maximum number of keys as an argument.
    """
    return visible.windowed or visible.segments is not None


def segments_for(visible: Visible, q: Tensor, k: Tensor) -> Segments:
    """The segments of a call on [b, n, h, d]; without any each sequence of the batch is one."""
    if visible.segments is not None:
        return visible.segments
    return Segments(starts(q), starts(k), q.shape[1], k.shape[1])


def limits(segments: Segments) -> tuple[int, int]:
    """(max_q, max_k) for FlashAttention-2: upper bounds.

    max_q of 1 would make it swap rows and heads, which requires one query in every segment; max_k
    of 0 would launch an empty grid. max_k below max_q: see `is_varlen`.
    """
    max_q = max(segments.max_q, 2)
    return max_q, max(segments.max_k, max_q)


def starts(x: Tensor) -> Tensor:
    """Where each sequence of a batch [b, n, h, d] begins, and the end: [b + 1], int32."""
    batch, rows = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows


def flat(x: Tensor) -> Tensor:
    """[b, n, h, d] -> [b * n, h, d]; a view for a batch of one."""
    return x[0] if x.shape[0] == 1 else x.flatten(0, 1)


def flat_statistic(x: Tensor) -> Tensor:
    """[b, h, n] -> [h, b * n] without gaps."""
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def like(x: Tensor, rows: Tensor) -> Tensor:
    """[b * n, h, d] of a kernel -> [b, n, h, d], as x is."""
    return rows.unflatten(0, x.shape[:2])


def results(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out [b, n, h, dv], lse [b, h, n]) from the results of a FlashAttention kernel.

    Its lse of rows without a key is +inf or -inf.
    """
    lse = lse.masked_fill_(lse == torch.inf, -torch.inf)
    return like(q, out), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
