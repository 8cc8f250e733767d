"""What a call sees as FlashAttention-2's varlen kernels take it, and rows as they lay them out."""

import torch
from torch import Tensor

from megatron_burst.kernels.visible import Segments, Visible


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
