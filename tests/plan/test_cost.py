"""Bytes and FLOPs against closed formulas and hand-computed figures of the papers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.plan.choose import choose_circulate
from megatron_burst.plan.cost import flops, link_bytes
from megatron_burst.schedule.call import AttentionShape, Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Link, pretend_hosts
from tests.plan.strategies import schedules, topologies

MHA = AttentionShape(
    batch=1, tokens=8, heads_q=32, heads_kv=32, dim_qk=128, dim_v=128,
    itemsize=2, stat_bytes=4, grad_bytes=2,
)  # fmt: skip
GQA = replace(MHA, heads_kv=8)


def bytes_of(topology, shape, direction, circulate=Circulate.KV):
    """Bytes per link of every rank."""
    ring = schedules(
        topology, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=shape.tokens,
        direction=direction, circulate=circulate,
    )  # fmt: skip
    return [link_bytes(schedule, shape) for schedule in ring]


@given(topologies(max_side=6))
def test_bytes_are_the_closed_formulas(topology):
    """bf16, d 128: 512 B a hop and token-head forward; 1024 backward with KV, 776 with Q"""
    hops = {
        Link.INTRA: topology.inter_size * (topology.intra_size - 1),
        Link.INTER: topology.inter_size - 1,
    }
    for shape in (MHA, GQA):
        rows, rows_kv = 8 * shape.heads_q, 8 * shape.heads_kv
        cases = [
            (Direction.FORWARD, Circulate.KV, rows_kv * 512),
            (Direction.BACKWARD, Circulate.KV, rows_kv * 1024),
            (Direction.BACKWARD, Circulate.Q, rows * 776),
        ]
        for direction, circulate, per_hop in cases:
            expected = {link: count * per_hop for link, count in hops.items()}
            for sent in bytes_of(topology, shape, direction, circulate):
                assert sent == expected


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_circulating_q_saves_24_percent_between_hosts_at_every_number_of_hosts(hosts, ranks):
    """MHA, d 128, bf16. The original's extra inter hop of dQ eats all of it at two hosts."""
    topology = pretend_hosts(hosts * ranks, hosts)
    kv = bytes_of(topology, MHA, Direction.BACKWARD, Circulate.KV)[0][Link.INTER]
    q = bytes_of(topology, MHA, Direction.BACKWARD, Circulate.Q)[0][Link.INTER]
    assert 1 - q / kv == pytest.approx(0.2422, abs=1e-4)


def test_a_flat_ring_crosses_between_hosts_in_every_step():
    """Only ranks at a border send between hosts, but they send everything there."""
    nested = pretend_hosts(8, 2)
    sent = bytes_of(nested.flat(), GQA, Direction.FORWARD)
    hop = 8 * 8 * 512
    at_border = [rank for rank in range(8) if sent[rank][Link.INTER]]
    assert at_border == [3, 7]
    assert all(sent[rank][Link.INTER] == 7 * hop for rank in at_border)
    assert bytes_of(nested, GQA, Direction.FORWARD)[3][Link.INTER] == hop


@given(topologies(), st.sampled_from([MHA, GQA]))
def test_flops_are_those_of_the_whole_problem(topology, shape):
    """4 S^2 H d forward and 2.5 times that backward, the causal half; S(S+1)/2 pairs exactly."""
    s = shape.tokens * topology.cp_size
    pairs = s * (s + 1) // 2
    for direction, per_pair in ((Direction.FORWARD, 4), (Direction.BACKWARD, 10)):
        ring = schedules(
            topology, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=8, direction=direction
        )
        total = sum(flops(schedule, shape) for schedule in ring)
        assert total == per_pair * pairs * shape.heads_q * 128


@pytest.mark.parametrize(
    "heads_q, heads_kv, dims, grad_bytes, chosen",
    [
        (32, 32, (128, 128), 2, "q"),
        (32, 16, (128, 128), 2, "kv"),
        (32, 8, (128, 128), 4, "kv"),
        (32, 32, (64, 64), 4, "q"),
        (8, 8, (192, 128), 2, "q"),  # MLA, expanded heads
        (3, 3, (1, 1), 2, "kv"),  # statistics outweigh a head of one element
    ],
)
def test_auto_takes_fewer_bytes(heads_q, heads_kv, dims, grad_bytes, chosen):
    """The published break-even: Q for MHA, K,V as soon as heads are grouped."""
    shape = AttentionShape(1, 8, heads_q, heads_kv, *dims, 2, 4, grad_bytes)
    choice = choose_circulate(shape, "auto")
    assert choice.value == chosen and "a hop of backward is" in choice.reason


def test_a_choice_can_be_asked_for():
    choice = choose_circulate(GQA, "q")
    assert choice.value == "q" and choice.reason.startswith("asked for")
