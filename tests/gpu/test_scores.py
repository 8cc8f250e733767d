"""Capped scores and the largest score of each head on GPUs: several ranks against float64, and
TransformerEngine's own largest logits.

Guards against kernels that are not told the cap, and scores of other heads or of masked keys.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.schedule.mask import Mask
from tests.gpu import SEVERAL, needs_gpus, needs_transformer_engine
from tests.oracle import largest_of, rows_of, seen_by, truth_of
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
TOKENS, SCALE, CAP = 2048, 0.3, 4.0  # scores up to about 15
WAYS = {
    "chosen": BurstConfig(), "ring": BurstConfig(intra="ring"), "a2a": BurstConfig(intra="a2a"),
    "two nodes": BurstConfig(nodes=2), "triton": BurstConfig(backend="triton"),
}  # fmt: skip
PLAIN = {"cudnn": BurstConfig(backend="cudnn"), "flash": BurstConfig(backend="flash")}
EDGES = [0, 300, 301, 1500, TOKENS]
MASKS = {
    "causal": ({}, Mask(None, 0)), "window": ({"window": (100, 0)}, Mask(100, 0)),
    "documents": ({"cu_seqlens": torch.tensor(EDGES)}, Mask(None, 0, True)),
}  # fmt: skip


def sample(dtype=torch.bfloat16):
    """q, k, v, dout of the whole sequence, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(7)
    sizes = (8, 128), (2, 128), (2, 128), (8, 128)
    return [torch.randn(1, TOKENS, *x, generator=generator, device="cuda").to(dtype) for x in sizes]


def compare(rank, world, cap):
    """By mask and way: relative errors of out, dq, dk, dv, and of the largest scores."""
    tensors, report = sample(), {}
    rows = rows_of("zigzag", rank, world, TOKENS // world).cuda()
    for name, (options, mask) in MASKS.items():
        seen = seen_by(mask, EDGES if mask.documents else (), TOKENS).cuda()
        whole = truth_of(tensors, SCALE, seen=seen, softcap=cap)
        most = largest_of(*(x.double() for x in tensors[:2]), SCALE, seen, cap)
        for way, config in (WAYS if cap or name != "causal" else WAYS | PLAIN).items():
            if mask.positional and way in ("ring", "two nodes"):
                continue
            leaves = [x[:, rows].clone().requires_grad_() for x in tensors[:3]]
            out, largest = burst_attention(
                *leaves, config=config, softmax_scale=SCALE, softcap=cap, return_max_logit=True,
                **options,
            )  # fmt: skip
            grads = torch.autograd.grad(out, leaves, tensors[3][:, rows])
            pairs = zip((out, *grads), whole, strict=True)
            squares = torch.stack([((a.double() - b[:, rows]) ** 2).sum() for a, b in pairs])
            dist.all_reduce(squares)
            sizes = torch.stack([(x**2).sum() for x in whole])
            away = float((largest.double() - most).abs().max())
            report[name, way] = [*(squares / sizes).sqrt().tolist(), away]
    return report


@pytest.mark.parametrize("cap", [0.0, CAP], ids=["plain", "capped"])
def test_several_ranks_equal_float64(cap):
    """To bf16's roundings, and largest scores to float32's, or to the kernel's own tanh."""
    report = run_ranks(compare, SEVERAL, SEVERAL, cap, backend="nccl", timeout_s=300)[0]
    print(report)
    assert len(report) >= 11
    for case, (*errors, away) in report.items():
        assert max(errors) <= 8e-3, (case, errors)
        assert away <= (CAP * 2**-10 if cap else 1e-4), (case, away)


def beside(rank, world):
    """TransformerEngine's largest logits of the whole sequence, and burst's of its shards."""
    from transformer_engine.pytorch import DotProductAttention

    tensors = sample()[:3]
    rows = rows_of("zigzag", rank, world, TOKENS // world).cuda()
    module = DotProductAttention(
        num_attention_heads=8, kv_channels=128, num_gqa_groups=2, attention_dropout=0.0,
        qkv_format="sbhd", attn_mask_type="causal", softmax_scale=SCALE, return_max_logit=True,
    )  # fmt: skip
    _, theirs = module(*(x.transpose(0, 1).contiguous() for x in tensors))
    _, ours = burst_attention(
        *(x[:, rows] for x in tensors), softmax_scale=SCALE, return_max_logit=True
    )
    return theirs.float().tolist(), ours.tolist()


@needs_transformer_engine()
@pytest.mark.parametrize("world", [1, 2])
def test_the_largest_logits_are_those_of_transformer_engine(world):
    """TransformerEngine returns them in bf16. With several ranks it needs cuDNN 9.21."""
    environment = {"NVTE_FLASH_ATTN": "0"}  # which returns none
    for theirs, ours in run_ranks(
        beside, world, world, backend="nccl", environment=environment, timeout_s=300, fresh=True
    ):
        assert ours == pytest.approx(theirs, rel=2**-8)
