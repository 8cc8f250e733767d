"""Rows of packed samples against TransformerEngine's kernel that computes them; one GPU."""

import pytest
import torch

from tests.gpu import needs_gpus

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("lengths", [(48,), (16, 48, 16, 96), (0, 16, 0, 0, 32, 0)], ids=str)
def test_rows_are_transformer_engines(lengths, world_size):
    te = pytest.importorskip("transformer_engine_torch")
    from megatron_burst.mcore.packed import partitioned_indices

    boundaries = torch.tensor((0, *lengths), device="cuda").cumsum(0).int()
    for rank in range(world_size):
        sizes = sum(lengths), world_size, rank
        truth = te.thd_get_partitioned_indices(boundaries, *sizes)
        got = partitioned_indices(boundaries, *sizes)
        assert got.dtype == truth.dtype and got.device == truth.device
        assert torch.equal(got, truth)
