"""Compiled attention on GPUs, by torch's own code generator: one graph, the results of eager calls.

Guards against strides that the generated code expects and the operator does not return, streams
that it does not know, and a backward that begins before forward's transfers have ended.
"""

import pytest
import torch
from torch import nn

from megatron_burst import burst_attention, linear_cross_entropy
from tests.gpu import SEVERAL, needs_gpus
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
WIDTH, HEADS, DIM, TOKENS = 512, 4, 128, 2048
OPTIONS = {
    "dense": {}, "window": {"window": (300, 0)},
    "packed": {"cu_seqlens": torch.tensor([0, 700, 701, TOKENS]), "max_seqlen": TOKENS},
}  # fmt: skip


class Block(nn.Module):
    """A layer of a transformer, with something to fuse on both sides of attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.project = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.back, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1024, bias=False)
        self.to("cuda", torch.bfloat16)

    def forward(self, x, labels, options):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        out = burst_attention(q * 1.1, k, v, **options).flatten(2)
        hidden = x + self.back(nn.functional.silu(out))
        return linear_cross_entropy(hidden, self.head.weight, labels)


def compare(rank, world):
    """By case, relative differences of loss and gradients between compiled and eager."""
    generator, report = torch.Generator("cuda").manual_seed(rank), {}
    rows = TOKENS // world
    x = torch.randn(1, rows, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(1024, (1, rows), generator=generator, device="cuda")
    for name, options in OPTIONS.items():
        block, runs = Block(), []
        for call in (block, torch.compile(block, fullgraph=True)):
            for _ in range(2):
                block.zero_grad()
                loss = call(x, labels, options)
                loss.backward()
            runs.append([loss.detach(), *(p.grad.clone() for p in block.parameters())])
        pairs = zip(*runs, strict=True)
        report[name] = max(float((a - b).float().norm() / a.float().norm()) for a, b in pairs)
    return report


@pytest.mark.parametrize("world", [1, SEVERAL])
def test_a_compiled_block_computes_what_an_eager_one_does(world):
    """To bf16: fused operations round less often."""
    for report in run_ranks(compare, world, world, backend="nccl", timeout_s=400, fresh=True):
        assert len(report) == len(OPTIONS)
        assert max(report.values()) <= 2e-2, report
