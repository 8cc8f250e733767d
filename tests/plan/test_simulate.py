"""The simulation of operations: numbers that can be worked out by hand."""

from dataclasses import replace

import pytest

from megatron_burst.plan.hardware import Curve, LinkSpeed
from megatron_burst.plan.operations import Compute, Post, Wait, without_overlap
from megatron_burst.plan.simulate import Wiring, simulate
from megatron_burst.plan.topology import Link
from tests.plan.machines import with_links


def by_hand(*ops, ranks=1, **machine):
    speed = LinkSpeed(0.0, Curve(((1.0, 1.0),)))  # 1 GB/s
    wiring = Wiring(with_links(speed, **{"nccl_share": 0.0, **machine}))
    return simulate(dict.fromkeys(range(ranks), ops), wiring)


def work(seconds: float) -> Compute:
    return Compute((("attention", seconds),), 0)


def post(name: str, num_bytes: float, link: Link = Link.INTRA, pulled: bool = True) -> Post:
    return Post((name, 0), link, num_bytes, None, None, pulled)


def test_a_transfer_runs_beside_kernels_and_the_rest_of_it_is_waited_for():
    found = by_hand(post("read", 3e9), work(1.0), Wait(("read", 0)), work(1.0))
    assert found.seconds == pytest.approx(4.0)
    assert found.exposed(Link.INTRA) == pytest.approx(2.0)


def test_transfers_share_a_link_but_not_two_links():
    one = by_hand(post("a", 2e9), post("b", 2e9), Wait(("a", 0)), Wait(("b", 0)))
    assert one.seconds == pytest.approx(4.0)
    two = by_hand(post("a", 2e9), post("b", 2e9, Link.INTER), Wait(("a", 0)), Wait(("b", 0)))
    assert two.seconds == pytest.approx(2.0)


def test_nccl_slows_kernels_while_it_moves_something():
    ops = (post("read", 1e9, pulled=False), work(2.0), Wait(("read", 0)))
    # for one second half of the multiprocessors compute; then 1.5 s are left
    assert by_hand(*ops, nccl_share=0.5).seconds == pytest.approx(2.5)
    pulled = (post("read", 1e9), work(2.0), Wait(("read", 0)))
    assert by_hand(*pulled, nccl_share=0.5).seconds == pytest.approx(2.0)


def test_a_transfer_waits_for_the_rank_that_is_late():
    hop = Post((0, Link.INTRA, "read"), Link.INTRA, 1e9, 1, 1)
    back = replace(hop, source=0, dest=0)
    wiring = Wiring(with_links(LinkSpeed(0.0, Curve(((1.0, 1.0),))), nccl_share=0.0))
    late = simulate(
        {0: (work(0.0), hop, Wait(hop.key)), 1: (work(5.0), back, Wait(hop.key))}, wiring
    )
    assert late.seconds == pytest.approx(6.0)


def test_serial_operations_wait_at_once():
    ops = (post("read", 1e9), work(1.0), Wait(("read", 0)))
    assert without_overlap(ops) == (ops[0], ops[2], ops[1])
    assert by_hand(*without_overlap(ops)).seconds == pytest.approx(2.0)


def test_a_transfer_that_comes_after_another_does_not_hold_kernels_up():
    hop = post("hop", 2e9, Link.INTER)
    gather = replace(post("read", 1e9), after=(hop.key,))
    found = by_hand(hop, gather, work(5.0), Wait(gather.key))
    assert found.seconds == pytest.approx(5.0)
    found = by_hand(hop, gather, work(1.0), Wait(hop.key), Wait(gather.key))
    assert found.seconds == pytest.approx(3.0)
    assert found.exposed(Link.INTER) == found.exposed(Link.INTRA) == pytest.approx(1.0)


def test_ranks_of_one_host_do_not_wait_for_another_host():
    """An exchange inside a host starts when its own ranks are there."""
    rows = {0: (0, 1), 1: (0, 1), 2: (2,)}
    wiring = Wiring(with_links(LinkSpeed(0.0, Curve(((1.0, 1.0),))), nccl_share=0.0))
    late = {0: 1.0, 1: 2.0, 2: 9.0}
    found = simulate(
        {
            rank: (
                work(late[rank]),
                replace(post("read", 1e9), ranks=row),
                Wait(("read", 0)),
            )
            for rank, row in rows.items()
        },
        wiring,
    )
    done = {s.rank: s.stop for s in found.spans if s.lane == "intra"}
    assert done == pytest.approx({0: 3.0, 1: 3.0, 2: 10.0})
