"""Stamps of passes: when they are waited for, which rank is missing, and what is left behind."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_pre_hooks

from megatron_burst.comm.detector import DesyncDetector, PassAnnouncer, PassKind, Stamp
from megatron_burst.comm.store import StoreConsensus
from megatron_burst.errors import BurstError, DisagreementError
from tests.ranks import run_ranks

A, B = {"causal": "True"}, {"causal": "False"}


def log_of(timeout_s=20, waits=False, few=0):
    board = StoreConsensus(dist.group.WORLD, timeout_s)
    group, DesyncDetector.max_all_to_all_ranks = dist.new_group(backend="gloo"), few
    return DesyncDetector(group, dist.group.WORLD.get_group_store(), board, waits)


EXITS = """
import sys, time
from threading import Event
from unittest import mock
import torch.distributed as dist
from megatron_burst.desync import verdict
from tests.comm.test_detector import log_of
inside, over = Event(), Event()
def busy(*_):
    store, end = dist.HashStore(), time.monotonic() + 2
    store.set("a", "b")
    inside.set()
    while time.monotonic() < end:  # C++ that wants the interpreter again and again
        store.get("a")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
LOOKS = """
mock.patch.object(verdict.HopWatch, "late", busy).start()
log = log_of()
inside.wait()
"""
FREES = """
class Member:
    __del__ = busy
def until_alone(*_):
    inside.set()
    over.wait()
mock.patch.object(verdict.HopWatch, "late", until_alone).start()
log = log_of()
log.member = Member()
inside.wait()
inside.clear()
del log  # so that the thread frees it
over.set()
inside.wait()
"""


@pytest.mark.parametrize("does", [LOOKS, FREES], ids=["looks", "frees"])
def test_a_process_that_ends_while_the_thread_works_is_not_aborted(does):
    """Once in many runs it was: terminate called without an active exception."""
    ended = subprocess.run(
        [sys.executable, "-c", EXITS + does], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kind", PassKind)
def test_a_stamp_is_what_was_packed(kind):
    stamp = Stamp(kind, (1 << 39) - 1, (1 << 20) - 1, -(1 << 63))
    assert Stamp.of(*stamp.packed()) == stamp
    assert all(-(1 << 63) <= word < 1 << 63 for word in stamp.packed())


def test_signs_of_ranks_that_are_one_ahead_and_one_behind_do_not_cancel():
    """Ranks compare the sum of all signs with their own sign times the number of ranks."""
    for size in (2, 3, 64, 1000):
        signs = [Stamp(PassKind.FORWARD, call, 3, 5).fingerprint(size) for call in (6, 7, 8)]
        assert len({*signs}) == 3 and max(signs) * size < 1 << 63
        before, mine, ahead = signs
        assert before + ahead + mine * (size - 2) != mine * size


def nobody_waits(rank):
    """Rank 1 starts nothing until the others have started everything."""
    log, store = log_of(), dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["begun/0", "begun/2"])
    numbers = [PassAnnouncer.of(log, A).begin(PassKind.FORWARD) for _ in range(3)]
    ahead = len(log._pending)
    store.set(f"begun/{rank}", "")
    log.begin(PassKind.END, 0, {})  # waits for all of them
    return numbers, ahead, len(log._pending)


def test_a_rank_may_be_ahead_and_stamps_are_let_go_once_they_were_compared():
    for rank, (numbers, ahead, pending) in enumerate(run_ranks(nobody_waits, 3)):
        assert numbers == [1, 2, 3] and pending == 0
        assert rank == 1 or ahead == 3


