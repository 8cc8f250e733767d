"""Other libraries' context parallelism on GPUs, as benchmarks run it: their kernels over NCCL.

Guards against rows of it that compare a wrong answer; torch's own runs on GPUs alone.
"""

from dataclasses import replace

import pytest

from benchmarks.cases import Case
from tests.benchmarks.test_library_peers import (
    DOCUMENTS,
    SIZES,
    WINDOW,
    errors,
    needs,
    packed_errors,
)
from tests.gpu import SEVERAL, needs_gpus
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
BF16 = 0.02  # relative
WIDE = {"seq": 1024, "head_dim_qk": 64, "head_dim_v": 64}
IMPLS = {
    "torch": ["torch"],
    "deepspeed": ["ulysses", "ulysses:cudnn"],
    "yunchang": ["yunchang", "yunchang:ring+cudnn", "yunchang:ring+flash"],
}


def of_sequences(rank, impls, masks):
    return {
        (name, mask): error
        for mask in masks
        for name, error in errors(rank, impls, Case(**SIZES | WIDE, mask=mask), "cuda").items()
    }


def of_samples(rank, impls):
    cases = [replace(case, **WIDE) for case in (DOCUMENTS, WINDOW)]
    return [packed_errors(rank, impls, case, "cuda") for case in cases]


@pytest.mark.parametrize("ranks", sorted({2, SEVERAL}))
@pytest.mark.parametrize(
    "module",
    ["torch", *(pytest.param(name, marks=needs(name)) for name in ("deepspeed", "yunchang"))],
)
def test_attention_and_gradients(module, ranks):
    masks = ["causal"] if module == "yunchang" else ["causal", "full"]
    for found in run_ranks(of_sequences, ranks, IMPLS[module], masks, backend="nccl", fresh=True):
        wrong = {name: error for name, error in found.items() if isinstance(error, str)}
        assert set(wrong) <= {("yunchang:usp+auto", "causal")}  # of fewer than 4 ranks
        assert all(error < BF16 for name, error in found.items() if name not in wrong), found


@pytest.mark.parametrize(
    "impl",
    [  # torch compiles and times many kernels of FlexAttention
        pytest.param("flex", marks=pytest.mark.whole),
        pytest.param("ulysses", marks=needs("deepspeed")),
    ],
)
def test_documents_and_windows(impl):
    for found in run_ranks(of_samples, 2, [impl], backend="nccl", fresh=True):
        for each in found:
            assert all(error < BF16 for error in each.values()), each
