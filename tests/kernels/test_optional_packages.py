"""Backends of optional packages: stand-ins with their signatures, right and wrong.

A stand-in computes its result with the reference: an argument in the wrong place shows.
"""

import sys
from dataclasses import replace

import pytest
import torch

from megatron_burst.kernels.backends import choose_backend
from megatron_burst.kernels.flash_attn import FlashAttention2, FlashAttention3
from megatron_burst.kernels.interface import Problem, QuerySide
from megatron_burst.kernels.partial import surrogate_out
from megatron_burst.kernels.reference import Reference
from megatron_burst.kernels.visible import CAUSAL, FULL
from tests.kernels.attention import Tile, inputs_of, lay, relative, truth_of

pytestmark = pytest.mark.numeric
TILES = {
    "square": Tile(9, 9, heads=4, heads_kv=2, batch=2, dim_qk=8, dim_v=8, dtype=torch.float64),
    "full": Tile(5, 12, heads=2, heads_kv=2, dim_qk=8, dim_v=8, causal=False, dtype=torch.float64),
}


def compute_backward(dout, q, k, v, out, lse, scale, causal):
    side = QuerySide(q, dout, lse, None, out)
    return Reference().backward(side, k, v, scale, CAUSAL if causal else FULL)


class FlashAttn2:
    """flash_attn.flash_attn_interface 2.8.3."""

    def __init__(self):
        self.deterministic = []

    def _flash_attn_forward(
        self, q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, return_softmax,
    ):  # fmt: skip
        off = dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
        assert off == (0.0, -1, -1, 0.0, None, False)
        return *Reference().forward(q, k, v, softmax_scale, CAUSAL if causal else FULL), None, None

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        off = dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, rng_state
        assert off == (0.0, -1, -1, 0.0, None, None) and softmax_lse.is_contiguous()
        self.deterministic.append(deterministic)
        grads = compute_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal,
    ):  # fmt: skip
        raise NotImplementedError  # tested in tests/kernels/test_varlen.py

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, deterministic,
    ):  # fmt: skip
        raise NotImplementedError


class FlashAttn3:
    """flash_attn_interface of the hopper folder: windows as a pair, a misspelt argument."""

    def _flash_attn_forward(
        self, q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new,
        seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k,
        rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale,
        causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert out is k_new is page_table is None and window_size == (-1, -1)
        return *Reference().forward(q, k, v, softmax_scale, CAUSAL if causal else FULL), None, None

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert not deterministic
        grads = compute_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)


FLASH_ATTN = "flash_attn.flash_attn_interface"
PACKAGES = {  # backend, module, stand-in
    "flash-attn": (FlashAttention2, FLASH_ATTN, FlashAttn2),
    "fa3": (FlashAttention3, "flash_attn_interface", FlashAttn3),
    "fa3, packaged": (FlashAttention3, "flash_attn_3.flash_attn_interface", FlashAttn3),
}


@pytest.mark.parametrize("into", [False, True], ids=["returned", "into"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("backend, module, stand_in", PACKAGES.values(), ids=PACKAGES)
def test_what_a_package_is_asked_for(monkeypatch, backend, module, stand_in, tile, into):
    """Guards against swapped arguments, strides that a package ignores, output buffers left out."""
    monkeypatch.setitem(sys.modules, module, stand_in())
    backend = backend()
    assert backend.missing() is None
    q, k, v, dout = inputs = inputs_of(replace(tile, strided=True), "cpu")
    truth = truth_of(tile, inputs, 0.5)
    names = ("dq", "dk", "dv")
    targets = [lay(truth[x] + 9, True) if into else None for x in ("out", *names)]
    out, lse = backend.forward(
        q, k, v, tile.scale, tile.visible, into=(targets[0], truth["lse"] + 9) if into else None
    )
    delta = (dout * truth["out"]).sum(-1).transpose(1, 2)
    side = QuerySide(q, dout, truth["lse"] + 0.5, delta, surrogate_out(dout, delta))
    grads = backend.backward(
        side, k, v, tile.scale, tile.visible, into=tuple(targets[1:]) if into else None
    )
    for name, got in zip(("out", "lse", *names), (out, lse, *grads), strict=True):
        assert relative(got, truth[name]) <= 1e-12, name
    if into:
        assert all(a is b for a, b in zip((out, *grads), targets, strict=True))


def test_determinism_is_asked_for(monkeypatch):
    kind, module, stand_in = PACKAGES["flash-attn"]
    package = stand_in()
    monkeypatch.setitem(sys.modules, module, package)
    backend, (q, k, v, dout) = kind(), inputs_of(TILES["square"], "cpu")
    out, lse = backend.forward(q, k, v, 1.0, CAUSAL)
    for wanted in (True, False):
        side = QuerySide(q, dout, lse, None, out)
        backend.backward(side, k, v, 1.0, CAUSAL, deterministic=wanted)
    assert package.deterministic == [True, False]


def forward_with(*names, **defaults):
    """A function with these parameter names."""
    arguments = ", ".join([*names, *(f"{name}={value}" for name, value in defaults.items())])
    return eval(f"lambda {arguments}: None")


KNOWN = ("q", "k", "v", "softmax_scale", "causal")
WRONG = {  # flash-attn's forward, and the message about it
    "lacks": (forward_with("q", "k", "v", "causal"), "does not take softmax_scale"),
    "wants": (forward_with(*KNOWN, "sinks"), "requires sinks"),
    "vague": (lambda *args, **kwargs: None, "has no readable signature"),
    "absent": (None, "it has no _flash_attn_forward"),
}


@pytest.mark.parametrize("forward, said", WRONG.values(), ids=WRONG)
def test_a_release_that_is_not_understood_is_refused(monkeypatch, forward, said):
    package = FlashAttn2()
    package._flash_attn_forward = forward
    monkeypatch.setitem(sys.modules, FLASH_ATTN, package)
    said_of_it = FlashAttention2().missing()
    assert said_of_it.startswith("its release is unknown") and said in said_of_it


def test_new_options_with_a_default_are_left_alone(monkeypatch):
    package = FlashAttn2()
    package._flash_attn_forward = forward_with(*KNOWN, sinks=None)
    monkeypatch.setitem(sys.modules, FLASH_ATTN, package)
    assert FlashAttention2().missing() is None


def test_signatures_are_found_in_custom_ops(monkeypatch):
    """flash-attn registers its functions with torch, which hides their signatures."""

    def _flash_attn_forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool
    ) -> torch.Tensor:
        return q.clone()

    package = FlashAttn2()
    define = torch.library.custom_op("megatron_burst_test::forward", mutates_args=())
    package._flash_attn_forward = define(_flash_attn_forward)
    monkeypatch.setitem(sys.modules, FLASH_ATTN, package)
    assert FlashAttention2().missing() is None


def test_what_cannot_be_imported_is_passed_over(monkeypatch):
    """Guards against an import that fails for a reason other than a missing package."""
    for _, module, _ in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, None)
    for backend in (FlashAttention2(), FlashAttention3()):
        assert backend.missing().startswith("it cannot be imported (")


def test_a_kernel_that_is_missing_is_refused_with_the_reason():
    problem = Problem("cuda", torch.bfloat16, 64, 64, arch=9)
    with pytest.raises(ValueError, match="backend fa3 must.*and it cannot be imported"):
        choose_backend(problem, "fa3")
