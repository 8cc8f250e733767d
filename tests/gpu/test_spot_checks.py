"""`check` on GPUs: right calls of each kernel are far from its limits, a wrong tile is an error on
all ranks.

Guards against limits that fit CPUs' roundings alone.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from megatron_burst.attention import burst_attention
from megatron_burst.checks.spot_checks import SpotCheck
from megatron_burst.config import BurstConfig
from megatron_burst.schedule.spec import Direction
from tests.attention.failing import failing
from tests.checks.test_spot_checks import ALL, ODD, Checked, scaled
from tests.faults.acts import told_in
from tests.gpu import needs_gpus
from tests.gpu.test_gather import kernels
from tests.mask_cases import assert_as_declared, cells, outcomes
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = [pytest.mark.gpu, needs_gpus()]
UNIT, DIM = 16, 64  # as in test_masks, whose kernels are compiled
NCCL = {"backend": "nccl", "timeout_s": 300}


def shares(rank, some, like):
    """Outcomes of calls that are all compared, and what was compared: its largest error as a share
    of what is allowed."""
    compare, found = SpotCheck._compare, {}

    def noted(self, direction, places, compared):
        for name, (got, true, squares) in compared.items():
            large = torch.maximum(true.abs(), squares.sqrt()).amax(-1)
            share = (got - true).abs().amax(-1) / (self._tolerance(name) * large + 1e-30)
            found[name] = max(found.get(name, 0.0), float(share.max()))
        compare(self, direction, places, compared)

    with patch.object(SpotCheck, "_compare", noted):
        return outcomes(rank, some, UNIT, DIM, like.cuda()), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, *whole(torch.float16)], ids=str)
def test_right_calls_of_each_kernel_are_far_from_the_limits(dtype, draw):
    some = [Checked(*cell) for cell in draw(cells(kernels(), (1, 2)), 12, 200)]
    for found, worst in run_ranks(shares, 2, some, torch.empty(0, dtype=dtype), **NCCL):
        print(dtype, worst)
        for cell, got in zip(some, found, strict=True):
            assert_as_declared(cell, got, 2, 2e-2, UNIT)
        assert worst.keys() == ALL.keys() and max(worst.values()) < 0.5


def of_wrong(rank, way):
    """What is said of a wrong last operation of a rank's forward, and of its backward, and of the
    right calls that follow."""
    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.randn(1, 512, heads, 128, **like) for heads in (8, 4, 4)]
    config = BurstConfig(check=1, intra=way, nodes=1)

    def step():
        burst_attention(*tensors, config=config, layer=7).square().sum().backward()

    said = []
    for direction in Direction:
        if rank == ODD:
            with failing(direction, "last", act=partial(scaled, 1.5)):  # bfloat16 rounds a percent
                said.append(told_in(step))
        else:
            said.append(told_in(step))
        said.append(told_in(step))
    return said


@pytest.mark.parametrize("way", ["ring", "gather", "a2a"])
def test_a_wrong_tile_of_one_rank_is_an_error_on_all_ranks(way):
    forward, good, backward, fine = zip(*run_ranks(of_wrong, 2, way, **NCCL), strict=True)
    assert {*good, *fine} == {""}
    for sentences, direction in ((forward, "forward"), (backward, "backward")):
        assert len({*sentences}) == 1 and f"in layer 7, {direction}" in sentences[0], sentences
