"""Simulated steps of packed jobs, and the rules that fill micro-batches of equal tokens.

Guards against ranks or stages that run two micro-batches at once or a pass before its input is
there, documents that a rule loses, and steps that are not those that assignments predict.
"""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from megatron_burst.balance import BatchGrid, Costs, MicroBatch, assign
from megatron_burst.balance.packing import best_fit, sequential
from megatron_burst.tools.simulate.micro_batches import in_turn, one_f_one_b, step_of

COSTS = Costs(1e-4, 3e-9, 0.01, {2: 4e-6, 4: 6e-6, 8: 1e-5})
GRIDS = {
    "data-parallel": BatchGrid(4, 8, 4, 1 << 11),
    "experts": BatchGrid(4, 4, 4, 1 << 12, ep=8),
    "experts in a group": BatchGrid(4, 8, 4, 1 << 11, ep=4),
    "pipeline": BatchGrid(4, 4, 4, 1 << 12, pp=4),
    "pipeline, experts": BatchGrid(4, 4, 4, 1 << 12, pp=2, ep=8),
}


def drawn(grid, seed=0):
    """As many documents as fill the grid in sequence."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(7, 1.2, 4000).astype(int).clip(16, grid.token_limit * grid.cp)
    packs = sequential(lengths, grid.token_limit * grid.cp)[: grid.slots]
    return lengths[: packs[-1][-1] + 1].tolist()


def test_rules_fill_as_they_are_known_for():
    assert sequential([5, 4, 3, 6], 10) == [[0, 1], [2, 3]]
    assert sequential(np.array([10, 10, 1]), 10) == [[0], [1], [2]]
    assert sequential([4, 11, 2, 3], 10) == [[0], [1], [2, 3]]  # one that is too long is alone
    assert sorted(map(sorted, best_fit([5, 4, 6, 5], 10, 0))) == [[0, 3], [1, 2]]


def test_1f1b_of_two_stages_by_hand():
    """Forwards take 1 and 2, backwards 2 and 4. Stage 1: F0 1-2, B0 2-4, F1 4-6, B1 6-10; stage 0:
    F0 0-1, F1 1-3, B0 4-6, B1 10-14."""
    found = {ran[:3]: tuple(map(round, ran[3:])) for ran in one_f_one_b([3.0, 6.0], 2)}
    assert found == {
        (1, 0, "forward"): (1, 2), (1, 0, "backward"): (2, 4),
        (1, 1, "forward"): (4, 6), (1, 1, "backward"): (6, 10),
        (0, 0, "forward"): (0, 1), (0, 1, "forward"): (1, 3),
        (0, 0, "backward"): (4, 6), (0, 1, "backward"): (10, 14),
    }  # fmt: skip


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_predicted_pipeline_is_a_simulated_one(pp):
    """sum + (PP - 1) x largest is exact for equal micro-batches. Where they differ by 2 % (one
    standard deviation) 1F1B differs by no more than twice that."""

    def seconds(times):
        return max(stop for *_, stop in one_f_one_b(times, pp))

    assert seconds([2.0] * 6) == pytest.approx(2.0 * (6 + pp - 1))
    rng = np.random.default_rng(pp)
    for _ in range(20):
        times = rng.lognormal(0, 0.02, 8).tolist()
        formula = sum(times) + (pp - 1) * max(times)
        assert seconds(times) == pytest.approx(formula, rel=0.04)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("changing", [False, True])
def test_every_rank_runs_its_micro_batches_one_after_the_other(name, changing):
    grid = GRIDS[name]
    lengths = drawn(grid)
    plan = assign(lengths, grid, COSTS, grid.cp_sizes if changing else None)
    step = step_of(plan.micro_batches, grid)
    lanes, seconds = defaultdict(list), defaultdict(float)
    for one in step.ran:
        for cp_rank in one.ranks:
            lanes[one.dp_rank, one.stage, cp_rank].append((one.start, one.stop))
        seconds[one.dp_rank, one.stage, one.number, one.ranks] += one.stop - one.start
    assert len(lanes) == grid.dp * grid.pp * grid.cp
    for ran in lanes.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(ran)))
    assert seconds == pytest.approx({
        (dp_rank, stage, number, one.ranks): one.seconds
        for dp_rank, rank in enumerate(plan.micro_batches) for number, slot in enumerate(rank)
        for one in slot for stage in range(grid.pp)
    })  # fmt: skip
    busy = sum(sum(stop - start for start, stop in ran) for ran in lanes.values())
    assert step.waiting == pytest.approx(1 - busy / len(lanes) / step.seconds)
    if grid.pp == 1:
        assert step.seconds == pytest.approx(plan.seconds)


def test_ranks_that_share_experts_wait_in_every_micro_batch():
    def rank(*seconds):
        return [(MicroBatch((n,), range(1), 1, 1, s),) for n, s in enumerate(seconds)]

    ranks = [rank(1.0, 2.0), rank(3.0)]
    alone, together = BatchGrid(2, 1, 2, 8), BatchGrid(2, 1, 2, 8, ep=2)
    assert step_of(ranks, alone).seconds == 3.0  # each at its own pace
    step = step_of(ranks, together)
    assert step.seconds == 5.0 and step.waiting == pytest.approx(1 - 6 / 10)


@pytest.mark.parametrize("name", GRIDS)
def test_packed_micro_batches_go_to_the_ranks_in_turn(name):
    grid = GRIDS[name]
    lengths = drawn(grid, 1)
    packs = sequential(lengths, grid.token_limit * grid.cp)
    found = in_turn(packs, lengths, grid, COSTS)
    for number, pack in enumerate(packs):
        (one,) = found[number % grid.dp][number // grid.dp]
        assert list(one.documents) == pack and one.cp == grid.cp
        assert one.tokens == sum(lengths[d] for d in pack) <= grid.token_limit * grid.cp
        assert one.area == sum(lengths[d] * (lengths[d] + 1) // 2 for d in pack)
    longest = max(sum(one.seconds for (one,) in rank) for rank in found)
    assert step_of(found, grid).seconds >= longest * (1 - 1e-9)
