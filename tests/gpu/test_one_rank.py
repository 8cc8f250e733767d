"""One rank on a GPU: each kernel family alone, in both passes.

Guards against kernels that rely on what only merging provided: contiguous lse, an output in another
dtype.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from tests.gpu import needs_gpus
from tests.oracle import full_attention
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
FAMILIES = ["auto", "fa4,fa3,flash-attn,flash", "cudnn", "triton", "reference"]
TOKENS = 1023  # odd


def passes(attend, tensors):
    *leaves, dout = (x.clone().requires_grad_() for x in tensors)
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def torchs_own(q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def relative_errors(rank):
    """Errors of out, dq, dk, dv: by family, and of torch's own attention."""
    generator = torch.Generator("cuda").manual_seed(7)
    tensors = [
        torch.randn(2, TOKENS, heads, 64, generator=generator, device="cuda").bfloat16()
        for heads in (8, 2, 2, 8)
    ]
    with torch.device("cuda"):
        truth = passes(lambda *x: full_attention(*x, True, 0.125), [x.double() for x in tensors])

    def errors(attend):
        pairs = zip(passes(attend, tensors), truth, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    found = {"torch": errors(torchs_own)}
    for family in FAMILIES:
        config = BurstConfig(backend=family)
        found[family] = errors(lambda *x, config=config: burst_attention(*x, config=config))
    return found


def test_every_family_is_as_exact_alone_as_torchs_own_attention():
    """At most twice torch's error, the rule for low precision."""
    (found,) = run_ranks(relative_errors, 1, backend="nccl")
    theirs = found.pop("torch")
    for family, ours in found.items():
        for error, baseline in zip(ours, theirs, strict=True):
            assert error <= 2 * baseline + 1e-7, (family, ours, theirs)
