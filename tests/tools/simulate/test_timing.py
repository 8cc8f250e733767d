"""The simulation of programs: numbers that can be computed by hand."""

from dataclasses import replace

import pytest

from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.program import (
    Attend,
    Buffer,
    Copy,
    Field,
    Program,
    Recv,
    Ref,
    Send,
    Space,
    Stream,
    Transfer,
)
from megatron_burst.schedule.spec import Cargo, Direction, Dtype
from megatron_burst.schedule.topology import Link, pretend_nodes
from megatron_burst.tools.hardware import Curve, KernelSpeed, LinkSpeed
from megatron_burst.tools.simulate.kernels import Timer
from megatron_burst.tools.simulate.timing import simulate
from tests.tools.simulate.machines import with_links

GB = 10**9  # one field of one byte a row, so rows are bytes; links and memory move 1 GB/s
WIDTHS = {Dtype.INPUT: 1, Dtype.SUM: 1, Dtype.WIRE: 1}
FULL = (Field("q", 1, 1), Field("k", 1, 1), Field("v", 1, 1))
READ, GRAD = Cargo.READ, Cargo.GRAD


def program(*ops, rank=0, ranks=2, nodes=1) -> Program:
    """A program on buffers of 1 GB; kernels have buffers of 1024 rows."""
    names = {ref.buffer for op in ops for ref in (*op.reads, *op.writes)}
    buffers = {
        name: Buffer(name, Space.CALL, 1024, FULL) if name.startswith("kernel")
        else Buffer(name, Space.CALL, int(float(name.split()[-1]) * GB), (Field("x", 1, 1),))
        for name in names
    }  # fmt: skip
    topology = pretend_nodes(ranks, nodes)
    return Program(topology, rank, Direction.FORWARD, 1, WIDTHS, buffers, ops)


def machine(kernel_seconds=1.0, **gpu):
    """A machine with this time for a kernel of 1024 x 1024 rows, and links of 1 GB/s."""
    speed = LinkSpeed(0.0, Curve(((1.0, 1.0),)))
    found = with_links(speed, **{"nccl_share": 0.0, "launch_us": 0.0, "memory_gbs": 1.0, **gpu})
    blocks = 8  # of 128 rows, on as many multiprocessors
    flops = 2 * 1024 * 1024 * 2 / kernel_seconds
    speeds = Curve(((1.0, flops / 1e12),))
    found = replace(found, gpu=replace(found.gpu, multiprocessors=blocks))
    return replace(found, kernels=(KernelSpeed("fa4", 1, speeds, speeds),))


def run(programs, overlap=True, **of_machine):
    hardware = machine(**of_machine)
    return simulate(programs, Timer(hardware), overlap=overlap)


def kernel(kv="kernel kv", out="kernel out", stream=Stream.COMPUTE) -> Attend:
    """A kernel of one second."""
    return Attend(Ref("kernel q"), Ref(kv), Mask.FULL, (Ref(out),), stream)


def hop(name: str, seconds: float, peer=1, link=Link.INTRA, cargo=READ, **options) -> Transfer:
    """A transfer that brings a buffer in `seconds` seconds."""
    sends, brings = Ref(f"from {name} {seconds}"), Ref(f"to {name} {seconds}")
    return Transfer(link, cargo, (Send(peer, sends),), (Recv(peer, sends, brings),), **options)


def use(*transfers: Transfer) -> Copy:
    """A copy of nothing that waits for transfers."""
    return Copy(tuple(t.recvs[0].rows for t in transfers), Ref("kernel used"))


def test_a_transfer_runs_beside_kernels_and_the_rest_of_it_is_waited_for():
    came = hop("a", 3)
    found = run({0: program(came, kernel(), use(came), kernel())})
    assert found.seconds == pytest.approx(4.0)
    assert found.exposed(Link.INTRA) == pytest.approx(2.0)
    serial = run({0: program(came, kernel(), use(came), kernel())}, overlap=False)
    assert serial.seconds == pytest.approx(5.0)
    assert serial.exposed(Link.INTRA) == pytest.approx(3.0)


