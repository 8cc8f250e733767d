"""Keeping the later half, on simulated ranks: row order, bytes, memory.

Guards against rows returned to the wrong place, a call over the wrong keys, and buffers read too
early.
"""

import pytest
import torch

from megatron_burst.call import attention_shape
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import backends
from megatron_burst.recompute.later import KeepTail
from megatron_burst.recompute.later_plan import early_rows
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Kernel, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import problem
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of

pytestmark = pytest.mark.numeric
CASES = [  # layout, whether early rows are resharded, nodes, ranks, rows per rank
    (layout, reshard, nodes, size, tokens)
    for layout, reshard, lengths in (
        (Layout.ZIGZAG, False, (8, 6)),
        (Layout.ZIGZAG, True, (8, 4)),
        (Layout.STRIPED, False, (8, 6, 5, 7)),
    )
    for nodes, size in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 6), (1, 7))
    for tokens in lengths
]


def passes_of(topology, layout, shard, carrier):
    shape = attention_shape([x.shape for x in shard], torch.float64)
    spec = Spec(
        topology,
        shape,
        layout,
        kernel=Kernel(device="cpu"),
        resends=True,
        inter="ring",
        intra="ring",
    )
    return Passes(resolve(spec)[0], backends()["reference"], carrier, 0.3, torch.float64)


@pytest.mark.parametrize("layout, reshard, nodes, size, tokens", CASES)
def test_all_rows_are_restored_from_the_tail(layout, reshard, nodes, size, tokens):
    topology, plan = pretend_nodes(size, nodes), early_rows(layout, size, tokens, reshard)
    tensors = problem(size, tokens, (4, 2), (6, 3), seed=0)[:3]

    def run(rank, carrier):
        shard = tuple(x[:, rows_of(layout, rank, size, tokens)] for x in tensors)
        outs = passes_of(topology, layout, shard, carrier).forward(*shard)[:2]
        early = [x[:, : plan.tokens] for x in shard]
        policy = KeepTail(plan, passes_of(topology, plan.layout, early, carrier), carrier)
        before = carrier.sent_bytes
        kept = policy.trim(outs)
        assert carrier.sent_bytes == before
        restored = policy.restore(kept, shard)
        return outs, kept, restored, carrier.sent_bytes - before, before

    results, _ = run_simulated(run, size, seed=tokens)
    for outs, kept, restored, sent, sent_by_all in results:
        for x, y in zip(restored, outs, strict=True):
            assert (x - y).abs().max() <= 1e-12 and x.dtype == y.dtype
        tail = tokens - plan.tokens
        assert sum(map(_bytes, kept)) * tokens == sum(map(_bytes, outs)) * tail
        if not reshard:
            assert tokens * sent == plan.tokens * sent_by_all


def _bytes(x):
    return x.untyped_storage().nbytes()
