"""What is kept within a budget. Guards against a choice that does not fit, or costs too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.rates import Rates
from megatron_burst.recompute.budget import (
    KeepProblem,
    ModuleCost,
    choose_keep,
    choose_modules,
    hides_copy,
    in_flight,
)

GIB = 1 << 30
problems = st.builds(
    KeepProblem,
    layers=st.integers(1, 64),
    in_flight=st.sampled_from([1.0, 2.5, 4.0]),
    layer_bytes=st.integers(1, 4 * GIB),
    tokens=st.sampled_from([4096, 1 << 20]),
    half_saves=st.sampled_from([0.0, 0.53, 0.75]),
)
budgets = st.floats(0, 300 * GIB)


def on_device(problem, choice):
    """Device bytes that a choice needs."""
    if choice.offload:
        return 2 * problem.layer_bytes
    share = {"none": 0, "half": 0.5, "all": 1}[choice.keep]
    return share * choice.layers * problem.layer_bytes * problem.in_flight


def recomputed(problem, choice):
    """Attention forwards that are recomputed."""
    saved = {"none": 0, "half": problem.half_saves, "all": 1}[choice.keep]
    return problem.layers - saved * choice.layers


@given(problems, budgets, budgets)
def test_it_fits_and_nothing_that_fits_recomputes_less(problem, budget, node):
    choice = choose_keep(problem, budget, node)
    assert on_device(problem, choice) <= budget * (1 + 1e-9)
    whole = problem.layer_bytes * problem.in_flight
    if choice.offload:
        assert whole * problem.layers <= node and hides_copy(problem.tokens)
        return
    for saves, size in ((1, whole), (problem.half_saves, whole / 2)):
        layers = min(problem.layers, int(budget // size))
        assert recomputed(problem, choice) <= problem.layers - saves * layers


@pytest.mark.parametrize(
    "budget, node, tokens, expected",
    [
        (32, 0, 1 << 20, "keep all of 32 layers (32.00 GiB in all, 32.00 GiB given)"),
        (31, 99, 1 << 20, "keep all of 32 layers in host memory (32.00 GiB in all, 31.00 GiB gi"),
        (31, 31, 1 << 20, "keep all of 31 layers (32.00 GiB in all"),
        (31, 99, 16384, "keep all of 31 layers (32.00 GiB in all"),
        (16, 0, 1 << 20, "keep half of 32 layers (32.00 GiB in all"),
        (4, 0, 1 << 20, "keep half of 8 layers (32.00 GiB in all"),
        (0.4, 0, 1 << 20, "keep none of 0 layers (32.00 GiB in all"),
    ],
)  # fmt: skip
def test_what_fits_in_words(budget, node, tokens, expected):
    problem = KeepProblem(layers=32, in_flight=1, layer_bytes=GIB, tokens=tokens)
    assert str(choose_keep(problem, budget * GIB, node * GIB)).startswith(expected)


def test_a_slow_host_and_fast_kernels_offload_later():
    problem = KeepProblem(layers=32, in_flight=1, layer_bytes=GIB, tokens=64 << 10)
    offloads = [
        choose_keep(problem, 4 * GIB, 64 * GIB, rates).offload
        for rates in (Rates(), Rates(host_gbs=5.0), Rates(attention_tflops=2000.0))
    ]
    assert offloads == [True, False, False]


def test_half_is_kept_only_where_it_saves_more_than_some_layers_whole():
    """Where rows are not resharded, recomputing half costs about half."""
    problems = [KeepProblem(32, 1, GIB, 4096, half_saves=saves) for saves in (0.75, 0.53, 0.0)]
    found = [
        (choice.keep, choice.layers) for choice in (choose_keep(p, 22 * GIB) for p in problems)
    ]
    assert found == [("half", 32), ("all", 22), ("all", 22)]


def test_micro_batches_in_flight_are_those_of_megatrons_schedules():
    assert [in_flight(4, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(1, 0) == 1
    # interleaved, v=2: warm-up of 2(P-p-1) + P chunks of half a stage, and the running one
    assert [in_flight(4, rank, 2) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]


QKV, PROJ, FC1 = (
    ModuleCost(name, gib * GIB, flops)
    for name, gib, flops in (("qkv", 2, 50), ("proj", 1, 40), ("fc1", 4, 140))
)
COSTS = QKV, PROJ, FC1


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (0, {}), (4, {}), (5, {"proj": 1}), (6, {"proj": 2}), (8, {"proj": 4}),
        (15, {"proj": 4, "fc1": 1, "qkv": 1}), (26, {"proj": 4, "fc1": 4, "qkv": 1}),
        (32, {"proj": 4, "fc1": 4, "qkv": 4}), (100, {"proj": 4, "fc1": 4, "qkv": 4}),
    ],
)  # fmt: skip
def test_modules_share_what_attention_leaves_by_seconds_per_byte(budget, chosen):
    """Four layers of 1 GiB of attention's results; the product of most FLOPs per byte first."""
    problem = KeepProblem(layers=4, in_flight=1, layer_bytes=GIB, tokens=4096)
    assert choose_modules(problem, COSTS, budget * GIB) == chosen


def test_modules_are_counted_for_all_micro_batches_in_flight():
    problem = KeepProblem(layers=4, in_flight=2.5, layer_bytes=GIB, tokens=4096)
    assert choose_modules(problem, [PROJ], 14 * GIB) == {"proj": 1}
