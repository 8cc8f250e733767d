"""Agreement out of band: who is missing, who differs, and what a failed hop means."""

import time

import pytest
import torch.distributed as dist

from megatron_burst.comm.watch import Board
from megatron_burst.errors import BurstError, DisagreementError
from tests.ranks import run_ranks


def agreements(rank):
    board = Board(dist.group.WORLD, 20)
    news = [board.agree(terms, "test") for terms in ({"a": "1"}, {"a": "1"}, {"a": "2"})]
    shared = board.share(f"rank {rank}", "test")
    with pytest.raises(DisagreementError, match=rf"got a=\d on cp rank {rank} and a=\d on cp rank"):
        board.agree({"a": str(3 + (rank == 1))}, "test")
    after = board.agree({"a": "5"}, "test")  # a disagreement leaves the ranks in step
    return news, shared, after


def test_new_terms_are_asked_about_once_and_differences_are_named():
    for news, shared, after in run_ranks(agreements, 3):
        assert news == [True, False, True] and after
        assert shared == ["rank 0", "rank 1", "rank 2"]


def missing(rank):
    board = Board(dist.group.WORLD, 1.0)
    if rank == 1:
        time.sleep(2.5)
        return
    with pytest.raises(
        BurstError, match=r"test: all ranks.*no word from cp ranks \[1\] within 1 s"
    ):
        board.agree({"a": "1"}, "test")


def test_a_rank_that_says_nothing_is_named():
    run_ranks(missing, 3)


def failures(rank):
    board = Board(dist.group.WORLD, 20)
    board.share("the first topic", "test")
    plain = board.explain(RuntimeError("Connection closed\nby peer"), "test", "intra hop")
    dist.barrier()
    if rank == 1:  # posts something that rank 0 never does
        board._store.set(board._key(1), '{"q": "(1, 2)"}')
    dist.barrier()
    return plain, board.explain(RuntimeError("x"), "test", "intra hop")


def test_a_failed_hop_names_the_hop_or_the_rank_that_went_astray():
    (plain, astray), _ = run_ranks(failures, 2)
    assert type(plain) is BurstError
    assert "got a failure in the intra hop: Connection closed; look at" in str(plain)
    assert type(astray) is DisagreementError and '{"q": "(1, 2)"}' in str(astray)
