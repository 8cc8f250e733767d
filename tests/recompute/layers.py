"""Attention layers in torch.utils.checkpoint, and their gradients without it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.oracle import full_attention

HEADS, DIM, LAYERS = 4, 8, 3
REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


class Counted:
    """An attention function that counts its calls."""

    def __init__(self, attention):
        self.attention, self.calls = attention, 0

    def __call__(self, *args, **options):
        self.calls += 1
        return self.attention(*args, **options)


def flash(q, k, v, scale=None):
    """torch's flash attention of [b, s, h, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def plain(q, k, v, scale=DIM**-0.5):
    return full_attention(q, k, v, True, scale)


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS * DIM, 3 * HEADS * DIM), (HEADS * DIM, HEADS * DIM)]
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [[(draw(shape) / 8).requires_grad_() for shape in shapes] for _ in range(LAYERS)]


def layer(weights, attend, x):
    qkv = (x @ weights[0]).unflatten(-1, (HEADS, 3 * DIM))  # q, k, v share memory
    q, k, v = qkv.split(DIM, dim=-1)
    return x + torch.tanh(attend(q, k, v, scale=0.3).flatten(2) @ weights[1])


def forward(weights, attend, x, reentrant, per_frame=1):
    """Layers in checkpoints, `per_frame` at a time; `reentrant=None` means no checkpoints."""
    for start in range(0, LAYERS, per_frame):

        def some(x, members=weights[start : start + per_frame]):
            for each in members:
                x = layer(each, attend, x)
            return x

        x = some(x) if reentrant is None else checkpoint(some, x, use_reentrant=reentrant)
    return x


def inputs(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 6, HEADS * DIM, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(weights, xs):
    leaves = [*xs, *(w for each in weights for w in each)]
    found = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def truth_of(attention, seeds=(1,)):
    weights, xs = model(), [inputs(seed) for seed in seeds]
    for x in xs:
        forward(weights, attention, x, None).square().sum().backward()
    return gradients(weights, xs)
