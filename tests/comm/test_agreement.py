"""Out-of-band agreement: which rank is missing, which differs, and what a failed hop means."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.comm.store import TP, StoreConsensus
from megatron_burst.errors import BurstError, DisagreementError
from tests.ranks import run_ranks


def agreements(rank):
    board = StoreConsensus(dist.group.WORLD, 20)
    board.agree({"a": "1"}, "test", "a key")
    known = [board.has_agreed(key) for key in ("a key", "another")]
    with pytest.raises(DisagreementError, match=rf"got a=\d on cp rank {rank} and a=\d on cp rank"):
        # a rank that knows the terms compares them again, as others may not know theirs
        board.agree({"a": "2" if rank == 1 else "1"}, "test", f"{'new' if rank == 1 else 'a'} key")
    shared = board.all_gather(f"rank {rank}", "test")
    with pytest.raises(DisagreementError, match=rf"got a=\d on cp rank {rank} and a=\d on cp rank"):
        board.agree({"a": str(3 + (rank == 1))}, "test")
    board.agree({"a": "5"}, "test")  # a disagreement leaves the ranks in step
    return known, shared


def test_terms_are_compared_each_time_and_differences_are_named():
    for known, shared in run_ranks(agreements, 3):
        assert known == [True, False]
        assert shared == ["rank 0", "rank 1", "rank 2"]


def one_refuses(rank):
    """What ranks are told if one of them refuses a call; the words are those of their group."""
    board, said = StoreConsensus(dist.group.WORLD, 20), []
    for terms, problem in (({"a": "1"}, "test: no" if rank == 1 else ""), ({"a": str(rank)}, "")):
        with pytest.raises(BurstError) as error:
            board.agree(terms, "test", problem=problem, kind=TP)
        said.append(str(error.value))
    board.agree({"a": "1"}, "test", kind=TP)
    return said


def test_a_rank_that_refuses_is_heard_by_all_in_the_words_of_their_group():
    for rank, (refused, differs) in enumerate(run_ranks(one_refuses, 2)):
        assert refused == "test: no (tp rank 1)"
        assert "all ranks of a tensor-parallel group" in differs and "cp rank" not in differs
        assert f"a={rank} on tp rank {rank}" in differs


def missing(rank):
    board = StoreConsensus(dist.group.WORLD, 1.0)
    if rank == 1:
        time.sleep(2.5)
        return
    with pytest.raises(
        BurstError, match=r"test: all ranks.*no word from cp ranks \[1\] within 1 s"
    ):
        board.agree({"a": "1"}, "test")
    with pytest.raises(
        BurstError, match=r"of a tensor-parallel group.*no word from tp ranks \[1\] within 1 s"
    ):
        board.all_gather("a call of the loss", "test", TP)


def test_a_rank_that_says_nothing_is_named():
    run_ranks(missing, 3)


def again_on_one_store(rank):
    """A board that reuses another's keys, as after destroying and recreating a group; the first one
    ends in the middle of a topic. Ranks arrive one after another."""
    store, found = dist.group.WORLD.get_group_store(), []
    for generation in range(3):
        board = StoreConsensus(dist.group.WORLD, 20)
        time.sleep(0.2 * ((rank + generation) % 3))
        found.append(
            [board.all_gather(f"{generation} {topic} of {rank}", "test") for topic in range(2)]
        )
        dist.barrier()
        if rank > 0:  # rank 0 has died meanwhile: nobody deletes these keys
            board.own_timeout_s = 0.2
            with pytest.raises(BurstError, match=r"from cp ranks \[0"):
                board.all_gather("left behind", "test")
        store.set("megatron_burst/request/2", "one that died before it was answered")
        dist.barrier()
    return found


def test_what_an_earlier_group_left_in_the_store_is_never_read():
    said = [
        [[f"{generation} {topic} of {rank}" for rank in range(3)] for topic in range(2)]
        for generation in range(3)
    ]
    assert run_ranks(again_on_one_store, 3) == [said] * 3


def many_topics(rank):
    store, board = dist.group.WORLD.get_group_store(), StoreConsensus(dist.group.WORLD, 20)
    dist.barrier()  # making the group deletes keys too
    before = store.num_keys()
    dist.barrier()
    for number in range(600):
        board.agree({"a": str(number)}, "test", number)
    dist.barrier()
    return store.num_keys() - before, len(board._agreed)


def test_neither_the_store_nor_the_board_grows():
    for keys, agreements in run_ranks(many_topics, 2):
        assert keys == 0 and agreements == 256


def patience(rank):
    """Seconds that a board waits: the group's own, also when it changes; or what is given."""
    group = dist.new_group([0, 1], timeout=timedelta(minutes=3))
    own, given = StoreConsensus(group), StoreConsensus(group, 7.0)
    first = own.timeout_s, given.timeout_s
    distributed_c10d._set_pg_timeout(timedelta(seconds=90), group)
    return first, (own.timeout_s, given.timeout_s)


def test_a_board_waits_as_long_as_its_group_unless_told():
    assert run_ranks(patience, 2) == [((180.0, 7.0), (90.0, 7.0))] * 2