def difference_without_waiting(rank, few):
    """Messages: of a pass begun later, of the next ones too; and what the thread logged."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron_burst").addHandler(handler)
    log = log_of(few=few)
    PassAnnouncer.of(log, B if rank == 1 else A).begin(PassKind.FORWARD)
    for _ in range(100):
        time.sleep(0.1)
        if said:
            break
    found = []
    for _ in range(2):
        with pytest.raises(DisagreementError) as error:
            PassAnnouncer.of(log, A).begin(PassKind.BACKWARD, 1)
        found.append(str(error.value))
    return found, said


@pytest.mark.parametrize("few", [0, 3])
def test_a_difference_that_nobody_waited_for_is_logged_and_raised_from_then_on(few):
    for found, said in run_ranks(difference_without_waiting, 3, few):
        assert len(said) == 1 and set(found) == set(said)
        assert "causal=True on cp ranks [0, 2]" in said[0]
        assert "causal=False on cp ranks [1]" in said[0]


def lost_far_away(rank):
    """As on GPUs nobody waits; rank 3 ends, whose stamps only ranks 2 and 4 await. What the others
    find, and after how many seconds."""
    log, said = log_of(timeout_s=60), []
    PassAnnouncer.of(log, A).begin(PassKind.FORWARD)
    log.begin(PassKind.END, 0, {})
    if rank == 3:
        threading.Timer(0.5, os._exit, (0,)).start()
        return "", 0
    begun = time.monotonic()
    PassAnnouncer.of(log, A).begin(PassKind.BACKWARD, 1)
    while time.monotonic() < begun + 30 and not said:
        try:
            log.poll()
        except BurstError as error:
            said.append(str(error))
        time.sleep(0.1)
    took, store = time.monotonic() - begun, dist.group.WORLD.get_group_store()
    store.set(f"said/{rank}", "")  # processes that end break connections, so nobody ends before
    store.wait([f"said/{each}" for each in (0, 1, 2, 4, 5)])
    return said, took


def test_also_ranks_that_are_no_neighbours_of_a_lost_one_hear_of_it_long_before_the_time_out():
    found = run_ranks(lost_far_away, 6)
    for said, took in (found[rank] for rank in (0, 1, 2, 4, 5)):
        assert said and "cp ranks [3] (rank 3) in pass 3 of the group" in said[0], said
        assert took < 20


def missing(rank, few):
    log = log_of(timeout_s=4, waits=True, few=few)
    if rank == 1:
        return "", 0
    begun = time.monotonic()
    with pytest.raises(BurstError) as error:
        PassAnnouncer.of(log, A).begin(PassKind.FORWARD)
    return str(error.value), time.monotonic() - begun


def lost(rank, few):
    log = log_of(timeout_s=60, waits=True, few=few)
    PassAnnouncer.of(log, A).begin(PassKind.FORWARD)
    if rank == 1:
        threading.Timer(0.5, os._exit, (0,)).start()  # this rank has returned its result by then
        return "", 0
    begun = time.monotonic()
    with pytest.raises(BurstError) as error:
        PassAnnouncer.of(log, A).begin(PassKind.BACKWARD, 1)
    return str(error.value), time.monotonic() - begun


@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize("how", [missing, lost])
def test_a_rank_that_does_not_come_is_named_on_all_others_long_before_the_last_time_out(how, few):
    found = run_ranks(how, 4, few)
    for sentence, took in (found[rank] for rank in (0, 2, 3)):
        assert re.search(r"no word from cp ranks \[1\] \(rank 1\) in pass \d of the gr", sentence)
        assert took < (7.5 if how is missing else 20)  # once a rank waited for its time-out twice


def staggered(rank):
    """As on GPUs, nobody waits for a stamp; rank 1 never comes, rank 2 late. What the others find,
    and after how many seconds."""
    log, begun = log_of(timeout_s=3), time.monotonic()
    if rank == 1:
        return "", 0
    time.sleep(0.2 * rank)
    PassAnnouncer.of(log, A).begin(PassKind.FORWARD)
    while time.monotonic() < begun + 30:
        try:
            log.poll()
        except BurstError as error:
            return str(error), time.monotonic() - begun
        time.sleep(0.1)
    return "nothing", 30


def test_whom_nobody_waits_for_is_missing_from_the_time_out_on_and_who_gave_up_is_not():
    found = run_ranks(staggered, 4)
    for sentence, took in (found[rank] for rank in (0, 2, 3)):
        assert "no word from cp ranks [1] (rank 1) in pass 1 of the group" in sentence
        assert took < 20  # the group's own time-out is 180 s


def behind(rank):
    """Rank 2 begins both passes late, and rank 1 is stopped before that, in the first. What the
    others find."""
    log = log_of(timeout_s=2, few=4)
    time.sleep(1.2 if rank == 2 else 0)
    PassAnnouncer.of(log, A).begin(PassKind.FORWARD)
    if rank == 1:
        time.sleep(0.6)  # its messages to the others have left
        subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    PassAnnouncer.of(log, A).begin(PassKind.BACKWARD, 1)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            log.poll()
        except BurstError as error:
            return str(error)
        time.sleep(0.1)
    return "nothing"


def test_a_rank_that_waits_for_the_missing_one_in_an_earlier_pass_is_not_missing():
    """Ranks that give up a pass look who is in it; one that waits in the pass before is not."""
    found = run_ranks(behind, 4)
    for rank, number in ((0, 2), (2, 1), (3, 2)):
        assert "no word from cp ranks [1] (rank 1)" in found[rank]
        assert f"in pass {number} of the group" in found[rank]


def repeated(rank):
    """After others have waited for over half of the time-out, rank 0 fails; all repeat the step.
    Ranks that are still said to wait."""
    log = log_of(timeout_s=2, waits=True, few=4)
    marks = PassAnnouncer.of(log, A)
    if rank == 0:
        time.sleep(1.5)
        log.fail(ValueError("a wrong turn"))
    else:
        with pytest.raises(DisagreementError, match="a wrong turn"):
            marks.begin(PassKind.FORWARD)
    marks.begin(PassKind.FORWARD)
    dist.barrier()
    return [each for each in range(log.size) if log.store.check([log.waiting_key(each)])]


def test_after_a_step_that_is_repeated_no_rank_is_said_to_wait():
    assert run_ranks(repeated, 4) == [[]] * 4


class Gone:
    """A store whose keeper has ended."""

    def __getattr__(self, name):
        raise RuntimeError("Broken pipe")


def without_store(rank):
    log = log_of(timeout_s=1, waits=True)
    if rank == 1:
        return ""
    log.store = Gone()
    with pytest.raises(BurstError) as error:
        PassAnnouncer.of(log, A).begin(PassKind.FORWARD)
    return str(error.value)


def test_without_a_store_no_rank_is_said_to_be_missing():
    for sentence in run_ranks(without_store, 3)[::2]:
        assert "got a broken connection in pass 1 of the group, a forward: nothing came" in sentence


def stepped(rank):
    """Whether weights are written after a pass that differed; what later steps raise."""
    log, found = log_of(), []
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for terms in (A, B if rank == 1 else A, A):
        weight.grad = torch.ones(1)
        if not log.raised_to_caller:
            PassAnnouncer.of(log, terms).begin(PassKind.FORWARD)
        try:
            optimizer.step()
            found.append(weight.item())
        except DisagreementError as error:
            found.append(str(error))
    del log
    for _ in range(100):  # the thread that looks at it may hold it for a moment
        gc.collect()
        if not _global_optimizer_pre_hooks:
            break
        time.sleep(0.1)
    return found, len(_global_optimizer_pre_hooks)


def test_before_an_optimizer_writes_weights_stamps_are_compared():
    """Later steps may be those of another group."""
    for (first, said, later), hooks in run_ranks(stepped, 3):
        assert (first, later) == (0.0, -1.0)
        assert "causal=False on cp ranks [1]" in said and "in a new group" in said
        assert hooks == 0


def test_without_a_log_nothing_is_begun():
    assert PassAnnouncer().begin(PassKind.FORWARD) == 0
