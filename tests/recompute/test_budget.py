"""What is kept within a budget. Guards against a choice that does not fit, or costs too much."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.rates import Rates
from megatron_burst.recompute.auto.budget import (
    KeepProblem,
    ModuleCost,
    Placed,
    choose_keep,
    choose_modules,
    hides_copy,
    in_flight,
    most,
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
    # of groups of 6 micro-batches: as counted in a run of the schedule below
    assert [in_flight(4, rank, 2, 6) for rank in range(4)] == [6.5, 5.5, 4.5, 3.5]


def held_at_once(pp: int, rank: int, chunks: int, group: int, batches: int = 48) -> list[list[int]]:
    """Micro-batches that wait for backward on a stage, by chunk, after each forward: Megatron's
    interleaved schedule, whose warm-up is get_pp_rank_microbatches' and order is
    get_schedule_table's."""
    order = [
        chunk
        for first in range(0, batches, group)
        for chunk in range(chunks)
        for _ in range(first, min(first + group, batches))
    ]
    backward = (chunks - 1 - chunk for chunk in order)
    warm_up = 2 * (pp - rank - 1) + (chunks - 1) * group
    held, found = [0] * chunks, []
    for place, chunk in enumerate(order):
        held[chunk] += 1
        found.append(list(held))
        if place >= warm_up:
            held[next(backward)] -= 1
    return found


@pytest.mark.parametrize(("chunks", "group"), [(2, 4), (2, 8), (3, 4), (4, 6)])
@pytest.mark.parametrize("rank", [0, 3])
def test_last_layers_of_a_stage_hold_no_more_than_is_counted(chunks, group, rank):
    """Layers are whole from the last one on, so from the last chunk's, of which fewer micro-batches
    wait than of the first one's. Guards against groups larger than the pipeline, which wait too."""
    flying, found = in_flight(4, rank, chunks, group), held_at_once(4, rank, chunks, group)
    for whole in range(1, chunks + 1):  # chunks of one layer
        assert max(sum(held[chunks - whole :]) for held in found) <= whole * flying
    assert max(map(sum, found)) == chunks * flying  # and all of them as many


QKV, PROJ, FC1 = (
    ModuleCost(name, gib * GIB, flops)
    for name, gib, flops in (("qkv", 2, 50), ("proj", 1, 40), ("fc1", 4, 140))
)
COSTS = QKV, PROJ, FC1


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (0, {}), (3.9, {}), (4, "1 1 1"), (5, "2 1 1"), (7, "4 1 1"), (15, "4 3 1"),
        (19, "4 4 1"), (25, "4 4 4"), (100, "4 4 4"),
    ],
)  # fmt: skip
def test_modules_share_what_attention_leaves_by_seconds_per_byte(budget, chosen):
    """Four layers of 1 GiB of attention's results; the product of most FLOPs per byte first. The
    first layer of each costs nothing at the peak, where the running layer's are there anyway."""
    problem = KeepProblem(layers=4, in_flight=1, layer_bytes=GIB, tokens=4096)
    expected = (
        dict(zip(("proj", "fc1", "qkv"), map(int, chosen.split()), strict=True)) if chosen else {}
    )
    got = choose_modules(problem, COSTS, budget * GIB)
    assert got == {name: Placed(layers) for name, layers in expected.items()}


def test_experts_that_get_no_token_of_a_short_micro_batch_are_no_choice():
    """It once divided by their bytes."""
    problem = KeepProblem(layers=4, in_flight=1, layer_bytes=GIB, tokens=4096)
    empty = ModuleCost("fc1", 0, 0)
    assert choose_modules(problem, [empty, PROJ], 100 * GIB) == {"proj": Placed(4)}


def test_modules_are_counted_for_all_micro_batches_in_flight():
    problem = KeepProblem(layers=4, in_flight=2.5, layer_bytes=GIB, tokens=4096)
    assert choose_modules(problem, [PROJ], 14.5 * GIB) == {"proj": Placed(2)}  # 10 and 2 * 2.5 - 1
    assert choose_modules(problem, [PROJ], 13.5 * GIB) == {"proj": Placed(1)}


LONG = KeepProblem(layers=12, in_flight=1, layer_bytes=GIB, tokens=4096, forward_s=1.0)


