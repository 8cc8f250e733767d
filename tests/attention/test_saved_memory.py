"""What a call saves for backward: no memory that is not its own."""

import gc
from contextlib import suppress
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, Force, burst_attention
from tests.ranks import run_ranks


def saved(rank: int, rotated: bool) -> tuple[list[float], bool]:
    """For each saved tensor, the bytes it keeps alive relative to its own; and whether dv is right.

    Queries and keys are new tensors if rotated, as RoPE makes them.
    """
    generator = torch.Generator().manual_seed(rank)
    qkv = torch.randn(1, 8, 8 + 2 + 2, 16, generator=generator, dtype=torch.float64)
    qkv.requires_grad_()
    q, k, v = qkv.split((8, 2, 2), dim=2)
    if rotated:
        q, k = q * 1.0, k * 1.0
    out, shares = attended(q, k, v, BurstConfig())
    (got,) = torch.autograd.grad(out.square().sum(), qkv, retain_graph=True)
    whole = [x.repeat_interleave(4, 2).transpose(1, 2) for x in (k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *whole, is_causal=True
    )
    (true,) = torch.autograd.grad(plain.square().sum(), qkv)
    return shares, bool((got - true).abs().max() < 1e-10)


def attended(q, k, v, config):
    """Output; for each tensor saved, the bytes it keeps alive relative to its own."""
    shares = []

    def pack(x):
        shares.append(x.untyped_storage().nbytes() / x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return burst_attention(q, k, v, config=config), shares


def saved_beside_keys_that_came(rank: int) -> list[float]:
    """The same ratios where another node's keys stay."""
    qkv = torch.randn(1, 8, 8 + 2 + 2, 16, requires_grad=True)
    q, k, v = qkv.split((8, 2, 2), dim=2)
    config = BurstConfig(intra="gather", nodes=2, force=Force(resend="never", heads_per_round=2))
    return attended(q * 1.0, k * 1.0, v, config)[1]


@pytest.mark.parametrize("rotated", [True, False])
def test_values_do_not_hold_the_projection_that_they_are_a_slice_of(rotated):
    """Where queries and keys are slices too, the whole projection is needed, and nothing is
    copied."""
    ((shares, right),) = run_ranks(saved, 1, rotated)
    assert right and len(shares) == 5
    assert max(shares) == (1 if rotated else 6)


def test_nor_where_keys_of_other_nodes_stay():
    for shares in run_ranks(saved_beside_keys_that_came, 2):
        assert len(shares) == 6 and max(shares) == 1


def test_a_call_that_raised_in_a_checkpoint_leaves_nothing_behind(monkeypatch):
    """Guards against a traceback that holds its own frames: until Python's collector runs, the
    checkpoint's hooks would take tensors of other code, and a retry would fail."""

    def layer(x):
        y = x * x
        return burst_attention(y, y, y)

    def step(x):
        return torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)[0]

    x = torch.randn(1, 8, 4, 8, requires_grad=True)
    right = step(x)
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(
                import_module("megatron_burst.attention"),
                "_readable",
                mock.Mock(side_effect=torch.OutOfMemoryError),
            )
            with suppress(torch.OutOfMemoryError):
                step(x)
        assert torch.equal(step(x), right)
    finally:
        gc.enable()
