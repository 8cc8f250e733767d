"""What Megatron takes from Apex, together with burst attention and the fused loss.

Apex's kernels are CUDA extensions; `tests/gpu/test_apex.py` runs the one for gradients of weights
where it is built. Here functions with their signatures
(csrc/megatron/fused_weight_gradient_dense.cpp, normalization/fused_layer_norm.py) that compute the
same in torch replace them where Megatron looks. Guards against gradients that the fused loss and a
fused accumulation lose or count twice in one `main_grad`, and norms that specs lose.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.mcore.loss_model import FORWARD, Case, batch_of, begin, model_of
from tests.mcore.test_loss import step, wrapped
from tests.ranks import run_ranks

pytestmark = pytest.mark.numeric
CASES = [
    Case(cp=2, tied=tied, ddp=True, fused=fused, options={"normalization": "LayerNorm"})
    for tied in (False, True)
    for fused in (Case.fused, FORWARD)
]


def wgrad_gemm_accum_fp32(input_2d, d_output_2d, d_weight):
    """d_weight [out, in] += d_output^T input, in float32."""
    calls["wgrad"] += 1
    d_weight.addmm_(d_output_2d.flatten(0, -2).t(), input_2d.flatten(0, -2))


class FusedLayerNormAffineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        calls["norm"] += 1
        ctx.save_for_backward(input, weight, bias)
        ctx.norm = normalized_shape, eps
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    @staticmethod
    def backward(ctx, grad):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        shape, eps = ctx.norm
        with torch.enable_grad():
            out = F.layer_norm(leaves[0], shape, *leaves[1:], eps)
        return *torch.autograd.grad(out, leaves, grad), None, None, None


calls = {"wgrad": 0, "norm": 0}


@contextmanager
def apex():
    """Megatron as if it had found Apex when imported."""
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_block

    extension = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    norm = fused_layer_norm.FusedLayerNorm
    found = (
        (layers, "fused_weight_gradient_mlp_cuda", extension),
        (layers, "_grad_accum_fusion_available", True),
        (fused_layer_norm, "FusedLayerNormAffineFunction", FusedLayerNormAffineFunction),
        (fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True),
        (backends, "LNImpl", norm),
        (transformer_block, "LayerNormImpl", norm),
    )
    with ExitStack() as stack:
        for module, name, value in found:
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        yield


def steps(case: Case) -> dict:
    """Loss and gradients after two micro-batches."""
    from megatron_burst import fuse_loss

    bare = model_of(case)
    model, batch = wrapped(case, bare), batch_of(case)
    fuse_loss(bare, case.fused)
    with model.no_sync():
        out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        (3 * out).sum().backward()
    return step(case, model, batch)


def compared(rank):
    """By case: relative errors of losses and gradients, and calls of Apex's functions."""
    found = []
    for case in CASES:
        begin(case)
        truth = steps(case)
        calls.update(wgrad=0, norm=0)
        fusion = replace(case, options=case.options | {"gradient_accumulation_fusion": True})
        with apex():
            ours = steps(fusion)
        assert ours.keys() == truth.keys()
        errors = {n: float((ours[n] - g).abs().max() / g.abs().max()) for n, g in truth.items()}
        found.append((errors, dict(calls)))
    return found


def test_fused_accumulation_and_norms_change_nothing():
    """Four linear layers in each of two layers, two micro-batches; two norms per layer and the
    final one."""
    for found in run_ranks(compared, 2):
        for case, (errors, called) in zip(CASES, found, strict=True):
            assert max(errors.values()) < 2e-5, (case, errors)
            assert called == {"wgrad": 4 * 2 * 2, "norm": 5 * 2}
