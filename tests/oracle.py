"""Full attention by its definition, and what a rank holds of it."""

import torch
from torch import Tensor

from megatron_burst.schedule.layout import Layout, positions


def full_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Softmax attention of [b, s, h, d] tensors, differentiable; heads are expanded."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def rows_of(layout: Layout, cp_rank: int, cp_size: int, tokens: int) -> Tensor:
    """Positions that a rank holds, as an index."""
    return torch.tensor([p for span in positions(layout, cp_rank, cp_size, tokens) for p in span])