@pytest.mark.parametrize(
    ("gbs", "node", "chosen"),
    [
        (0.001, 100, Placed(2)),  # no copy is hidden
        (100, 0, Placed(2)),  # nor is there memory
        (100, 100, Placed(1, 11)),
        (100, 20, Placed(3, 2)),
        (4 * GIB / 1e9, 100, Placed(3, 7)),  # 0.9 * 12 s
    ],
)
def test_outputs_go_to_the_host_as_far_as_copies_hide_and_one_layer_can_be_fetched(
    gbs, node, chosen
):
    """12 GiB of attention's results, which go to the host too if they can. Then the device has 4 or
    14 GiB for further layers of fc1, 4 GiB each, and for what is fetched."""
    got = choose_modules(LONG, [FC1], 16 * GIB, node * GIB, Rates(host_gbs=gbs))
    assert got == {"fc1": chosen}


def test_a_small_output_on_the_device_gives_way_to_a_large_one_that_can_be_fetched():
    """Attention leaves 4.6 GiB; fc1 needs 4 of them to be fetched, and all of the host. Guards
    against 4 layers of proj, with which fc1 is recomputed in all layers but one."""
    problem = KeepProblem(layers=4, in_flight=1, layer_bytes=GIB, tokens=4096, forward_s=100.0)
    small = ModuleCost("proj", GIB // 2, 2 * FC1.flops * (GIB // 2) // FC1.num_bytes)
    got = choose_modules(problem, [small, FC1], 8.6 * GIB, 12.3 * GIB)
    assert got == {"proj": Placed(2), "fc1": Placed(1, 3)}


@pytest.mark.parametrize(
    ("turn_s", "layers"), [(0.0, 7), (1.0, 8), (2.0, 9), (60.0, 9)]
)  # copies are two layers behind at most
def test_copies_also_hide_behind_the_loss(turn_s, layers):
    problem, rates = replace(LONG, turn_s=turn_s), Rates(host_gbs=4 * GIB / 1e9)
    got = choose_modules(problem, [FC1], 10 * GIB, 100 * GIB, rates)
    assert got == {"fc1": Placed(2, layers)}


@pytest.mark.parametrize(
    ("placed", "layers", "expected"),
    [
        (Placed(2, 3), 8, "..h.hdhd"),
        (Placed(1, 3), 4, "hhhd"),
        (Placed(2, 6), 8, "dhhhhhhd"),
        (Placed(0, 4), 4, "hhhh"),
        (Placed(2), 4, "..dd"),
        (Placed(), 2, ".."),
    ],
)
def test_layers_on_the_host_are_spread_and_the_last_one_is_on_the_device(placed, layers, expected):
    """Guards against copies of adjacent layers, which fall behind though all of them would hide."""
    words = {True: "h", False: "d", None: "."}
    assert "".join(words[where] for where in placed.spread(layers)) == expected


@given(
    layers=st.integers(1, 40), flying=st.sampled_from([1.0, 2.5, 4.0]), budget=st.floats(0, 300),
    node=st.floats(0, 300), gbs=st.floats(0.1, 100),
)  # fmt: skip
def test_no_choice_exceeds_its_budgets(layers, flying, budget, node, gbs):
    problem = KeepProblem(layers, flying, GIB, 4096, forward_s=0.1)
    rates = Rates(host_gbs=gbs)
    kept = choose_keep(problem, budget * GIB, node * GIB, rates)
    device = (2 if kept.offload else layers * flying) * GIB
    host = layers * flying * GIB if kept.offload else 0
    got = choose_modules(problem, COSTS, budget * GIB, node * GIB, rates)
    for module in COSTS:
        placed = got.get(module.name, Placed())
        assert placed.device + placed.host <= layers and (placed.device or not placed.host)
        device += max(0, placed.device * flying - 1) * module.num_bytes
        device += bool(placed.host) * module.num_bytes
        host += placed.host * flying * module.num_bytes
    if got:
        assert device <= budget * GIB * (1 + 1e-9) and host <= node * GIB * (1 + 1e-9)
        assert host / flying <= max(layers * GIB * kept.offload, layers * 0.1 * gbs * 1e9)


def kept_at_once(chosen, costs):
    """Most bytes of modules that layers before the running one keep in some backward."""
    layers = len(costs)
    kept = [
        sum(
            each.num_bytes
            for each in costs[i]
            if chosen[i].get(each.name, Placed()).spread(layers)[i] is not None
        )
        for i in range(layers)
    ]
    return max(sum(kept[:i]) for i in range(layers))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=12),
    budget=st.floats(0, 150),
)
def test_layers_that_differ_keep_no_more_than_fits_if_they_choose_by_the_largest(sizes, budget):
    """Experts have fc1 of another size than dense layers, and a router. Guards against layers that
    each choose as if all were like it, whose sum exceeded the budget by up to three quarters."""
    costs = [
        (ModuleCost("fc1", fc1 * GIB, fc1), ModuleCost("router", router * GIB, 1, waits=True))
        for fc1, router in sizes
    ]
    problem = KeepProblem(len(costs), 1, GIB, 4096)
    choice = choose_modules(problem, most(costs), budget * GIB)
    assert kept_at_once([choice] * len(costs), costs) <= max(0, budget - len(costs)) * GIB


