"""Bits of several ranks beside those of one, with each kernel.

Guards against kernels whose bits depend on the number of heads of a call, and against a delta or a
rounding that depends on the number of ranks.
"""

from dataclasses import replace

import pytest
import torch

from megatron_burst.config import BurstConfig, Force
from megatron_burst.kernels.backends import backends
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS
from tests.bits import CASES, HEADS, NAMES, Problem, equal_in, groups_of
from tests.gpu import needs_gpus
from tests.gpu.test_gather import kernels, problem_for
from tests.options import burst_config
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
KERNELS = [name for name in ("fa4", "triton") if name in kernels()]
OTHERS = [name for name in ("cudnn", "flash") if name in kernels()]  # which are refused


def cases_of(kernel: str) -> list[str]:
    """The masks that a kernel has, by itself or in several calls."""
    can = backends()[kernel].capability
    able = can.masks | can.composed
    needs = {
        name: {*[WINDOWS] * case.windowed, *[DOCUMENTS] * bool(case.edges), *[SLICES] * case.prefix}
        for name, case in CASES.items()
    }
    return [name for name, of in needs.items() if of <= able]


def found_on(rank, kernel, heads, cases, options) -> dict:
    """By mask and number of ranks, which tensors are equal."""
    groups, found = groups_of(4), {}
    for case in cases:
        config = burst_config(backend=kernel, nodes=1, transfer="send", **options)
        problem = Problem(case, HEADS[heads], config, torch.bfloat16, 1024, 128, "cuda")
        found |= {(case, size): x for size, x in equal_in(problem, groups).items()}
    return found


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kernel", KERNELS or ["none"])
def test_bits_are_those_of_one_rank(kernel, heads, draw):
    settings = dict(backend="nccl", timeout_s=300)
    cases = cases_of(kernel)
    some = draw(cases, 4 if (kernel, heads) == ("fa4", "MHA") else 3)
    ranks = run_ranks(found_on, 4, kernel, heads, some, {"invariant": True}, **settings)
    for rank, found in enumerate(ranks):
        for (case, size), equal in found.items():
            shared = HEADS[heads][1] % size
            wanted = [n for n in NAMES if not (shared and n in ("dk", "dv"))]
            assert all(equal[name] for name in wanted), (rank, case, size, equal)


@pytest.mark.parametrize("kernel", OTHERS or ["none"])
def test_kernels_that_may_split_keys_are_refused(kernel, draw):
    """What they give in an all-to-all is printed: with few heads and short sequences it differs."""
    cases, settings = draw(cases_of(kernel), 4), dict(backend="nccl", timeout_s=300)
    found = run_ranks(found_on, 4, kernel, "MHA", cases, {"intra": "a2a"}, **settings)
    print(kernel, found[0])
    problem = replace(problem_for((8, 8, 128)), invariant=True)
    assert "depend on their number" in backends()[kernel].capability.refusal(problem)


def expanded_on(rank, kernel) -> dict:
    groups = groups_of(4)
    config = BurstConfig(backend=kernel, nodes=1, force=Force(transfer="send"), invariant=True)
    problem = Problem("causal", HEADS["copied"], config, torch.bfloat16, 1024, 128, "cuda")
    return equal_in(problem, groups, expand=2)


def test_repeated_kv_heads_are_summed_in_one_order():
    """The gradients of KV heads that ranks would share, if the caller repeats them."""
    for found in run_ranks(expanded_on, 4, "triton", backend="nccl", timeout_s=300):
        assert all(all(equal.values()) for equal in found.values()), found
