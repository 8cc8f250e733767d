"""Which document goes where: each once, within limits, the same every time, and equal in time.

Guards against a lost document, an overfull rank, and a step that is slower than it need be.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.balance import BatchGrid, Costs, assign, assign_fewest, pairs_of
from megatron_burst.balance.packing import sequential
from megatron_burst.errors import BurstError
from megatron_burst.tools.simulate.micro_batches import in_turn

# of Qwen3-8B on H200, as the planner has them
COSTS = Costs(9.9e-5, 3.26e-9, 0.017, {2: 3.9e-6, 4: 6.0e-6, 8: 1.05e-5})
K = 1 << 10


def independent_step(plan, lengths, grid, costs):
    """The step of an assignment, from its documents alone."""
    ranks = []
    for dp_rank in range(grid.dp):
        slots = []
        for slot in plan.micro_batches[dp_rank]:
            each = []
            for one in slot:
                some = [lengths[d] for d in one.documents]
                area = sum(n * (n + 1) // 2 for n in some)
                assert (one.tokens, one.area) == (sum(some), area)
                assert one.seconds == pytest.approx(costs.seconds(sum(some), area, one.cp))
                each.append(one.seconds)
            slots.append(max(each))
        ranks.append(slots)
    if grid.pp == 1 and grid.ep == 1:  # ranks wait where the size changes
        return max(_without_waiting(plan.micro_batches[r], grid) for r in range(grid.dp))
    return max(sum(slots) + (grid.pp - 1) * max(slots) for slots in ranks)


def _without_waiting(slots, grid):
    clocks = np.zeros(grid.cp)
    size = None
    for slot in slots:
        if size != slot[0].cp:
            clocks[:], size = clocks.max(), slot[0].cp
        for one in slot:
            clocks[one.ranks.start : one.ranks.stop] += one.seconds
    return clocks.max()


def check(plan, lengths, grid, cp_sizes):
    """What must hold of any assignment."""
    assert len(plan.micro_batches) == grid.dp
    seen = []
    for slots in plan.micro_batches:
        assert len(slots) == grid.micro_batches
        sizes = [slot[0].cp for slot in slots]
        assert sizes == sorted(sizes)
        for slot in slots:
            assert {one.cp for one in slot} <= {slot[0].cp} & set(cp_sizes)
            assert [rank for one in slot for rank in one.ranks] == list(range(grid.cp))
            for one in slot:
                assert one.documents and one.tokens <= grid.token_limit * one.cp
                seen += one.documents
    assert sorted(seen) == list(range(len(lengths)))
    assert plan.seconds == pytest.approx(independent_step(plan, lengths, grid, COSTS))
    assert max(plan.bound, plan.longest) <= plan.seconds * (1 + 1e-9)


@st.composite
def batches(draw):
    """A grid and documents that fit it: each micro-batch is filled on its own, all are shuffled."""
    cp = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    pp = draw(st.sampled_from((1, 1, 2, 4)))
    grid = BatchGrid(draw(st.integers(1, 4)), cp, draw(st.integers(1, 6)), 4 * K, pp)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    spread, fill = draw(st.sampled_from((0.0, 0.5, 1.5))), draw(st.sampled_from((0.4, 0.8, 1.0)))
    median = draw(st.sampled_from((100, 1000, 4000)))
    lengths = []
    for _ in range(grid.slots):
        room = int(fill * grid.token_limit * cp)
        length = min(room, 1 + int(rng.lognormal(np.log(median), spread)))
        while length <= room:
            lengths.append(length)
            room -= length
            length = 1 + int(rng.lognormal(np.log(median), spread))
    return grid, rng.permutation(lengths).tolist()


@settings(max_examples=150, deadline=None)
@given(batches(), st.booleans())
def test_any_batch_that_fits_is_assigned_whole(batch, changing):
    grid, lengths = batch
    sizes = grid.cp_sizes if changing else (grid.cp,)
    limit = grid.token_limit * grid.cp
    packs = sequential(lengths, limit)
    try:
        plan = assign(lengths, grid, COSTS, sizes)
    except BurstError as error:
        # without small documents a full batch can be impossible to pack by rule
        assert "no assignment was found" in str(error)
        assert sum(lengths) + max(lengths) * grid.slots > limit * grid.slots
        assert len(packs) != grid.slots
        return
    check(plan, lengths, grid, sizes)
    assert plan == assign(np.array(lengths, dtype=np.int32), grid, COSTS, sizes)
    if len(packs) == grid.slots:
        theirs = max(
            sum(times) + (grid.pp - 1) * max(times)
            for rank in in_turn(packs, lengths, grid, COSTS)
            if (times := [one.seconds for (one,) in rank])
        )
        assert plan.seconds <= theirs * (1 + 1e-9)
    if changing:
        assert plan.seconds <= assign(lengths, grid, COSTS).seconds * (1 + 1e-9)


def best_of_all(lengths, grid, costs):
    """The shortest step at the full size, by trying every assignment."""
    best = np.inf
    each = [costs.seconds(n, n * (n + 1) // 2, grid.cp) - costs.fixed for n in lengths]
    for some in product(range(grid.slots), repeat=len(lengths)):
        bins = list(some)
        times = np.zeros(grid.slots)
        tokens = np.zeros(grid.slots, dtype=int)
        np.add.at(times, bins, each)
        np.add.at(tokens, bins, lengths)
        if len(set(bins)) < grid.slots or tokens.max() > grid.token_limit * grid.cp:
            continue
        ranks = (times + costs.fixed).reshape(grid.dp, -1)
        best = min(best, (ranks.sum(axis=1) + (grid.pp - 1) * ranks.max(axis=1)).max())
    return best


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_small_batches_are_near_the_best_of_all_assignments(seed, pp):
    grid = BatchGrid(dp=2, cp=2, micro_batches=2, token_limit=64 * K, pp=pp)
    rng = np.random.default_rng(seed)
    lengths = (rng.lognormal(np.log(16 * K), 0.6, 7).astype(int)).clip(1, 120 * K).tolist()
    plan = assign(lengths, grid, COSTS)
    best = best_of_all(lengths, grid, COSTS)
    assert best * (1 - 1e-9) <= plan.seconds <= 1.12 * best


@pytest.mark.parametrize("pp", [1, 4])
def test_documents_of_which_none_is_too_long_reach_the_bound(pp):
    grid = BatchGrid(dp=4, cp=8, micro_batches=4, token_limit=24 * K, pp=pp)
    lengths = (
        np.random.default_rng(0).lognormal(np.log(4 * K), 0.7, 300).astype(int).clip(16, 32 * K)
    )
    fixed = assign(lengths, grid, COSTS)
    assert fixed.longest < fixed.bound and fixed.efficiency > 0.98
    changing = assign(lengths, grid, COSTS, grid.cp_sizes)
    assert changing.seconds < fixed.seconds
    assert any(one.cp < 8 for slot in changing.micro_batches[0] for one in slot)


def test_long_documents_are_wide_and_short_ones_narrow():
    """16 of 96K need all ranks; what is left is short enough for one each."""
    grid = BatchGrid(dp=2, cp=4, micro_batches=4, token_limit=32 * K)
    lengths = [96 * K] * 2 + [2 * K] * 200
    plan = assign(lengths, grid, COSTS, grid.cp_sizes)
    size_of = {d: one.cp for slots in plan.micro_batches for slot in slots for one in slot
               for d in one.documents}  # fmt: skip
    assert size_of[0] == size_of[1] == 4
    assert sum(size_of[d] == 1 for d in range(2, 202)) > 150
    of_rank = plan.of_rank(1, 3)
    assert len(of_rank) == 4 and all(3 in one.ranks for one in of_rank)


def test_in_a_pipeline_micro_batches_of_a_rank_are_alike():
    grid = BatchGrid(dp=2, cp=2, micro_batches=4, token_limit=64 * K, pp=4)
    lengths = [30 * K] * 8 + [512] * 1000
    plan = assign(lengths, grid, COSTS)
    for slots in plan.micro_batches:
        seconds = [one.seconds for slot in slots for one in slot]
        assert max(seconds) < 1.02 * min(seconds)
        assert sum(length > K for slot in slots for one in slot
                   for length in [lengths[d] for d in one.documents]) == 4  # fmt: skip


def test_in_a_pipeline_short_documents_fill_up_wide_micro_batches():
    """Long documents are wide and few to a micro-batch, so without short ones beside them their
    micro-batches could not be made alike, and changing sizes would gain nothing."""
    grid = BatchGrid(dp=8, cp=8, micro_batches=8, token_limit=24 * K, pp=4)
    rng = np.random.default_rng(0)
    short, long = (rng.lognormal(np.log(n), s, 2400) for n, s in ((K, 1.0), (24 * K, 0.7)))
    lengths = np.where(rng.random(2400) < 0.05, long, short).astype(int).clip(16, 96 * K)
    fixed = assign(lengths, grid, COSTS)
    plan = assign(lengths, grid, COSTS, grid.cp_sizes)
    check(plan, lengths.tolist(), grid, grid.cp_sizes)
    assert plan.seconds < 0.98 * fixed.seconds
    wide = [one for slots in plan.micro_batches for slot in slots for one in slot if one.cp == 8]
    assert wide and min(lengths[d] for one in wide for d in one.documents) < K


def test_ranks_that_share_experts_wait_in_every_micro_batch():
    """With EP over two context-parallel groups, both have equal times, micro-batch by
    micro-batch."""
    grid = BatchGrid(dp=4, cp=2, micro_batches=3, token_limit=32 * K, ep=4)
    lengths = (
        np.random.default_rng(1).lognormal(np.log(2 * K), 1.0, 240).astype(int).clip(8, 32 * K)
    )
    plan = assign(lengths, grid, COSTS)
    times = np.array([[slot[0].seconds for slot in slots] for slots in plan.micro_batches])
    together = times.reshape(2, 2, 3).max(axis=1)
    assert plan.seconds == pytest.approx(together.sum(axis=1).max())
    assert plan.efficiency > 0.97


@pytest.mark.parametrize(
    ("sizes", "lengths", "said"),
    [
        ({}, [], "one for each document"),
        ({}, [3.5, 2.0], "a sequence of integers.*got 3.5 at index 0"),
        ({}, [16, 0, 16, 16], "got a length of 0 at index 1"),
        ({}, [16, -1, 16, 16], "got -1 at index 1"),
        ({}, [16, 16, 16], "a document for each of its 2 x 2 micro-batches"),
        ({}, [16, 16, 401, 16], "got 401 tokens at index 2; raise the limit"),
        ({}, [400] * 5, "a batch must fit into 4 micro-batches of 400 tokens"),
        ({}, [201] * 6, "no assignment was found"),
        ({"dp": 0}, [16] * 4, "dp must be an integer from 1 .*got 0"),
        ({"cp": 2.0}, [16] * 4, "cp must be an integer from 1 .*got 2.0"),
        ({"ep": 3}, [16] * 4, "must divide DP x CP"),
        ({"cp_sizes": (1, 2)}, [16] * 4, "and include it"),
        ({"cp_sizes": (3, 4)}, [16] * 4, "powers of two that divide"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(sizes, lengths, said):
    def run():
        given = {"dp": 2, "cp": 4, "micro_batches": 2, "token_limit": 100} | sizes
        cp_sizes = given.pop("cp_sizes", None)
        return assign(lengths, BatchGrid(**given), COSTS, cp_sizes)

    with pytest.raises(BurstError, match=said) as refused:
        run()
    assert str(refused.value).count("; got ") == 1


@pytest.mark.parametrize(
    ("lengths", "least", "multiple", "count"),
    [
        ([100] * 12, 1, 1, 2),  # 1,200 tokens for two ranks of 400
        ([100] * 12, 1, 3, 3),
        ([100] * 12, 5, 1, 5),
        ([100] * 12, 4, 3, 6),
        ([201] * 6, 1, 1, 3),  # 1,206 tokens, but no two documents fit together
    ],
)
def test_the_fewest_micro_batches_that_hold_documents(lengths, least, multiple, count):
    grid = BatchGrid(2, 4, least, 100)
    plan = assign_fewest(lengths, grid, COSTS, multiple)
    assert [len(slots) for slots in plan.micro_batches] == [count, count]
    check(plan, lengths, replace(grid, micro_batches=count), (4,))


@pytest.mark.parametrize(
    ("lengths", "multiple", "said"),
    [
        ([201] * 7, 1, "no assignment was found"),  # three micro-batches a rank, a document each
        ([16] * 3, 2, "got 3 documents"),
        ([16, 401, 16], 1, "got 401 tokens at index 1"),
        ([16] * 4, 0, "multiple must be an integer from 1 .*got 0"),
    ],
)
def test_what_no_number_of_micro_batches_could_hold_is_refused(lengths, multiple, said):
    with pytest.raises(BurstError, match=said):
        assign_fewest(lengths, BatchGrid(2, 4, 1, 100), COSTS, multiple)


def test_pairs_are_those_of_the_causal_triangle():
    assert pairs_of(np.array([1, 2, 5])).tolist() == [1, 3, 15]