def test_transfers_share_a_link_but_not_two_links():
    a, b = hop("a", 2), hop("b", 2, cargo=GRAD)
    assert run({0: program(a, b, use(a, b))}).seconds == pytest.approx(4.0)
    ring = [hop("c", 2, peer=2, link=Link.INTER), hop("d", 2)]
    one = program(*ring, use(*ring), ranks=4, nodes=2)
    assert run({0: one}).seconds == pytest.approx(2.0)


def test_nccl_slows_kernels_while_it_moves_something():
    sent = hop("a", 1)
    # for one second half of the multiprocessors compute: of two kernels 1.5 s remain
    two = program(sent, kernel(), kernel(out="kernel 2"), use(sent))
    assert run({0: two}, nccl_share=0.5).seconds == pytest.approx(2.5)
    pulled = hop("a", 1, pulled=True)
    two = program(pulled, kernel(), kernel(out="kernel 2"), use(pulled))
    assert run({0: two}, nccl_share=0.5).seconds == pytest.approx(2.0)
    late = program(kernel(), replace(sent, sends=(Send(1, Ref("kernel out")),)), use(sent))
    assert run({0: late}, nccl_share=0.5).seconds == pytest.approx(2.0)


def test_a_transfer_waits_for_the_rank_that_is_late():
    ranks = {}
    for rank in (0, 1):
        sends = replace(hop("a", 1, peer=1 - rank), sends=(Send(1 - rank, Ref("kernel out")),))
        late = [kernel()] * (5 if rank else 1)
        ranks[rank] = program(*late, sends, use(sends), rank=rank)
    found = run(ranks)
    assert found.seconds == pytest.approx(6.0)
    alone = run({0: ranks[0]})  # absent ranks behave like this one
    assert alone.seconds == pytest.approx(2.0)


def test_ranks_of_one_node_do_not_wait_for_another_node():
    """A rank that pulls waits for all ranks of its row."""
    programs = {}
    for rank, late in ((0, 1), (1, 2), (2, 9)):
        pulled = replace(
            hop("a", 1, peer=rank ^ 1, pulled=True), sends=(Send(rank ^ 1, Ref("kernel out")),)
        )
        ops = *[kernel()] * late, pulled, use(pulled)
        programs[rank] = program(*ops, rank=rank, ranks=4, nodes=2)
    done = {span.rank: span.stop for span in run(programs).spans if span.lane == "intra"}
    assert done == pytest.approx({0: 3.0, 1: 3.0, 2: 10.0})


def test_a_transfer_that_comes_after_another_does_not_hold_kernels_up():
    first = hop("a", 2, peer=2, link=Link.INTER)
    second = replace(hop("b", 1), sends=(Send(1, first.recvs[0].rows),))
    ops = first, second, *[kernel()] * 5, use(second)
    found = run({0: program(*ops, ranks=4, nodes=2)})
    assert found.seconds == pytest.approx(5.0)
    found = run({0: program(*ops[:3], use(second), ranks=4, nodes=2)})
    assert found.seconds == pytest.approx(3.0)
    # the kernels need only the second, which is late because of the first
    assert found.exposed(Link.INTER) == found.exposed(Link.INTRA) == pytest.approx(1.0)


def test_the_side_stream_waits_for_itself_and_runs_beside_the_kernels():
    came = hop("a", 3)
    beside = Copy((came.recvs[0].rows,), Ref("of 3"), Stream.SIDE)  # 6 GB are moved
    many = program(came, beside, *[kernel()] * 10)
    assert run({0: many}).seconds == pytest.approx(10.0)
    assert run({0: many}).exposed(Link.INTRA) == 0.0
    # where no kernel is left, the link is waited for
    assert run({0: program(came, beside, kernel())}).seconds == pytest.approx(9.0)
    assert run({0: program(came, beside, kernel())}).exposed(Link.INTRA) == pytest.approx(2.0)


def test_ranks_that_wait_for_each_other_for_ever_are_noticed():
    def waits(rank: int, cargo: Cargo, other: Cargo) -> Program:
        """What a rank sends is what the other receives."""
        comes = Ref(f"to {rank} 1")
        takes = Transfer(Link.INTRA, cargo, (), (Recv(1 - rank, comes, comes),))
        gives = Transfer(Link.INTRA, other, (Send(1 - rank, comes),), ())
        return program(takes, gives, rank=rank)

    with pytest.raises(AssertionError, match="forever"):
        run({0: waits(0, READ, GRAD), 1: waits(1, GRAD, READ)})
