"""A loss that fails, as in a kernel without memory, on tensor-parallel ranks (gloo).

Guards against ranks that wait for the collectives of a failed one, collectives that meet those of
a later call, and ranks that go on with what a failed one sent.
"""

import gc
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import product
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from megatron_burst import shards
from megatron_burst.errors import BurstError, DisagreementError
from megatron_burst.loss import checks, linear, passes, statistics, tensor_parallel
from megatron_burst.loss.attempt import Attempt
from megatron_burst.loss.rows import Rows
from tests.attention.failing import NoMemoryError
from tests.loss.oracle import Problem, chunks_of, oracle, random_problem, relative_error
from tests.loss.test_processes import shard
from tests.ranks import preload, run_ranks

preload("megatron_burst.loss.linear", "tests.loss.oracle")
WORLD, TIMEOUT_S = 2, 60
# before a pass: labels are compared, tokens chosen, weighted; its memory; what ranks gathered; its
# results
ONCE = [
    (checks, "valid_tokens"), (Rows, "of"), (linear, "_weights"), (passes, "tile_buffer"),
    (tensor_parallel, "combined"), (passes, "_poisoned"), (passes, "losses"),
]  # fmt: skip
PLACES = [*ONCE, (statistics, "merge_statistics"), (statistics, "gradient_")]  # of tiles


@contextmanager
def failing(module, name, after):
    """A function fails after so many calls."""
    function, calls = getattr(module, name), iter(range(1000))

    def broken(*args, **options):
        if next(calls) == after:
            raise NoMemoryError
        return function(*args, **options)

    with mock.patch.object(module, name, broken):
        yield


def loss_of(ours, group, sequence_parallel, grads):
    """A rank's loss of its part of a problem, in several chunks."""
    from megatron_burst import linear_cross_entropy

    with chunks_of(2 * WORLD):
        return linear_cross_entropy(
            ours.hidden, ours.weight, ours.labels, loss_mask=ours.loss_mask, tp_group=group,
            sequence_parallel=sequence_parallel, grads=grads, supervised="count",
        )  # fmt: skip


def step(rank, group, device, sequence_parallel, grads):
    """The largest error of the loss and this rank's gradients; NaN if any is."""
    problem = random_problem()
    problem = Problem(*(x.to(device) for x in vars(problem).values()))
    if sequence_parallel == "one block":  # whose rows the other rank computes too
        problem.loss_mask[6:] = 0
    truth, ours = problem.leaves(), shard(problem, rank, WORLD, bool(sequence_parallel))
    expected = oracle(truth)[0]
    expected.backward()
    loss = loss_of(ours, group, bool(sequence_parallel), grads)
    loss.backward()
    hidden = truth.hidden.grad.chunk(WORLD)[rank] if sequence_parallel else truth.hidden.grad
    mine = truth.weight.grad.chunk(WORLD)[rank]
    pairs = (loss, expected), (ours.hidden.grad, hidden), (ours.weight.grad, mine)
    return torch.tensor([relative_error(*pair) for pair in pairs]).max().item()  # NaN, if any is


def retried(rank, alone, device="cpu", modes=("forward", "recompute")):
    """By case: what a rank got when the pass failed on all of them in different tiles, or on rank 1
    alone; the error of the next call."""
    group, found = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), []
    # on GPUs others go on with a pass that was not begun, and wait for this rank's collectives
    places = PLACES[alone and device != "cpu" :]
    for place, sequence_parallel, grads in product(places, (False, True, "one block"), modes):
        call, got = (rank, group, device, sequence_parallel, grads), None
        after = 0 if place in ONCE else rank * (1 if sequence_parallel == "one block" else 2)
        try:
            with failing(*place, after) if rank or not alone else nullcontext():
                got = step(*call)
        except (NoMemoryError, DisagreementError) as error:
            got = error
        case = f"{place[1]}, {sequence_parallel=}, {grads=}"
        found.append((case, type(got), str(got), step(*call)))
    return found


@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_that_failed_can_be_computed_again_and_other_ranks_say_so(alone):
    began = time.monotonic()
    for rank, found in enumerate(run_ranks(retried, WORLD, alone)):
        for case, kind, words, error in found:
            assert error < 1e-12, (rank, case, error)
            others = alone and rank == 0
            assert kind is (DisagreementError if others else NoMemoryError), (rank, case, words)
            assert not others or "got an exception on tp ranks [1]" in words
    assert time.monotonic() - began < TIMEOUT_S


