"""Simulated passes of attention: bounds for any schedule, shortcuts that do not change times."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.program import Stream, Transfer
from megatron_burst.schedule.spec import AttentionShape, Direction
from megatron_burst.schedule.topology import Link, pretend_nodes
from megatron_burst.tools.hardware import Curve, LinkSpeed
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.simulate.call import (
    AttentionCall,
    attention_time,
    pass_time,
    program,
    sent_bytes,
)
from megatron_burst.tools.simulate.kernels import OpTimer, Timer
from tests.sampling import examples
from tests.schedule.cases import MASKS
from tests.tools.simulate.calls import call_of
from tests.tools.simulate.machines import H200, with_links

SLACK = 1e-9  # sums in another order
INSTANT = with_links(LinkSpeed(0.0, Curve(((1.0, float("inf")),))), nccl_share=0.0)


@st.composite
def calls(draw) -> AttentionCall:
    """Calls of every mode that their topology allows."""
    nodes, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads_kv = draw(st.sampled_from([1, 4, 12, 16]))
    heads_q = heads_kv * draw(st.sampled_from([1, 4]))
    shape = AttentionShape(
        draw(st.integers(1, 2)), draw(st.sampled_from([256, 4096, 16384])), heads_q, heads_kv,
        128, 128, 2, 4, 4,
    )  # fmt: skip
    modes = [("ring", "ring"), ("ring", "gather"), ("flat", "ring")]
    modes += [("a2a", "a2a")] if heads_q % (nodes * ranks) == 0 else []
    inter, intra = draw(st.sampled_from(modes))
    heads = [None] if intra == "ring" else [None, 1] + [3] * (heads_kv > 3 * nodes * ranks)
    circulates = ["auto"] if inter == "a2a" else ["auto", "kv", "q"]
    return call_of(
        shape, pretend_nodes(nodes * ranks, nodes), intra=intra, inter=inter,
        heads_per_round=draw(st.sampled_from(heads)),
        circulate=draw(st.sampled_from(circulates)),
        transfer=draw(st.sampled_from(["auto", "send"])), mask=draw(st.sampled_from(MASKS)),
        layout=draw(st.sampled_from([Layout.ZIGZAG, Layout.CONTIGUOUS])),
        resends=draw(st.booleans()),
    )  # fmt: skip


def timeline(call, machine, direction):
    """Timeline of all ranks."""
    ranks = range(call.topology.cp_size)
    return attention_time(call, machine, direction, ranks=ranks, with_spans=True)


def seconds(call, machine, direction) -> float:
    return timeline(call, machine, direction).seconds


def computing(call, machine, direction, streams=(Stream.COMPUTE,)) -> float:
    """Seconds of these streams' kernels, of the rank with the most of them."""
    most = 0.0
    for rank in range(call.topology.cp_size):
        found = program(call, rank, direction)
        timer = OpTimer(found, Timer(machine, call.backend))
        kernels = (op for op in found.ops if not isinstance(op, Transfer))
        on_stream = (op for op in kernels if op.stream in streams)
        most = max(most, sum(map(timer.seconds, on_stream)))
    return most


directions = st.sampled_from(list(Direction))
few = examples(15, 40)


@few
@given(calls(), directions)
def test_without_overlap_nothing_is_faster(call, direction):
    machine = with_links(LinkSpeed(20.0, Curve(((1.0, 30.0),))), nccl_share=0.0)
    serial = seconds(replace(call, overlap=False), machine, direction)
    assert serial >= seconds(call, machine, direction) - SLACK


@few
@given(calls(), directions)
def test_with_instant_links_only_kernels_count(call, direction):
    expected = computing(call, INSTANT, direction)
    every = computing(call, INSTANT, direction, tuple(Stream))  # copies may be waited for
    found = timeline(call, INSTANT, direction)
    # ranks may wait for one another where a layout gives them unequal work
    assert found.seconds >= expected - SLACK
    if call.layout is Layout.ZIGZAG and call.intra == "ring":
        assert found.seconds <= expected * 1.2 + SLACK
    if call.mask.full and call.inter == "ring":  # all ranks have the same work
        assert found.seconds <= every + SLACK
        assert found.exposed(Link.INTRA) == found.exposed(Link.INTER) == 0
    if call.topology.cp_size == 1:
        assert found.seconds == pytest.approx(expected)
        assert found.exposed(Link.INTRA) == found.exposed(Link.INTER) == 0


@few
@given(calls(), directions)
def test_a_pass_is_at_least_its_kernels_and_each_of_its_links(call, direction):
    found = timeline(call, H200, direction)
    assert found.seconds >= computing(call, H200, direction) - SLACK
    lanes: dict = {}
    for span in found.spans:
        assert 0 <= span.start <= span.stop <= found.seconds + 1e-6
        lanes.setdefault((span.rank, span.lane), []).append(span)
    for spans in lanes.values():  # a lane does one thing at a time
        spans.sort(key=lambda span: span.start)
        for before, after in pairwise(spans):
            assert after.start >= before.stop - 1e-9


@few
@given(calls(), directions)
def test_slower_links_are_not_faster(call, direction):
    slow, fast = (
        with_links(LinkSpeed(10.0, Curve(((1.0, gbs),))), nccl_share=0.0) for gbs in (5.0, 50.0)
    )
    assert seconds(call, slow, direction) >= seconds(call, fast, direction) - SLACK


