"""Bytes and waits that a step's passes are measured to have, against what they really did.

Ranks are made late on purpose. Guards against untimed waits, timing another pass than the middle
one, counting passes outside steps, and bytes that were never sent.
"""

import gc
import time
from contextlib import suppress
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.checks import clock as times
from megatron_burst.checks.clock import Clock
from megatron_burst.comm.communicator import Communicator, SendRecvs
from megatron_burst.comm.transport import OneQueue, Placement
from megatron_burst.config import BurstConfig
from megatron_burst.engine.executor import Executor
from megatron_burst.engine.ranges import METER
from megatron_burst.schedule.topology import Link, pretend_nodes
from tests.attention.test_sent_bytes import count_sends
from tests.options import burst_config
from tests.ranks import run_ranks

LATE_S = 1.0
PASSES = 5  # of each kind; the third is in the middle


def measured(rank, world, options, late):
    """Seconds and bytes of a step by the meter, bytes actually sent, and seconds it took; the
    second rank is late in each transfer of one forward pass."""
    config, restore = burst_config(**options), dict(vars(dist))
    q, k, v = (torch.randn(1, 16, heads, 8, requires_grad=True) for heads in (8, 4, 4))

    def attend():
        return burst_attention(q, k, v, config=config)

    def step(late=None):
        outs = []
        for index in range(PASSES):
            is_late[0] = rank == 1 and index == late
            outs.append(attend())
        is_late[0] = False
        torch.autograd.backward([out.sum() for out in outs])

    is_late = [False]
    METER.begin_step(timed=True)
    step()
    METER.end_step()
    first = METER.seconds()
    attend()  # an evaluation
    sent = count_sends(pretend_nodes(world, options["nodes"]), rank)
    post = dist.batch_isend_irecv

    def tardy(ops):
        if is_late[0]:
            time.sleep(LATE_S)
        return post(ops)

    dist.batch_isend_irecv = tardy
    METER.begin_step(timed=True)
    began = time.perf_counter()
    step(late)
    METER.end_step()
    took = time.perf_counter() - began
    vars(dist).update(restore)
    attend()
    return first, METER.seconds(), METER.sent_bytes(), dict(sent), took


@pytest.mark.parametrize(
    "options, link",
    [({"intra": "ring", "nodes": 1}, Link.INTRA), ({"inter": "ring", "nodes": 2}, Link.INTER)],
    ids=["one node", "two nodes"],
)
@pytest.mark.parametrize("late", [PASSES // 2, 0])
def test_a_pass_stands_for_all_and_its_waits_are_exposed(options, link, late):
    found = run_ranks(measured, 2, 2, options, late)
    for first, seconds, counted, sent, _ in found:
        assert first == {}  # the number of passes is unknown until a step is over
        assert counted == {Link.INTRA: 0, Link.INTER: 0} | sent and counted[link] > 0
        assert seconds.keys() == {"", "exposed"} and 0 < seconds["exposed"] < seconds[""]
    _, waited, *_, took = found[0]  # for the second rank, in a pass that stands for five
    if late:
        assert waited["exposed"] > 0.9 * PASSES * LATE_S
        assert took < waited["exposed"]
    else:
        assert waited["exposed"] < 0.9 * PASSES * LATE_S


def measured_waits(rank, fewer):
    """Exposed seconds: the meter's, and of all waits, on a clock that only waits advance."""
    now, truth, wait = [0.0], [0.0], SendRecvs.wait

    def waited(self, stream=None):
        wait(self, stream)
        now[0] += 1
        truth[0] += 1

    SendRecvs.wait = waited
    times.perf_counter, config = lambda: now[0], BurstConfig(nodes=2)
    q, k, v = (torch.randn(1, 32, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    for count in (4, 1 if fewer else 4):
        truth[0] = 0.0
        METER.begin_step(timed=True)
        outs = [burst_attention(q, k, v, config=config) for _ in range(count)]
        torch.autograd.backward([out.sum() for out in outs])
        METER.end_step()
    return METER.seconds(), truth[0]


@pytest.mark.parametrize("fewer", [False, True])
def test_all_waits_of_a_pass_are_exposed(fewer):
    """Where a step has fewer passes than the one before, its first ones are timed."""
    for seconds, truth in run_ranks(measured_waits, 4, fewer):
        assert seconds["exposed"] == seconds[""] == truth > 0


def broken(rank):
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    send, found = Communicator.send, []

    def refused(*args):
        raise RuntimeError("no network")

    for wrong in (None, refused, None, None):
        Communicator.send = wrong or send
        METER.begin_step(timed=True)
        with suppress(RuntimeError):
            burst_attention(q, k, v)
        METER.end_step()
        found.append(bool(METER.seconds()))
    return found


def test_a_step_that_raised_has_no_times_and_the_next_one_does():
    assert run_ranks(broken, 2) == [[False, False, True, True]] * 2


def left_over(rank):
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    seen, run = set(), Executor.run

    def noted(self, *args, **given):
        seen.add(ref(self))
        return run(self, *args, **given)

    Executor.run = noted
    group = dist.new_group()
    for _ in range(3):
        METER.begin_step(timed=True)
        burst_attention(q, k, v, group=group)
        METER.end_step()
    dist.destroy_process_group(group)
    del group
    burst_attention(q, k, v)  # releases what belongs to destroyed groups
    gc.collect()
    return len(seen), sum(each() is not None for each in seen), METER.sent_bytes()


def test_programs_of_a_group_go_with_it_though_their_step_was_not_logged():
    for seen, alive, sent in run_ranks(left_over, 2):
        assert (seen, alive) == (2, 1) and sent[Link.INTRA] > 0


class Event:
    """Stands in for a CUDA event."""

    done = True

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = 1e3 * time.perf_counter()

    def query(self):
        return self.done

    def elapsed_time(self, later):
        return later.at - self.at


def by_events(rank, done):
    """A step on what poses as a GPU."""
    begin, where = Clock.begin, Placement(torch.device("cuda"))
    Clock.begin = lambda self, queues: begin(self, OneQueue(where))
    torch.cuda.Event, Event.done = Event, done
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    for _ in range(3):
        METER.begin_step(timed=True)
        burst_attention(q, k, v)
        METER.end_step()
    return METER.seconds()


@pytest.mark.parametrize("done", [True, False])
def test_a_step_that_the_gpu_has_not_finished_has_no_times(done):
    for seconds in run_ranks(by_events, 2, done):
        assert seconds.keys() == ({"", "exposed"} if done else set())


def switched_off(rank):
    METER.begin_step(timed=False)
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    for _ in range(2):
        burst_attention(q, k, v)
        METER.end_step()
    return METER.seconds(), METER.sent_bytes()


def test_a_step_that_is_not_logged_is_counted_and_not_timed():
    for rank, (seconds, sent) in enumerate(run_ranks(switched_off, 2)):
        rows = 16 if rank else 8  # rank 1 sees rank 0's first chunk alone
        assert seconds == {} and sent[Link.INTRA] == 2 * rows * 2 * 8 * 4  # k and v once
