"""Rows of packed samples against TransformerEngine's kernel that computes them; one GPU."""

from itertools import product

import pytest
import torch

from tests.gpu import needs_gpus, needs_transformer_engine
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(), needs_transformer_engine()]
CASES = list(product([(48,), (16, 48, 16, 96), (0, 16, 0, 0, 32, 0)], [1, 2, 8]))


def rows(rank):
    """(TransformerEngine's, ours) of each rank of each case."""
    import transformer_engine.pytorch  # noqa: F401  finds the extension
    import transformer_engine_torch as te

    from megatron_burst.mcore.packed import partitioned_indices

    found = []
    for lengths, world_size in CASES:
        boundaries = torch.tensor((0, *lengths), device="cuda").cumsum(0).int()
        sizes = [(sum(lengths), world_size, rank) for rank in range(world_size)]
        both = te.thd_get_partitioned_indices, partitioned_indices
        every = [tuple(make(boundaries, *each) for make in both) for each in sizes]
        assert all(x.is_cuda for pair in every for x in pair)
        found.append([tuple(x.cpu() for x in pair) for pair in every])
    return found


def test_rows_are_transformer_engines():
    (found,) = run_ranks(rows, 1, backend="nccl", fresh=True)
    assert len(found) == len(CASES)
    for case, every in zip(CASES, found, strict=True):
        for truth, got in every:
            assert got.dtype == truth.dtype, case
            assert torch.equal(got, truth), case
