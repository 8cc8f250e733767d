"""Merging of partials, sums, and delta's stand-in in plain torch, against their definitions."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.kernels.partial import (
    merge_parts,
    row_delta,
    sum_parts,
    surrogate_out,
)

pytestmark = pytest.mark.numeric


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 30.0, 2000.0]))
def test_merging_equals_softmax_over_all_keys_in_any_order(seed, spread):
    """Guards against an overflowing or order-dependent merge; scores are up to thousands apart."""
    torch.manual_seed(seed)
    scores = torch.randn(1, 2, 3, 12, dtype=torch.float64) * spread
    v = torch.randn(1, 12, 2, 4, dtype=torch.float64)
    expected = torch.einsum("bhqs,bshd->bqhd", scores.softmax(-1), v)
    for order in ((0, 1, 2), (2, 0, 1)):
        out = torch.zeros(1, 3, 2, 4, dtype=torch.float64)
        lse = torch.full((1, 2, 3), -torch.inf, dtype=torch.float64)
        for part in order:
            keys = slice(4 * part, 4 * part + 4)
            tile = torch.einsum("bhqs,bshd->bqhd", scores[..., keys].softmax(-1), v[:, keys])
            merge_parts(out, lse, [(out, lse), (tile, scores[..., keys].logsumexp(-1))])
        assert (out - expected).abs().max() <= 1e-12
        assert (lse - scores.logsumexp(-1)).abs().max() <= 1e-12 * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_merging_several_parts_rounds_once(dtype):
    """Guards against sums in the parts' dtype, and weights that do not add up to 1 for large
    lse."""
    torch.manual_seed(0)
    parts = [(torch.randn(2, 50, 3, 8).to(dtype), torch.randn(2, 3, 50)) for _ in range(4)]
    for shift in (0.0, 3000.0):
        lses = torch.stack([lse + shift for _, lse in parts]).double()
        weights = lses.softmax(0).transpose(2, 3).unsqueeze(-1)
        expected = sum(x.double() * w for (x, _), w in zip(parts, weights, strict=True))
        out, lse = torch.empty(2, 50, 3, 8, dtype=dtype), torch.empty(2, 3, 50)
        merge_parts(out, lse, [(x, y + shift) for x, y in parts])
        error = (out - expected).abs() - torch.finfo(dtype).eps / 2 * expected.abs()
        assert error.max() <= 1e-6
        assert (lse - lses.logsumexp(0)).abs().max() <= 1e-7 * max(shift, 10)


def test_a_sink_is_one_more_part_without_values():
    """In place, as after a kernel; rows without a key have its lse, unless it is none either."""
    sink = torch.tensor([0.5, -torch.inf])
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    out[:, 0], lse[:, :, 0] = 0, -torch.inf
    weight = (lse - lse.logaddexp(sink.view(1, 2, 1))).exp().nan_to_num()
    expected = out * weight.transpose(1, 2).unsqueeze(-1)
    before = lse.clone()
    merge_parts(out, lse, [(out, lse)], sink)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse, before.logaddexp(sink.view(1, 2, 1)), atol=1e-6)
    assert lse[0, :, 0].tolist() == [0.5, -torch.inf]


def test_a_part_weighs_nothing_where_it_has_seen_nothing_unless_it_is_nan():
    """Guards against a NaN that is lost: FlashAttention gives lse -inf where a score is NaN. In
    place, as in a ring."""
    nan, inf = torch.nan, torch.inf
    out = torch.tensor([0.0, 1.0, 0.0, 3.0]).view(1, 4, 1, 1)
    lse = torch.tensor([[[-inf, 0.5, -inf, 0.5]]])
    other = torch.tensor([2.0, 0.0, 0.0, nan]).view(1, 4, 1, 1)
    merge_parts(out, lse, [(other, torch.tensor([[[0.25, -inf, -inf, -inf]]])), (out, lse)])
    expected = torch.tensor([2.0, 1.0, 0.0, nan])
    assert torch.allclose(out.flatten(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(lse.flatten(), torch.tensor([0.25, 0.5, -inf, 0.5]))


@pytest.mark.parametrize("place", [None, 0, 2])
def test_sums_keep_their_order_and_are_rounded_once(place):
    """Guards against sums in bf16, another order, and an output overwritten before it is read."""
    torch.manual_seed(0)
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16]
    parts = [torch.randn(2, 9, 3, 8).to(dtype) for dtype in dtypes]
    first, second, third, fourth = (part.float() for part in parts)
    expected = (((first + second) + third) + fourth).to(torch.bfloat16)
    target = torch.empty_like(expected) if place is None else parts[place]
    sum_parts(target, parts)
    assert torch.equal(target, expected)


def test_float64_is_summed_in_float64():
    """Guards against a detour through float32, which would hide errors from the float64 tests."""
    parts = [torch.full((1, 1, 1, 1), value, dtype=torch.float64) for value in (1.0, 2.0**-40)]
    sum_parts(parts[0], parts)
    assert float(parts[0]) == 1 + 2.0**-40


def test_on_cpu_triton_is_not_needed():
    """Guards against importing Triton where torch came without it."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from megatron_burst.kernels.partial import surrogate_out, merge_parts, row_delta, sum_parts
