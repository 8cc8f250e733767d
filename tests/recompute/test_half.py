"""Keeping the later half, on simulated ranks: row order, bytes, memory.

Guards against rows returned to the wrong place, a call over the wrong keys, and buffers read too
early.
"""

import pytest
import torch

from megatron_burst.call import attention_shape
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import backends
from megatron_burst.recompute.half import LaterHalf
from megatron_burst.recompute.half_plan import early_half
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Kernel, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import problem
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of

CASES = [  # layout, nodes, ranks, rows per rank, whether they are resharded
    (layout, nodes, size, tokens, reshard)
    for layout, reshard in (
        (Layout.ZIGZAG, False),
        (Layout.ZIGZAG, True),
        (Layout.STRIPED, False),
        (Layout.CONTIGUOUS, True),
    )
    for nodes, size in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 6), (1, 7))
    for tokens in (8, 6)
    if tokens % 4 == 0 or not reshard
]


def passes_of(topology, layout, shard, carrier):
    shape = attention_shape([x.shape for x in shard], torch.float64)
    spec = Spec(
        topology, shape, layout, kernel=Kernel(device="cpu"), again=True, inter="ring", intra="ring"
    )
    return Passes(resolve(spec).spec, backends()["reference"], carrier, 0.3, torch.float64)


@pytest.mark.parametrize("layout, nodes, size, tokens, reshard", CASES)
def test_the_whole_is_restored_from_its_later_half(layout, nodes, size, tokens, reshard):
    topology, plan = pretend_nodes(size, nodes), early_half(layout, size, tokens, reshard)
    tensors = problem(size, tokens, (4, 2), (6, 3), seed=0)[:3]

    def one(rank, carrier):
        shard = tuple(x[:, rows_of(layout, rank, size, tokens)] for x in tensors)
        whole = passes_of(topology, layout, shard, carrier).forward(*shard)[:2]
        half = [x[:, : tokens // 2] for x in shard]
        early = passes_of(topology, plan.layout, half, carrier)
        policy, before = LaterHalf(plan, early, carrier), carrier.sent_bytes
        kept = policy.trim(whole)
        restored = policy.restore(kept, shard)
        return whole, kept, restored, carrier.sent_bytes - before, before

    results, _ = run_simulated(one, size, seed=tokens)
    for whole, kept, restored, sent, sent_whole in results:
        for x, y in zip(restored, whole, strict=True):
            assert (x - y).abs().max() <= 1e-12 and x.dtype == y.dtype
        assert sum(map(_bytes, kept)) * 2 == sum(map(_bytes, whole))
        if not reshard:
            assert 2 * sent == sent_whole


def _bytes(x):
    return x.untyped_storage().nbytes()
