"""Keeping the later rows, on simulated ranks: row order, bytes, memory.

Guards against rows returned to the wrong place, a call over the wrong keys, and buffers read too
early.
"""

import pytest
import torch

from megatron_burst.call import attention_shape
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.backends import backends
from megatron_burst.recompute.later import LaterRows
from megatron_burst.recompute.later_plan import early_rows
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Kernel, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import problem
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of

pytestmark = pytest.mark.numeric
CASES = [  # layout, nodes, ranks, rows per rank, early rows, whether they are resharded
    (layout, nodes, size, tokens, early, reshard)
    for layout, reshard in (
        (Layout.ZIGZAG, False),
        (Layout.ZIGZAG, True),
        (Layout.STRIPED, False),
        (Layout.CONTIGUOUS, True),
    )
    for nodes, size in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 6), (1, 7))
    for tokens, early in ((8, 4), (6, 3), (8, 2), (6, 4))
    if (early % 2 == 0 or not reshard)
    and (reshard or layout is Layout.STRIPED or 2 * early == tokens)
]


def passes_of(topology, layout, shard, carrier):
    shape = attention_shape([x.shape for x in shard], torch.float64)
    spec = Spec(
        topology, shape, layout, kernel=Kernel(device="cpu"), again=True, inter="ring", intra="ring"
    )
    return Passes(resolve(spec).spec, backends()["reference"], carrier, 0.3, torch.float64)


@pytest.mark.parametrize("layout, nodes, size, tokens, early, reshard", CASES)
def test_the_whole_is_restored_from_its_later_rows(layout, nodes, size, tokens, early, reshard):
    topology, plan = pretend_nodes(size, nodes), early_rows(layout, size, tokens, early, reshard)
    tensors = problem(size, tokens, (4, 2), (6, 3), seed=0)[:3]

    def one(rank, carrier):
        shard = tuple(x[:, rows_of(layout, rank, size, tokens)] for x in tensors)
        whole = passes_of(topology, layout, shard, carrier).forward(*shard)[:2]
        smaller = passes_of(topology, plan.layout, [x[:, :early] for x in shard], carrier)
        policy, before = LaterRows(plan, smaller, carrier), carrier.sent_bytes
        kept = policy.trim(whole)
        restored = policy.restore(kept, shard)
        return whole, kept, restored, carrier.sent_bytes - before, before

    results, _ = run_simulated(one, size, seed=tokens)
    for whole, kept, restored, sent, sent_whole in results:
        for x, y in zip(restored, whole, strict=True):
            assert (x - y).abs().max() <= 1e-12 and x.dtype == y.dtype
        assert sum(map(_bytes, kept)) * tokens == sum(map(_bytes, whole)) * (tokens - early)
        if not reshard:
            assert tokens * sent == early * sent_whole


def _bytes(x):
    return x.untyped_storage().nbytes()
