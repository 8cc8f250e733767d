"""What a step's passes are measured to have sent and waited for, against what they did.

Ranks are made late on purpose: catches waits that nobody times, another pass than the middle one,
passes outside of steps that are counted, and bytes that were never sent.
"""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.engine.times import METER
from megatron_burst.schedule.topology import Link, pretend_nodes
from tests.attention.test_bytes import count_sends
from tests.ranks import run_ranks

LATE_S = 1.0
PASSES = 5  # of each kind; the third is in the middle


def measured(rank, world, options, late):
    """Seconds and bytes of a step by the meter, bytes that were sent, seconds that it took; the
    second rank is late with each transfer of one forward pass."""
    config, restore = BurstConfig.of(**options), dict(vars(dist))
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
        assert first == {}  # how many passes there are is not known before a step is over
        assert counted == {Link.INTRA: 0, Link.INTER: 0} | sent and counted[link] > 0
        assert 0 < seconds["exposed"] < seconds[""]
        assert seconds[link] > 0 and sum(seconds[each] for each in Link) == seconds[link]
    _, waited, *_, took = found[0]  # for the second rank, in a pass that stands for five
    if late:
        assert min(waited["exposed"], waited[link]) > 0.9 * PASSES * LATE_S
        assert took < waited["exposed"]
    else:
        assert max(waited["exposed"], waited[link]) < 0.9 * PASSES * LATE_S


def switched_off(rank):
    METER.begin_step(timed=False)
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    for _ in range(2):
        burst_attention(q, k, v)
        METER.end_step()
    return METER.seconds(), METER.sent_bytes()


def test_a_step_that_is_not_logged_is_counted_and_not_timed():
    for seconds, sent in run_ranks(switched_off, 2):
        assert seconds == {} and sent[Link.INTRA] == 2 * 16 * 2 * 8 * 4  # k and v once
