"""Next tokens of sharded and packed samples on GPUs: labels as on the CPU, without waiting.

Guards against waiting for the device, boundaries read on the CPU, and ids that NCCL delivers in
another order.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst import next_tokens
from megatron_burst.schedule.layout import Layout
from tests.gpu import needs_gpus
from tests.loss.packed import random_packed
from tests.loss.test_next_tokens import LAYOUTS, differing, log_prob_errors
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


def unwaited(packed, rank: int, group) -> bool:
    """Whether labels found without a wait are right."""
    places = packed.places(rank)
    ids = packed.ids[places].cuda()
    boundaries = {name: x.cuda() for name, x in packed.boundaries.items()}
    options = dict(group=group, layout=packed.layout, **boundaries)
    next_tokens(ids, **options)  # ranks agree once
    torch.cuda.set_sync_debug_mode("error")
    try:
        labels = next_tokens(ids, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.equal(labels.cpu(), packed.labels()[places])


def test_one_rank_finds_them_without_a_wait():
    assert all(unwaited(random_packed(seed, 1, Layout.ZIGZAG), 0, None) for seed in range(8))


def over_ranks(rank: int) -> dict:
    world = dist.group.WORLD
    samples = [random_packed(seed, 2, layout) for layout in LAYOUTS for seed in range(6)]
    assert all(unwaited(packed, rank, world) for packed in samples)
    return {
        (packed.layout, i): log_prob_errors(packed, rank, world, device="cuda")
        for i, packed in enumerate(samples)
    }


def test_two_ranks_have_the_log_probabilities_of_the_whole_sample():
    for found in run_ranks(over_ranks, 2, backend="nccl"):
        assert len(found) == 24 and max(found.values()) < 1e-12, found


def test_boundaries_that_differ_make_all_losses_nan():
    assert run_ranks(differing, 2, "cuda", backend="nccl", fresh=True) == [(True, 4)] * 2
