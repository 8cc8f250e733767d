"""Vision towers whose images are sharded, over NCCL: rows and gradients of one rank.

tests/mcore/test_towers.py has Megatron's models and all cases, on CPUs. Guards against transfers
that only NCCL refuses, and tensors on another device.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu import RANKS, needs_gpus
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
GRIDS = {"more images than ranks": [[1, 2, 2], [1, 4, 4], [2, 2, 4], [1, 2, 6], [1, 4, 2]],
         "fewer": [[1, 2, 2]]}  # fmt: skip


class Tower(nn.Module):
    """Rows of patches, each image for itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.to(device, torch.bfloat16)

    def forward(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        images = self.embed(pixels).split(grid.prod(1).tolist())
        return self.head(torch.cat([(x @ x.T).softmax(-1) @ x for x in images]))


def compare(rank: int, ranks: int) -> dict[str, tuple[float, float]]:
    """Relative errors of the rows and of the summed gradients, by case."""
    from benchmarks.stack import start
    from megatron_burst.mcore.towers import shard_towers

    start(not torch.cuda.is_available(), ranks)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    errors = {}
    for name, grids in GRIDS.items():
        grid = torch.tensor(grids, device=device)
        torch.manual_seed(7)
        pixels = torch.rand(int(grid.prod(1).sum()), 6).to(device, torch.bfloat16)
        whole, model = Tower(device), nn.ModuleDict({"vision_tower": Tower(device)})
        shard_towers(model)
        rows, truth = model["vision_tower"](pixels, grid), whole(pixels, grid)
        weights = torch.arange(truth.numel(), device=device).view_as(truth).sin()
        (rows * weights)[rank::ranks].sum().backward()  # a token is on one rank
        (truth * weights).sum().backward()
        grads = [torch.cat([x.grad.flatten().float() for x in tower.parameters()])
                 for tower in (model, whole)]  # fmt: skip
        dist.all_reduce(grads[0])
        errors[name] = relative(rows.detach(), truth.detach()), relative(*grads)
    return errors


def relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.float() - truth.float()).norm() / truth.float().norm())


def test_rows_and_gradients_are_those_of_one_rank():
    """Rows to products of other shapes in bf16, 2^-8 a rounding; gradients to sums of them."""
    for errors in run_ranks(compare, RANKS, RANKS, backend="nccl", timeout_s=300, fresh=True):
        assert len(errors) == 2
        assert all(max(each) <= 2e-2 for each in errors.values()), errors
