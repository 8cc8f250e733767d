"""Each cell of the table of docs/masks.md: the smallest call is exact, or refused in a sentence."""

import pytest
import torch

from megatron_burst.kernels.backends import backends
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS
from tests.mask_cases import MASKS, assert_as_declared, called, cells, lacks, outcomes
from tests.ranks import run_ranks

ON_CPU = "torch-cpu", "reference"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_each_mask_is_exact_or_refused_in_each_layout_mode_and_kernel(ranks, draw):
    some, unit = draw(cells(ON_CPU, (1, 2)), 60), 2  # so that rows are not units in sentences
    found = run_ranks(outcomes, ranks, some, unit, 8, torch.empty(0, dtype=torch.float64))
    kinds = {type(each) for each in found[0]}
    assert kinds == {str, float} and all(len(each) == len(some) for each in found)
    for of_rank in found:
        for cell, got in zip(some, of_rank, strict=True):
            assert_as_declared(cell, got, ranks, 1e-12, unit)


@pytest.mark.parametrize("name", backends())
def test_a_kernel_takes_the_masks_that_it_declares(name):
    """Besides causal and full: by what the mask needs, counted from its arguments."""
    can = backends()[name].capability
    for mask, example in MASKS.items():
        needs = {WINDOWS} if example.window else set()
        sliced = example.prefix or example.parents  # a tree becomes slices
        needs |= {SLICES} if sliced else {DOCUMENTS} if example.edges else set()
        assert called(example, "zigzag").problem.needs == needs
        missing = needs - can.masks
        if missing == {SLICES} and {WINDOWS, DOCUMENTS} <= can.masks:  # in several calls
            missing = set()
        assert (lacks(can, mask) is None) == (not missing)
        assert not missing or lacks(can, mask) == f"it has no {max(missing)}"
