"""Windows and segments of GPU kernels that cannot run here: stand-ins with their signatures.

A stand-in computes in float64 what its kernel would: how FlashAttention-2 treats bounds, one-query
segments and rows without a key (flash_api.cpp); FlashAttention-4's shapes and output buffers
(interface.py, 4.0.0b36).
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_burst.kernels import torch_gpu as flash
from megatron_burst.kernels.fa4 import FlashAttention4
from megatron_burst.kernels.interface import QuerySide
from megatron_burst.kernels.partial import merge_parts
from megatron_burst.kernels.reference import Reference
from megatron_burst.kernels.torch_gpu import Flash
from megatron_burst.kernels.visible import Segments, Visible
from tests.kernels.bands import Band, Composed, errors_of
from tests.kernels.test_visible import bands

pytestmark = pytest.mark.numeric


def forward(q, k, v, scale, visible, empty, softcap=0.0):
    """(out [t, h, d], lse [h, t]) with `empty` in rows without a key."""
    out, lse = Reference().forward(q[None], k[None], v[None], scale, visible, softcap=softcap)
    assert out.dtype is torch.float64
    return out[0], lse[0].masked_fill(lse[0] == -torch.inf, empty)


def backward(dout, q, k, v, out, lse, scale, visible, delta=None, softcap=0.0):
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    given = delta if delta is None else delta[None]
    side = QuerySide(q[None], dout[None], lse[None], given, out[None])
    grads = Reference().backward(side, k[None], v[None], scale, visible, softcap=softcap)
    return [x[0] for x in grads]


def segments(q, k, cu_q, cu_k, max_q, max_k):
    for x, cu, most in ((q, cu_q, max_q), (k, cu_k, max_k)):
        assert x.dim() == 3 and cu.dtype is torch.int32 and cu.is_contiguous()
        assert cu[0] == 0 and cu[-1] == x.shape[0] and cu.diff().max() <= most
    return Segments(cu_q, cu_k, max_q, max_k)


def of_2(q, k, cu_q, cu_k, max_q, max_k, causal, left, right):
    """What FlashAttention-2 treats as visible."""
    assert max_q > 1 and max_k > 0
    right = 0 if causal else right
    left, right = (-1 if bound >= max_k else bound for bound in (left, right))
    if left < 0 <= right:
        left = max_k
    elif right < 0 <= left:
        right = max_k
    bounds = (None if bound < 0 else bound for bound in (left, right))
    return Visible(*bounds, segments(q, k, cu_q, cu_k, max_q, max_k))


class Aten:
    """The flash attention part of torch.ops.aten."""

    def _flash_attention_forward(
        self, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0 and not return_debug_mask
        if cum_seq_q is None:  # dense
            visible = Visible(None, 0 if is_causal else None)
            return Reference().forward(q, k, v, scale, visible)
        bounds = (-1 if x is None else x for x in (window_size_left, window_size_right))
        visible = of_2(q, k, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, *bounds)
        return *forward(q, k, v, scale, visible, torch.inf), None, None, None

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0 and rng_state.shape == (2,) and unused.shape == ()
        if cum_seq_q is None:
            side = QuerySide(q, dout, lse, None, out)
            visible = Visible(None, 0 if is_causal else None)
            return Reference().backward(side, k, v, scale, visible)
        bounds = (-1 if x is None else x for x in (window_size_left, window_size_right))
        visible = of_2(q, k, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, *bounds)
        return backward(dout, q, k, v, out, lse, scale, visible)


class FlashAttn4:
    """flash_attn.cute.interface 4.0.0b36: None means no bound, any int is taken literally."""

    def visible(self, q, k, causal, left, right, where):
        assert left is None or left >= 0
        assert right is None or right >= 0
        cut = None if where[0] is None else segments(q, k, *where)
        return Visible(left, 0 if causal else right, cut)

    def _flash_attn_fwd(
        self, q, k, v, *, softmax_scale=None, causal=False, return_lse=False, out=None, lse=None,
        window_size_left=None, window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, learnable_sink=None, block_sparse_tensors=None,
        mask_mod=None, aux_tensors=None, softcap=None,
    ):  # fmt: skip
        assert block_sparse_tensors is mask_mod is aux_tensors is None
        where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        visible = self.visible(q, k, causal, window_size_left, window_size_right, where)
        run = Reference().forward if cu_seqlens_q is None else self.varlen
        found = run(q, k, v, softmax_scale, visible, softcap=softcap or 0.0)
        if learnable_sink is not None:
            whole = [x if cu_seqlens_q is None else x.unsqueeze(0) for x in found]
            merge_parts(*whole, [whole], learnable_sink)
        for target, result in zip((out, lse), found, strict=True):
            if target is not None:
                assert target.shape == result.shape
                target.copy_(result)
        assert return_lse
        return found[0] if out is None else out, found[1] if lse is None else lse, None, None, None

    def varlen(self, q, k, v, scale, visible, softcap):
        return forward(q, k, v, scale, visible, -torch.inf, softcap)

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, dlse=None,
        block_sparse_tensors=None, mask_mod=None, aux_tensors=None, softcap=0.0,
    ):  # fmt: skip
        assert block_sparse_tensors is mask_mod is aux_tensors is None
        where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        visible = self.visible(q, k, causal, window_size_left, window_size_right, where)
        delta = (out * dout).sum(-1).transpose(-1, -2) - (0 if dlse is None else dlse)
        if cu_seqlens_q is None:
            side = QuerySide(q, dout, lse, delta, None)
            grads = Reference().backward(side, k, v, softmax_scale, visible, softcap=softcap)
        else:
            of_rows = lse.contiguous(), softmax_scale, visible, delta, softcap
            grads = backward(dout, q, k, v, out, *of_rows)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            if target is not None:
                assert target.shape == grad.shape
                target.copy_(grad)
        return tuple(a if b is None else b for a, b in zip(grads, (dq, dk, dv), strict=True))


KERNELS = {
    "flash": (Flash, patch.object(flash, "_aten", Aten())),
    "fa4": (FlashAttention4, patch.dict(sys.modules, {"flash_attn.cute.interface": FlashAttn4()})),
}


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=80, deadline=None)
@given(band=bands(windows=True), into=st.booleans(), with_delta=st.booleans(), sinks=st.booleans())
@example(band=Band((9,), (3,), None, 4, packed=False), into=False, with_delta=False, sinks=False)
@example(band=Band((9,), (3,), 0, None), into=True, with_delta=True, sinks=True)
@example(band=Band((9, 5), (3, 9), 0, None, softcap=0.5), into=True, with_delta=True, sinks=False)
def test_a_kernel_is_asked_for_what_is_visible(name, band, into, with_delta, sinks):
    kind, stand_in = KERNELS[name]
    with ExitStack() as stack:
        stack.enter_context(stand_in)
        backend = kind()
        assert backend.missing() is None
        with_delta = with_delta and backend.capability.takes_delta
        band = replace(band, sinks=sinks and backend.capability.sinks)
        errors = errors_of(backend, band, into=into, with_delta=with_delta)
    assert all(error <= 1e-12 for error in errors.values()), errors


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("frames", [1, 8, 9, 20])
def test_gradients_of_many_calls_are_summed_once_each(frames, into):
    """Of blocks that all later ones see: calls share keys, with rows and keys that none has between
    and behind them."""
    slices = tuple((7 * n, 7 * n + 5, 0, 5 * n + 4, 0) for n in range(frames))
    band = Band((7 * frames,), (5 * frames + 3,), packed=False, slices=slices)
    errors = errors_of(Composed(Reference()), band, into=into)
    assert all(error < 1e-12 for error in errors.values()), errors
