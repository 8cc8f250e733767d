"""Which rows are computed, and whose hidden states they are.

Guards against rows of a full block that others wait for, rows that nobody sends, and a rank whose
memory grows with what it helps to compute.
"""

from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst import linear_cross_entropy, token_log_probs
from megatron_burst.loss import passes
from megatron_burst.loss.rows import Rows
from tests.loss.oracle import PLAIN, Problem, chunks_of, oracle, random_problem, relative_error
from tests.loss.test_processes import shard
from tests.ranks import preload, run_ranks

pytestmark = pytest.mark.numeric
preload("megatron_burst.loss.linear", "tests.loss.oracle")


@given(data=st.data(), blocks=st.integers(1, 5), tokens=st.integers(1, 9), some=st.integers(1, 4))
def test_each_row_comes_once_and_from_the_rank_that_has_it(data, blocks, tokens, some):
    valid = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens),
                           min_size=blocks, max_size=blocks))
    )  # fmt: skip
    counts = valid.sum(1).tolist()
    extra = data.draw(st.integers(0, 2))  # counted before a mask was known
    counts = [min(count + extra, tokens) for count in counts]
    labels = torch.arange(blocks * tokens).view(blocks, tokens)
    rows = Rows.of(labels, valid, 0, counts)
    computed = rows.labels[rows.valid].tolist()
    assert sorted(computed) == labels[valid].tolist()
    assert rows.labels.numel() <= max(sum(counts) * 17 / 16, sum(counts) + blocks)
    assert torch.equal(rows.spread(rows.collect(labels.double())), labels.where(valid, 0).double())
    if rows.shares is None:
        return
    for start in range(0, rows.count, some):
        piece = slice(start, min(start + some, rows.count))
        parts, size = list(rows.parts(piece)), piece.stop - piece.start
        places = [list(range(blocks * size))[part.of_piece] for part in parts]
        assert [*chain(*places)] == list(range(blocks * size))
        of_piece = rows.labels[:, piece].flatten()
        for part in parts:
            assert torch.equal(of_piece[part.of_piece], rows.labels.flatten()[part.of_all])
            assert {int(x) // tokens for x in of_piece[part.of_piece]} == {part.rank}


def uneven(rank: int, size: int, device: str = "cpu") -> list[tuple[str, list[float], int]]:
    """By case: errors of values and gradients, and how many rows were multiplied in forward."""
    found, mm = [], torch.mm
    for block, grads, chunk in ((0, "forward", None), (size - 1, "recompute", size), (0, "", None)):
        problem = random_problem(s=12, b=2, vocab=40)
        problem.loss_mask.zero_()
        problem.loss_mask.chunk(size)[block][:] = 0.5
        problem.loss_mask[6] = 1
        problem = Problem(*(x.to(device) for x in vars(problem).values()))
        truth, ours = problem.leaves(), shard(problem, rank, size, True)
        settings = dict(
            tp_group=dist.group.WORLD, sequence_parallel=True, supervised="count",
            loss_mask=ours.loss_mask,
        )  # fmt: skip
        multiplied: list[int] = []

        def counted(a, b, sizes=multiplied, **options):
            sizes.append(len(a))
            return mm(a, b, **options)

        loss = partial(linear_cross_entropy, grads=grads) if grads else token_log_probs
        expected = oracle(truth, PLAIN, "mean" if grads else "none")[0]
        with chunks_of(chunk), pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes.torch, "mm", counted)
            got = loss(ours.hidden, ours.weight, ours.labels, **settings)
        of_logits = sum(multiplied) // (2 if grads == "forward" else 1)
        got = got if grads else -got.log_probs
        for value in (expected, got):
            (value * value).sum().backward()
        pairs = (
            (got, expected), (ours.hidden.grad, truth.hidden.grad.chunk(size)[rank]),
            (ours.weight.grad, truth.weight.grad.chunk(size)[rank]),
        )  # fmt: skip
        valid = int(((problem.loss_mask != 0) & (problem.labels >= 0)).sum())
        found.append((grads, [relative_error(*pair) for pair in pairs], of_logits - valid))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_tokens_of_one_block(size):
    for found in run_ranks(uneven, size, size):
        for grads, errors, more in found:
            assert max(errors) < 1e-12 and 0 <= more < size, (grads, errors, more)


def counts_differ(rank: int) -> float:
    """The error of a loss in groups of one rank with 0 and 5 tokens: no collective is common."""
    problem = random_problem(s=10, b=1)
    problem.loss_mask[: 5 * (1 + rank)] = 0
    groups = [dist.new_group([i]) for i in range(2)]
    truth = problem.leaves()
    loss = linear_cross_entropy(
        truth.hidden, truth.weight, truth.labels, loss_mask=truth.loss_mask, tp_group=groups[rank]
    )
    loss.backward()
    return relative_error(loss, oracle(replace(problem))[0])


def test_ranks_of_a_context_parallel_group_may_have_no_token():
    assert max(run_ranks(counts_differ, 2)) < 1e-14