def test_layers_that_choose_alone_would_exceed_a_budget():
    """So the test above can fail."""
    costs = [(ModuleCost("fc1", gib * GIB, gib),) for gib in (2, 2, 2, 2, 8, 8)]
    problem, budget = KeepProblem(6, 1, GIB, 4096), 18 * GIB
    alone = [choose_modules(problem, each, budget) for each in costs]
    assert kept_at_once(alone, costs) > budget - 6 * GIB
    choice = choose_modules(problem, most(costs), budget)
    assert choice and kept_at_once([choice] * 6, costs) <= budget - 6 * GIB


RATES = Rates(matmul_tflops=1e-12)  # a FLOP takes a second


@pytest.mark.parametrize(
    ("budget", "whole_s", "chosen"),
    [
        (3.9, 400, {}),
        (4, 400, {"layer": Placed(1)}),  # which costs nothing, as do all modules of one layer
        (4, 200, {"proj": Placed(1), "qkv": Placed(1), "fc1": Placed(1)}),
        (12.9, 400, {"layer": Placed(1), "proj": Placed(2), "qkv": Placed(1), "fc1": Placed(1)}),
        (13, 400, {"layer": Placed(2)}),
        (30.9, 300, {"layer": Placed(3), "proj": Placed(1), "qkv": Placed(1), "fc1": Placed(1)}),
        (31, 300, {"layer": Placed(4)}),
        (31, 200, {"proj": Placed(4), "qkv": Placed(4), "fc1": Placed(4)}),
    ],
)
def test_layers_are_kept_whole_where_that_saves_more_time(budget, whole_s, chosen):
    """Four layers that hold 10 GiB, one of which attention's results. The first whole one costs
    nothing, but then the other layers' outputs do: they are all there in its backward."""
    problem = KeepProblem(4, 1, GIB, 4096, whole_bytes=10 * GIB, whole_s=whole_s)
    assert choose_modules(problem, COSTS, budget * GIB, 0, RATES) == chosen


def test_nothing_is_free_where_the_loss_takes_most_memory():
    problem = KeepProblem(4, 1, GIB, 4096, whole_bytes=10 * GIB, whole_s=400, free_bytes=0)
    assert choose_modules(problem, COSTS, 12.9 * GIB, 0, RATES) == {
        "proj": Placed(4), "fc1": Placed(1),
    }  # fmt: skip
    assert choose_modules(problem, COSTS, 13 * GIB, 0, RATES) == {"layer": Placed(1)}


def test_a_whole_layer_also_saves_the_wait_of_its_router():
    problem = KeepProblem(4, 1, GIB, 4096, whole_bytes=2 * GIB, whole_s=10)
    router = ModuleCost("router", GIB // 8, 1, waits=True)
    assert choose_modules(problem, [router], 7 * GIB, 0, RATES) == {"layer": Placed(4)}
    assert choose_modules(problem, [router], 5.5 * GIB, 0, RATES) == {
        "layer": Placed(2), "router": Placed(2),
    }  # fmt: skip


@given(
    layers=st.integers(1, 12), budget=st.floats(0, 150), whole=st.integers(8, 20),
    whole_s=st.floats(0, 1000), free=st.floats(0, 30),
)  # fmt: skip
def test_whole_layers_and_modules_stay_within_a_budget_in_every_backward(
    layers, budget, whole, whole_s, free
):
    """Backward holds what each layer up to the running one keeps, and all of that one, which full
    recomputation holds too. The loss before it holds all, and full recomputation needs less there,
    by what is free. Guards against a free layer where the loss takes most memory."""
    problem = KeepProblem(
        layers, 1, GIB, 4096, whole_bytes=whole * GIB, whole_s=whole_s, free_bytes=free * GIB
    )
    got = choose_modules(problem, COSTS, budget * GIB, 0, RATES)
    last = got.get("layer", Placed()).device
    held = [GIB * (1 if got else 0)] * (layers - last)
    for module in COSTS:
        for index, on_host in enumerate(got.get(module.name, Placed()).spread(layers - last)):
            held[index] += module.num_bytes * (on_host is False)
    held += [whole * GIB] * last
    most = max(sum(held[:index]) for index in range(layers))
    assert most <= budget * GIB * (1 + 1e-9)
    assert sum(held) - free * GIB <= budget * GIB * (1 + 1e-9)
