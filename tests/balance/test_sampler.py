"""Steps of a data set: every document once an epoch, the same after a resume.

Guards against documents that are dropped or seen twice, ranks that see different steps, and
batches that fail only when their turn comes.
"""

from collections import Counter

import numpy as np
import pytest

from megatron_burst.balance import BatchGrid, Costs, Sampler
from megatron_burst.errors import BurstError

COSTS = Costs(1e-4, 1e-7, 0.01, {2: 1e-5, 4: 2e-5})
GRID = BatchGrid(dp=2, cp=4, micro_batches=3, token_limit=512)
STEP = 24  # documents


def drawn(count: int, seed: int = 3) -> np.ndarray:
    """Lengths with a long tail."""
    lengths = np.random.default_rng(seed).lognormal(4.0, 1.2, count).astype(int) + 1
    return np.minimum(lengths, GRID.token_limit * GRID.cp)


def seen(step, grid) -> Counter:
    """The documents of a step, each counted by the cp ranks that should hold all its rows."""
    found = Counter()
    for dp_rank in range(grid.dp):
        by_slot = zip(*(step.of_rank(dp_rank, r) for r in range(grid.cp)), strict=True)
        for slot in by_slot:
            for cp_rank, one in enumerate(slot):
                assert cp_rank in one.ranks
                if cp_rank == one.ranks.start:
                    found.update(one.documents)
                    assert all(slot[r] == one for r in one.ranks)  # they run it together
    return found


@pytest.mark.parametrize("sizes", [None, GRID.cp_sizes], ids=["one size", "changing sizes"])
def test_each_document_is_in_one_step_of_an_epoch(sizes):
    lengths = drawn(100 * STEP)
    sampler = Sampler(lengths, GRID, COSTS, STEP, cp_sizes=sizes)
    every, widths = Counter(), set()
    for _ in range(100):
        step = next(sampler)
        found = seen(step, GRID)
        assert found == Counter(step.documents.tolist()) and len(found) == STEP
        widths |= {one.cp for one in step.of_rank(0, 0)}
        every += found
    assert every == Counter(range(len(lengths))) and sampler.consumed == len(lengths)
    assert widths == ({4} if sizes is None else {1, 2, 4})


@pytest.mark.parametrize("count", [50, 101, 10])
def test_epochs_follow_each_other_without_a_gap(count):
    """Also if a step is not a part of one, or is longer."""
    sampler = Sampler(drawn(count), GRID, COSTS, STEP)
    flat = np.concatenate([next(sampler).documents for _ in range(2 * count)])
    epochs = flat[: len(flat) // count * count].reshape(-1, count)
    assert len(epochs) == 2 * STEP
    assert (np.sort(epochs, axis=1) == np.arange(count)).all()
    assert len({tuple(epoch) for epoch in epochs[:20].tolist()}) == 20


def test_a_resumed_run_has_the_steps_that_follow():
    whole, lengths = Sampler(drawn(90), GRID, COSTS, STEP, seed=7), drawn(90)
    steps = [next(whole) for _ in range(12)]
    for done in (1, 5, 11):
        resumed = Sampler(lengths, GRID, COSTS, STEP, seed=7, consumed=done * STEP)
        assert [next(resumed).of_rank(1, 2) for _ in steps[done:]] == [
            step.of_rank(1, 2) for step in steps[done:]
        ]
    other = next(Sampler(lengths, GRID, COSTS, STEP, seed=8)).documents
    assert other.tolist() != steps[0].documents.tolist()


def test_without_a_seed_documents_keep_their_order():
    step = next(Sampler(drawn(90), GRID, COSTS, STEP, seed=None, consumed=STEP))
    assert step.documents.tolist() == list(range(STEP, 2 * STEP))


def test_padding_counts_towards_the_limit():
    """24 documents of 81 tokens are 88 with padding: 6 micro-batches of 4 fit 352 tokens."""
    grid = BatchGrid(dp=2, cp=4, micro_batches=3, token_limit=88)
    assert len(next(Sampler([81] * 24, grid, COSTS, 24)).documents) == 24
    with pytest.raises(BurstError, match="6 micro-batches of 348 tokens.*got 2112 tokens"):
        Sampler([81] * 24, BatchGrid(2, 4, 3, token_limit=87), COSTS, 24)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(lengths=[5] * 90 + [2049]), "fit into the 4 ranks of the widest group.*got 2049 tok"),
        (dict(lengths=[5] * 90 + [0]), "documents must have tokens.*got a length of 0 at index 90"),
        (dict(lengths=[5.0] * 90), "lengths must be a sequence of integers.*got 5.0 at index 0"),
        (dict(documents=5), "a document for each of its 2 x 3 micro-batches.*got 5 documents"),
        (dict(lengths=[5] * 66 + [2048] * 24, seed=None), "6 micro-batches of 2048 tokens.*; got "),
        (dict(consumed=-1), "consumed must be an integer from 0.*got -1"),
        (dict(cp_sizes=(2,)), r"powers of two that divide the group's.*got \[2\]"),
    ],
)
def test_what_no_step_could_hold_is_refused_at_the_start(change, message):
    given = dict(lengths=drawn(90), documents=STEP) | change
    with pytest.raises(BurstError, match=message):
        Sampler(grid=GRID, costs=COSTS, **given)
