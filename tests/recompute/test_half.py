"""Keeping the later half, on simulated ranks: rows put together again, bytes, memory.

Catches rows that come back to another place, a call over other keys, and buffers read too early.
"""

import pytest
import torch

from megatron_burst.engine.call import Call
from megatron_burst.engine.run import run_forward
from megatron_burst.kernels.backends import backends
from megatron_burst.plan.half import early_half
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Direction
from megatron_burst.plan.topology import pretend_hosts
from megatron_burst.recompute.half import LaterHalf
from tests.attention.engine import problem
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of

CASES = [  # layout, hosts, ranks, rows of a rank, whether they are dealt out anew
    (layout, hosts, size, tokens, deal)
    for layout, deal in (
        (Layout.ZIGZAG, False),
        (Layout.ZIGZAG, True),
        (Layout.STRIPED, False),
        (Layout.CONTIGUOUS, True),
    )
    for hosts, size in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 6), (1, 7))
    for tokens in (8, 6)
    if tokens % 4 == 0 or not deal
]


def call_of(topology, rank, layout, tokens, carrier):
    rows = dict(layout=layout, mask=Mask.CAUSAL, tokens=tokens)
    schedules = (ring_schedule(topology, rank, direction=d, **rows) for d in Direction)
    return Call(*schedules, backends()["reference"], carrier, 0.3, torch.float64)


@pytest.mark.parametrize("layout, hosts, size, tokens, deal", CASES)
def test_the_whole_is_restored_from_its_later_half(layout, hosts, size, tokens, deal):
    topology, plan = pretend_hosts(size, hosts), early_half(layout, size, tokens, deal)
    tensors = problem(size, tokens, (4, 2), (6, 3), seed=0)[:3]

    def one(rank, carrier):
        shard = tuple(x[:, rows_of(layout, rank, size, tokens)] for x in tensors)
        whole = run_forward(call_of(topology, rank, layout, tokens, carrier), *shard)
        early = call_of(topology, rank, plan.layout, tokens // 2, carrier)
        policy, before = LaterHalf(plan, early, carrier), carrier.sent_bytes
        kept = policy.trim(whole)
        restored = policy.restore(kept, shard)
        return whole, kept, restored, carrier.sent_bytes - before, before

    results, _ = run_simulated(one, size, seed=tokens)
    for whole, kept, restored, sent, sent_whole in results:
        for x, y in zip(restored, whole, strict=True):
            assert (x - y).abs().max() <= 1e-12 and x.dtype == y.dtype
        assert sum(map(_bytes, kept)) * 2 == sum(map(_bytes, whole))
        if not deal:
            assert 2 * sent == sent_whole


def _bytes(x):
    return x.untyped_storage().nbytes()