def failed_last(rank):
    """The error of a rank's loss if rank 1 fails alone behind the last collective, and nothing
    waits for its word, as on a GPU."""
    group, problem = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), random_problem()
    ours, expected = shard(problem, rank, WORLD, False), oracle(problem.leaves())[0]
    fails = failing(passes, "losses", 0) if rank else nullcontext()
    with mock.patch.object(Attempt, "_failed", return_value=[]), fails:
        try:
            loss = loss_of(ours, group, False, "forward")
        except NoMemoryError:
            return "no memory"
    return float(relative_error(loss.detach(), expected.detach()))


def test_a_rank_whose_peer_fails_behind_the_last_collective_has_the_right_loss():
    error, other = run_ranks(failed_last, WORLD)
    assert error < 1e-12 and other == "no memory"


def test_after_a_failure_the_memory_of_the_pass_is_free(monkeypatch):
    """Without the garbage collector: the next try needs it."""
    from megatron_burst import linear_cross_entropy

    made, make = [], passes.tile_buffer
    monkeypatch.setattr(passes, "tile_buffer", lambda *args: made.append(make(*args)) or made[-1])
    problem = random_problem().leaves()
    gc.collect()
    gc.disable()
    try:
        with failing(statistics, "gradient_", 0), pytest.raises(NoMemoryError):
            linear_cross_entropy(problem.hidden, problem.weight, problem.labels, grads="forward")
        made[:] = map(ref, made)
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


def labels_and_shards(rank):
    """By what fails on rank 1 alone: what a rank got, and the next call's labels or rows."""
    from megatron_burst import next_tokens, position_ids, shard
    from megatron_burst.loss import next_tokens as module

    group, found = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), []
    whole, ends = torch.arange(8), torch.tensor([0, 3, 8])
    ids, mine = whole.view(4, 2)[[rank, 3 - rank]].flatten(), {"group": group, "cu_seqlens": ends}
    calls = (
        (module, "_digest", lambda: next_tokens(ids, group=group, cu_seqlens=ends)),
        (shards, "Documents", lambda: shard(whole[None], **mine)[0]),
        (shards, "positions", lambda: shard(whole[None], **mine)[0]),
    )
    for owner, name, call in calls:
        call()  # known to all ranks
        try:
            with failing(owner, name, 0) if rank else nullcontext():
                got = call().tolist()
        except (NoMemoryError, BurstError) as error:
            got = type(error)
        found.append((name, got, call().tolist()))
    with pytest.raises(BurstError, match="tokens must be an integer.*got None"):
        position_ids(None if rank else 8, **mine)
    return found


def test_labels_and_shards_that_fail_on_one_rank_keep_no_other_waiting():
    began = time.monotonic()
    for rank, found in enumerate(run_ranks(labels_and_shards, WORLD)):
        (_, digests, labels), *of_shards = found
        rows = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert labels == [[1, 2, 7, -100], [-100, 4, 5, 6]][rank]
        # ids came, but with other boundaries: labels of no class, which the loss refuses
        assert digests is NoMemoryError if rank else set(digests) == {torch.iinfo(torch.int64).max}
        for name, got, after in of_shards:
            told = name == "Documents" or rank
            assert got == ((NoMemoryError if rank else DisagreementError) if told else rows), name
            assert after == rows, name
    assert time.monotonic() - began < TIMEOUT_S


def unlike(rank):
    """Sentences of calls that are wrong on rank 1 alone."""
    from megatron_burst import linear_cross_entropy, token_log_probs

    problem, found = random_problem(), []
    ours = shard(problem, rank, WORLD, False)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    wrongs = (
        (token_log_probs, {"options": {}}), (token_log_probs, {"entropy": "no"}),
        (linear_cross_entropy, {"return_lse": "no"}),
        (linear_cross_entropy, {"loss_mask": ours.loss_mask.to(torch.complex128)}),
    )  # fmt: skip
    for call, wrong in wrongs:
        with pytest.raises(BurstError) as error:
            given = ours.hidden, ours.weight, ours.labels
            call(*given, tp_group=group, **(wrong if rank else {}))
        found.append(str(error.value))
    return found


def test_options_of_a_wrong_kind_on_one_rank_are_refused_on_all():
    words = "options must be", "entropy must be", "return_lse must be", "loss_mask must not"
    for found in run_ranks(unlike, WORLD):
        for said, word in zip(found, words, strict=True):
            assert word in said
