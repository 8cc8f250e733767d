"""Which keys queries see, pair by pair: every mask by its definition, for any positions."""

import torch
from torch import Tensor

from megatron_burst.masks.documents import Documents
from megatron_burst.masks.slices import Slices
from megatron_burst.schedule.mask import Mask
from megatron_burst.slices import CAUSAL, INVERSE


def seen_at(mask: Mask, sample: Documents | Slices | None, q: Tensor, k: Tensor) -> Tensor:
    """Whether queries at positions of the sample see keys at others.

    Args:
        mask: of the call.
        sample: its documents or slices, if the mask has some.
        q, k: int64 [n] and [m], positions.

    Returns:
        bool [n, m].
    """
    if isinstance(sample, Slices):
        return _in_slices(sample, q, k)
    away = k - q.unsqueeze(1)
    seen = torch.ones_like(away, dtype=torch.bool)
    if mask.left is not None:
        seen &= away >= -mask.left
    if mask.right is not None:
        seen &= away <= mask.right
    return seen if sample is None else seen & _in_documents(sample, q, k)


def _in_documents(sample: Documents, q: Tensor, k: Tensor) -> Tensor:
    """Queries see their own document; padding is not seen, and sees nothing."""
    starts, ends = (torch.tensor(edges, device=q.device) for edges in sample.extents)
    of_q, of_k = (torch.searchsorted(starts, places, right=True) - 1 for places in (q, k))
    inside_q, inside_k = ((of >= 0) & (places < ends[of.clamp(min=0)])
                          for of, places in ((of_q, q), (of_k, k)))  # fmt: skip
    return (of_q.unsqueeze(1) == of_k) & inside_q.unsqueeze(1) & inside_k


def _in_slices(sample: Slices, q: Tensor, k: Tensor) -> Tensor:
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    low, high, rows = int(q.min()), int(q.max()), q.unsqueeze(1)
    near = sample.slices[(sample.slices[:, 0] <= high) & (low < sample.slices[:, 1])]
    for q_start, q_stop, k_start, k_stop, kind in near.tolist():
        part = ((q_start <= q) & (q < q_stop)).unsqueeze(1) & (k_start <= k) & (k < k_stop)
        if kind & CAUSAL:  # the last query is level with the last key
            part = part & (k - k_stop <= rows - q_stop)
        if kind & INVERSE:  # the first query is level with the first key
            part = part & (k - k_start >= rows - q_start)
        seen |= part
    return seen