def test_one_rank_takes_the_time_of_its_kernel():
    shape = AttentionShape(1, 1 << 19, 8, 2, 128, 128, 2, 4, 4)
    call = call_of(shape, pretend_nodes(1, 1))
    rows = Span(0, 1 << 19)
    alone = Timer(H200).tile(Tile(rows, rows, Mask.CAUSAL), shape, Direction.FORWARD)
    # merging and packing grow with the length, compute with its square
    assert seconds(call, H200, Direction.FORWARD) == pytest.approx(alone, rel=0.02)
    pairs = (1 << 19) * ((1 << 19) + 1) / 2
    flops = 2 * pairs * 8 * 256
    speed = H200.kernel(128).forward.points[-1][1] * 1e12
    assert alone == pytest.approx(flops / speed + H200.gpu.launch_us * 1e-6)


@few
@given(calls(), directions)
def test_bytes_that_arrive_on_each_link_are_those_that_are_sent(call, direction):
    """Takes say what comes, gives what goes: equal over all ranks, on each link."""
    come, gone, topology = Counter(), Counter(), call.mode_topology
    for rank in range(topology.cp_size):
        found = program(call, rank, direction)
        gone.update(found.sent_bytes())
        for op in found.ops:
            for take in op.recvs if isinstance(op, Transfer) else ():
                come[topology.link(take.peer, rank)] += found.num_bytes(take.rows)
    assert {link: come[link] for link in Link} == {link: gone[link] for link in Link}
    if topology.inter_size > 1:
        assert come[Link.INTER] > 0


@pytest.mark.parametrize("intra", ["ring", "gather"])
@pytest.mark.parametrize("circulate", ["kv", "q"])
def test_bytes_of_many_nodes_follow_from_those_of_fewer(intra, circulate):
    shape = AttentionShape(1, 1024, 8, 8, 128, 128, 2, 4, 4)
    call = call_of(shape, pretend_nodes(60, 30), intra=intra, inter="ring", circulate=circulate)
    for direction in Direction:
        told = sent_bytes(call, direction)
        assert told == pytest.approx(program(call, 0, direction).sent_bytes())


@pytest.mark.parametrize(("inter", "intra"), [("ring", "ring"), ("ring", "gather"), ("a2a", "a2a")])
def test_two_ranks_stand_for_all_of_a_large_zigzag_group(inter, intra):
    shape = AttentionShape(1, 8192, 32, 32, 128, 128, 2, 4, 4)
    call = call_of(shape, pretend_nodes(32, 4), inter=inter, intra=intra)
    for direction in Direction:
        some = attention_time(call, preset("a800"), direction, with_spans=True)
        everyone = attention_time(call, preset("a800"), direction, ranks=range(32))
        assert {span.rank for span in some.spans} == {0, 31}
        assert some.seconds == pytest.approx(everyone.seconds, rel=0.03)


@pytest.mark.parametrize("machine", ["h200", "a800"])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32)])
@pytest.mark.parametrize("circulate", ["kv", "q"])
def test_the_time_of_many_nodes_follows_from_that_of_fewer(machine, heads, circulate):
    for tokens in (1024, 8192):
        shape = AttentionShape(1, tokens, *heads, 128, 128, 2, 4, 4)
        call = call_of(
            shape, pretend_nodes(64, 32), intra="gather", inter="ring", circulate=circulate
        )
        for direction in Direction:
            told = pass_time(call, preset(machine), direction)
            simulated = attention_time(call, preset(machine), direction)
            assert told.seconds == pytest.approx(simulated.seconds, rel=0.01)
            for link in Link:
                waits = told.exposed(link), simulated.exposed(link)
                assert waits[0] == pytest.approx(waits[1], abs=0.05 * simulated.seconds)


@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.DOCUMENTS])
@pytest.mark.parametrize(("nodes", "rows"), [(64, 8192), (32, 65536)])
def test_usual_documents_of_many_nodes_are_those_of_the_whole_sample(nodes, rows, layout):
    """Longer samples have fewer pairs, and fewer nodes stand for many."""
    shape = AttentionShape(1, rows, 32, 8, 128, 128, 2, 4, 4)
    call = call_of(
        shape, pretend_nodes(8 * nodes, nodes), layout=layout, mask=Mask(right=0, documents=True),
        intra="gather", inter="ring", circulate="kv",
    )  # fmt: skip
    for direction in Direction:
        told = pass_time(call, preset("h200"), direction)
        last = range(8 * nodes - 1, 8 * nodes)
        simulated = attention_time(call, preset("h200"), direction, ranks=last)
        assert told.seconds == pytest.approx(simulated.seconds, rel=0.03)


def test_a_flat_ring_over_nodes_is_slower_than_a_nested_one():
    """Each of its steps waits for one network card while the others idle."""
    shape = AttentionShape(1, 2048, 32, 32, 128, 128, 2, 4, 4)
    nested = call_of(shape, pretend_nodes(16, 2), intra="ring", inter="ring")
    flat = replace(nested, inter="flat")
    assert program(flat, 0, Direction.FORWARD).topology == nested.topology.flat()
    machine = preset("a800")
    for direction in Direction:
        assert seconds(flat, machine, direction) > 1.2 * seconds(nested, machine, direction)
