"""`Visible` in plain torch: segments on the host, masks."""

from itertools import pairwise

import torch
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.kernels.visible import Visible


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
