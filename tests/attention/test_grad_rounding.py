"""Gradients that go straight home: the model's dtype between nodes costs one rounding.

Guards against sums that are rounded on their way, whose errors grow with the number of nodes.
"""

from itertools import product

import pytest
import torch

from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import Passes, Way, problem, truth
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of
from tests.sampling import crossed

WAYS = [Way(*each) for each in product(("gather", "ring"), Circulate)]
GRIDS = crossed(WAYS, [(8, 1), (4, 2)], 1) + crossed(WAYS, [(2, 1), (16, 1), (8, 2)], 0)


def errors(nodes, ranks, way, grad_dtype):
    """Relative errors of dq, dk and dv in bf16."""
    size = nodes * ranks
    tensors = [x.bfloat16() for x in problem(16, 16, (2, 2), (32, 32), seed=5)]
    tokens = tensors[0].shape[1] // size

    def one(rank, carrier):
        rows = rows_of(way.layout, rank, size, tokens)
        shard = [x[:, rows] for x in tensors]
        results = Passes(way, pretend_nodes(size, nodes), shard, carrier, grad_dtype).both(*shard)
        return rows, results[1:]

    results, _ = run_simulated(one, size)
    expected = truth(*(x.double() for x in tensors), way.mask, way.scale)[1:]
    found = []
    for index, true in enumerate(expected):
        got = torch.empty_like(true)
        for rows, shards in results:
            got[:, rows] = shards[index].bfloat16().double()
        found.append(float((got - true).norm() / true.norm()))
    return found


@pytest.mark.parametrize("way, nodes, ranks", GRIDS)
def test_contributions_are_rounded_once_however_many_nodes_there_are(way, nodes, ranks):
    """Those of different nodes add up like noise. So to round each of them costs as much as to
    round their sum, which float32 between nodes does alone; a gather also rounds the shares of each
    rank. A tenth for the sample's chance."""
    roundings = 2 + (way.mode == "gather")
    narrow, wide = (errors(nodes, ranks, way, d) for d in (torch.bfloat16, torch.float32))
    for rounded, exact in zip(narrow, wide, strict=True):
        assert rounded <= 1.1 * roundings**0.5 * exact
