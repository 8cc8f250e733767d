"""Keeping on GPUs: bits, device memory and host memory, over NCCL.

Catches copies that are read before they are complete, results that stay on the device though they
wait on the host, and replays of the early half that differ.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, burst_attention
from megatron_burst.engine import planned
from megatron_burst.plan.choose_half import Rates
from megatron_burst.recompute.keep import torch_patches
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
LAYERS, TOKENS, HEADS, DIM = 4, 4096, (8, 2), 64
MODES = {
    "none": BurstConfig(deterministic=True),
    "all": BurstConfig(deterministic=True, keep="all"),
    "offload": BurstConfig(deterministic=True, keep="all", keep_offload=True, keep_host_gib=1.0),
    "half": BurstConfig(deterministic=True, keep="half"),
    "none, hosts": BurstConfig(deterministic=True, hosts=2),
    "half, hosts": BurstConfig(deterministic=True, keep="half", hosts=2),
}
# Whose bytes a mode's are compared with: the hop buffers of two hosts stay as long as their group.
BASES = {"all": "none", "offload": "none", "half": "none", "half, hosts": "none, hosts"}


def run(rank: int, device: str, dtype: torch.dtype, tokens: int) -> dict:
    """By mode: whether gradients of three steps are those of "none" bit by bit, their largest
    relative error, and device bytes between forward and backward."""
    planned.rates = lambda config: Rates(gbs=1e9)  # deals between hosts, whatever the links
    for patch in torch_patches():
        patch.apply()
    width, found, truth = HEADS[0] * DIM, {}, []
    sizes = [HEADS[0] * DIM, HEADS[1] * DIM, HEADS[1] * DIM]
    generator = torch.Generator().manual_seed(rank)
    weights = [
        (torch.randn(width, sum(sizes), generator=generator) / width**0.5).to(device, dtype)
        for _ in range(LAYERS)
    ]

    def layer(x, weight, config):
        q, k, v = (y.unflatten(-1, (-1, DIM)) for y in (x @ weight).split(sizes, dim=-1))
        return x + burst_attention(q, k, v, config=config).flatten(2)

    for name, config in MODES.items():
        grads, between = [], 0
        for step in range(3):
            draw = torch.Generator().manual_seed(100 * rank + step)
            x = torch.randn(1, tokens, width, generator=draw).to(device, dtype).requires_grad_()
            y = x
            for weight in weights:
                y = checkpoint(layer, y, weight, config, use_reentrant=True)
            if device == "cuda":
                torch.cuda.synchronize()
                between = torch.cuda.memory_allocated()
            y.float().square().mean().backward()
            grads.append(x.grad.cpu())
            del x, y
        truth = truth or grads
        errors = [
            float((got - true).abs().max() / true.abs().max())
            for got, true in zip(grads, truth, strict=True)
        ]
        found[name] = all(map(torch.equal, grads, truth)), max(errors), between
    return found


def check(results, kept_bytes: int, tolerance: float) -> None:
    expected = {"all": kept_bytes, "offload": 0}
    expected |= dict.fromkeys(("half", "half, hosts"), kept_bytes / 2)
    for found in results:
        assert found["all"][0] and found["offload"][0]
        assert found["half"][1] <= tolerance and found["half, hosts"][1] <= tolerance
        extra = {name: found[name][-1] - found[base][-1] for name, base in BASES.items()}
        print(extra)
        slack = LAYERS * 4096  # rounding of the allocator
        for name, num_bytes in extra.items():
            assert not kept_bytes or abs(num_bytes - expected[name]) <= slack, (name, extra)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_bits_and_bytes_of_what_is_kept():
    world = max(n for n in (2, 4) if n <= GPUS)
    kept = LAYERS * TOKENS * HEADS[0] * (DIM * 2 + 4)  # out in bf16, lse in fp32
    args = ("cuda", torch.bfloat16, TOKENS)
    check(run_ranks(run, world, *args, backend="nccl", fresh=True), kept, 2e-2)


def test_the_same_on_cpu():
    check(run_ranks(run, 2, "cpu", torch.float32, 16), 0, 1e-5)
