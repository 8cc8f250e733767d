"""`nan_guard`: the first tile with a NaN is named, on every rank that meets it; off by default."""

import re
from functools import partial
from unittest.mock import patch

import pytest
import torch

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.kernels.backends import backends
from tests.faults.acts import told_in
from tests.ranks import run_ranks

ODD = 1
WAYS = {"ring": {"intra": "ring"}, "gather": {"intra": "gather"}, "nested": {"nodes": 2}}


def of_nan(rank, way):
    """What is said if a rank's keys have a NaN; whether a call without NaN computes the same with
    and without the guard, before and after."""
    q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    options = BurstConfig(nan_guard=True, timeout_s=60, **WAYS[way])

    def step(k=k):
        out = burst_attention(q, k, v, config=options, layer=3)
        return [out, *torch.autograd.grad(out.sum(), (q, v))]

    plain = burst_attention(q, k, v, config=BurstConfig(timeout_s=60, **WAYS[way]))
    before = torch.equal(step()[0], plain)
    given = k.detach().clone()
    given[0, 5, 1, 2] = torch.nan
    said = told_in(lambda: step(given if rank == ODD else k))
    return said, before and torch.equal(step()[0], plain)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_tile_with_a_nan_is_named(way):
    """Causal: some ranks do not see the key, and are told."""
    tile = (r"got NaN in out of '.*', which k of '(.*?)'.* had before, after Attend of .*, "
            r"step \d+ of \d+, forward; look")  # fmt: skip
    for rank, (said, same) in enumerate(run_ranks(of_nan, 4, way)):
        assert same and "in layer 3, forward" in said and re.search(tile, said), said
        assert rank == ODD or "must succeed" not in said or "on cp rank 1" in said
        assert rank != ODD or way != "ring" or "which k of 'kv' rows" in said


def alone(**options):
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    return burst_attention(q, k, v, config=BurstConfig(backend="reference", **options)), q


@pytest.mark.parametrize(
    "name, op, where", [("forward", "Attend", "out"), ("backward", "AttendBackward", "dq")]
)
def test_a_kernel_that_makes_nan_is_named_in_both_passes(name, op, where):
    kernel = type(backends()["reference"])
    right = getattr(kernel, name)

    def wrong(*args, **options):
        found = right(*args, **options)
        found[0].fill_(torch.nan)
        return found

    out, q = alone(nan_guard=True)
    with patch.object(kernel, name, wrong):
        again = partial(torch.autograd.grad, out.sum(), q)
        said = told_in(again if name == "backward" else partial(alone, nan_guard=True))
    assert f"got NaN in {where} of " in said and f"after {op} of" in said
    assert "which the inputs had not" in said


def test_without_the_guard_nan_is_the_result():
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in range(3))
    k[0, 3] = torch.nan
    assert burst_attention(q, k, v)[0, 3:].isnan().all()