x, lse = torch.ones(1, 2, 1, 8), torch.zeros(1, 1, 2)
merge_parts(x, lse, [(x, lse)])
sum_parts(x, [x, surrogate_out(x, row_delta(x, x))])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_that_no_side_has_seen_stays_empty():
    """Guards against the NaN of -inf - -inf."""
    out, lse = torch.zeros(1, 2, 1, 3), torch.full((1, 1, 2), -torch.inf)
    tile_lse = torch.tensor([[[-torch.inf, 0.5]]])
    merge_parts(out, lse, [(out, lse), (torch.ones(1, 2, 1, 3), tile_lse)])
    assert torch.equal(out[0, :, 0, 0], torch.tensor([0.0, 1.0]))
    assert torch.equal(lse, tile_lse)


@pytest.mark.parametrize(
    "dtype, bound",
    [(torch.bfloat16, 1e-6), (torch.float16, 1e-7), (torch.float32, 1e-7), (torch.float64, 1e-15)],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_the_stand_in_has_the_same_delta(dtype, bound, scale):
    """Error relative to |dO||O|; bf16's real, rounded output has about 1e-4 (also checked)."""
    torch.manual_seed(0)
    dout = (torch.randn(2, 500, 4, 64) * scale).to(dtype)
    exact = torch.randn(2, 500, 4, 64, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    delta = (dout.double() * exact).sum(-1).transpose(1, 2)
    size = (dout.double().norm(dim=-1) * exact.norm(dim=-1)).transpose(1, 2)
    stand_in = surrogate_out(dout, delta.to(wide))
    assert stand_in.dtype == dtype and stand_in.ne(0).sum(-1).max() <= 3
    ours = (dout.double() * stand_in.double()).sum(-1).transpose(1, 2)
    assert ((ours - delta) / size).abs().max() <= bound
    if dtype is torch.bfloat16:
        rounded = row_delta(dout, exact.to(dtype)).double()
        assert ((rounded - delta) / size).abs().max() > 100 * bound


def test_a_row_without_gradient_has_an_empty_stand_in():
    dout = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    assert not surrogate_out(dout, torch.zeros(1, 1, 2)).any()
    narrow = torch.ones(1, 2, 1, 2)
    assert torch.equal(surrogate_out(narrow, torch.ones(1, 1, 2)).sum(-1), torch.ones(1, 2, 1))


def test_in_fp16_a_share_that_does_not_fit_is_left_to_the_next_entry():
    """delta / dO may exceed 65504 in fp16; an infinite stand-in would make dQ NaN."""
    dout = torch.full((1, 1, 1, 8), 1e-4, dtype=torch.float16)
    delta = torch.full((1, 1, 1), 16.0)
    stand_in = surrogate_out(dout, delta)
    assert stand_in.isfinite().all()
    assert (row_delta(dout, stand_in) - delta).abs().max() <= 1e-3 * 16
