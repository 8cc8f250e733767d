"""Pieces between hosts, executed on labels instead of tensors.

Catches a hop without its partner, hops that overtake each other on a link, a piece that is used
before it came or after its buffer was given away, a gradient that misses or repeats a host's share,
more hops than the way home needs.
"""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose import Exchange, choose_inter
from megatron_burst.plan.cost import exchange_bytes, nested_bytes, relay_bytes
from megatron_burst.plan.gather import gather_schedule
from megatron_burst.plan.relay import relay
from megatron_burst.plan.schedule import HOME
from megatron_burst.schedule.call import AttentionShape, Cargo, Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Link, pretend_hosts
from tests.plan.strategies import topologies


@st.composite
def relays(draw):
    """The relays of all ranks, their topology and number of rounds."""
    topology = draw(topologies(max_side=5))
    rounds, direction = draw(st.integers(1, 5)), draw(st.sampled_from(list(Direction)))
    ranks = range(topology.cp_size)
    return topology, rounds, [relay(topology, rank, rounds, direction) for rank in ranks], direction


@given(relays())
def test_each_piece_makes_n_minus_one_hops_and_its_gradient_as_many(case):
    topology, rounds, every, direction = case
    cargoes = list(Cargo) if direction is Direction.BACKWARD else [Cargo.READ]
    hops = topology.inter_size - 1
    for one in every:
        made = Counter((hop.cargo, hop.round) for hop in one.hops)
        expected = {(cargo, i): hops for cargo in cargoes for i in range(rounds)}
        assert made == Counter(expected)
        assert all(hop.ring is Link.INTER for hop in one.hops)


@given(relays())
def test_hops_pair_up_and_land_in_the_order_in_which_they_start(case):
    topology, _, every, _ = case
    for rank, one in enumerate(every):
        column = topology.coord(rank)[1]
        for cargo in Cargo:
            hops = [hop for hop in one.hops if hop.cargo is cargo]
            assert [hop.lands for hop in hops] == sorted(hop.lands for hop in hops)
            for place, hop in enumerate(hops):
                assert topology.coord(hop.dest)[1] == topology.coord(hop.source)[1] == column
                (partner,) = [[h for h in every[hop.dest].hops if h.cargo is cargo][place]]
                assert partner.source == rank and partner.round == hop.round
                assert (partner.brings, partner.lands) == (hop.sends, hop.lands)


class Buffers:
    """Labelled buffers; `busy` is the last step of whoever uses one."""

    def __init__(self):
        self.content, self.busy = {}, defaultdict(lambda: -1)

    def fill(self, slot, label, now, until):
        assert self.busy[slot] < now, "overwritten while in use"
        self.content[slot], self.busy[slot] = label, until

    def use(self, slot, until):
        self.busy[slot] = max(self.busy[slot], until)
        return self.content[slot]


def land(under_way, buffers, index):
    for rank, slot, label in under_way.pop(index, ()):
        buffers[rank].content[slot] = Counter(label) if isinstance(label, Counter) else label


@given(relays())
def test_in_every_step_the_right_piece_visits(case):
    topology, _, every, _ = case
    buffers, under_way = [Buffers() for _ in every], defaultdict(list)
    for index in range(len(every[0].legs)):
        land(under_way, buffers, index)
        for rank, one in enumerate(every):
            for place, hop in enumerate(one.legs[index].reads):
                own = (hop.round, rank)
                if hop.sends == rank:
                    buffers[rank].fill(hop.from_slot, own, index, hop.lands)
                label = buffers[rank].use(hop.from_slot, hop.lands)
                assert label == (hop.round, hop.sends)
                to_slot = every[hop.dest].legs[index].reads[place].to_slot
                under_way[hop.lands].append((hop.dest, to_slot, label))
        for rank, one in enumerate(every):
            for hop in one.legs[index].reads:
                buffers[rank].fill(hop.to_slot, None, index, hop.lands)
        for rank, one in enumerate(every):
            leg = one.legs[index]
            row, column = topology.coord(rank)
            assert (leg.slot == HOME) == (leg.distance == 0)
            if leg.slot != HOME:
                owner = topology.rank_at(row - leg.distance, column)
                # kernels of this step may still read it when the next one is prepared
                assert buffers[rank].use(leg.slot, index + 1) == (leg.round, owner)
                assert leg.slot < one.read_slots


@given(relays())
def test_each_gradient_comes_home_once_with_every_hosts_share(case):
    topology, rounds, every, direction = case
    if direction is Direction.FORWARD:
        return
    buffers, under_way = [Buffers() for _ in every], defaultdict(list)
    home = [defaultdict(Counter) for _ in every]
    steps = len(every[0].legs)
    for index in range(steps + 1):
        land(under_way, buffers, index)
        for rank, one in enumerate(every):
            share = Counter({topology.coord(rank)[0]: 1})
            leg = one.legs[index] if index < steps else None
            if leg and leg.grad_slot == HOME:
                home[rank][leg.round] += share
            elif leg:
                assert leg.grad_slot < one.grad_slots
                if leg.fresh:
                    buffers[rank].fill(leg.grad_slot, Counter(), index, index)
                buffers[rank].use(leg.grad_slot, index).update(share)
                if leg.distance == 0:  # waits
                    buffers[rank].use(leg.grad_slot, came_home(one, leg.round))
            for coming in one.homecomings[index]:
                for slot in (coming.waiting, coming.arrived):
                    home[rank][coming.round] += buffers[rank].use(slot, index)
        for rank, one in enumerate(every):
            for place, hop in enumerate(one.legs[index].grads if index < steps else ()):
                label = Counter(buffers[rank].use(hop.from_slot, hop.lands))
                to_slot = every[hop.dest].legs[index].grads[place].to_slot
                under_way[hop.lands].append((hop.dest, to_slot, label))
        for rank, one in enumerate(every):
            for hop in one.legs[index].grads if index < steps else ():
                buffers[rank].fill(hop.to_slot, None, index, hop.lands)
    everyone = Counter(dict.fromkeys(range(topology.inter_size), 1))
    assert not under_way
    for found in home:
        assert found == dict.fromkeys(range(rounds), everyone)


def came_home(one, round_):
    """The step after which a round's gradient is complete."""
    return next(
        index
        for index, coming in enumerate(one.homecomings)
        for each in coming
        if each.round == round_
    )


@pytest.mark.parametrize("hosts", [2, 3, 4, 8])
def test_circulating_queries_saves_a_quarter_for_mha(hosts):
    """Bytes in backward: Q, dO, statistics and dQ against K, V, dK, dV, all in bf16."""
    shape = AttentionShape(1, 256, 8, 8, 128, 128, 2, 4, 2)
    topology = pretend_hosts(2 * hosts, hosts)
    sent = {
        circulate: relay_bytes(
            gather_schedule(
                topology, 1, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=256, heads_kv=8,
                heads_per_round=3, direction=Direction.BACKWARD, rectangular_causal=True,
                circulate=circulate,
            ),
            shape,
        )
        for circulate in Circulate
    }  # fmt: skip
    assert sent[Circulate.KV] == (hosts - 1) * 256 * 8 * 4 * 128 * 2
    assert round(sent[Circulate.Q] / sent[Circulate.KV] - 1, 2) == -0.24


def shape_of(heads_q, heads_kv, grad_bytes=4):
    return AttentionShape(1, 16384, heads_q, heads_kv, 128, 128, 2, 4, grad_bytes)


EIGHT, AGAIN = Exchange(8), Exchange(8, again=True)


@pytest.mark.parametrize(
    "shape, hosts, device, asked, exchange, value",
    [
        (shape_of(32, 8), 2, "cuda", "auto", EIGHT, "ring"),  # few key heads: K, V are small
        (shape_of(32, 32), 2, "cuda", "auto", EIGHT, "a2a"),
        (shape_of(32, 32, 2), 2, "cuda", "auto", EIGHT, "a2a"),
        (shape_of(32, 32, 2), 2, "cuda", "auto", AGAIN, "ring"),
        (shape_of(32, 32), 4, "cuda", "auto", AGAIN, "a2a"),
        (shape_of(32, 32, 2), 2, "cuda", "auto", Exchange(2), "ring"),  # half of it is waited for
        (shape_of(32, 32), 4, "cpu", "auto", EIGHT, "ring"),
        (shape_of(32, 30), 4, "cuda", "auto", EIGHT, "ring"),  # 8 ranks do not divide the heads
        (shape_of(32, 32), 1, "cuda", "auto", EIGHT, "ring"),
        (shape_of(32, 32), 1, "cuda", "a2a", EIGHT, "a2a"),
        (shape_of(32, 8), 2, "cuda", "flat", EIGHT, "flat"),
    ],
)
def test_between_hosts_bytes_decide(shape, hosts, device, asked, exchange, value):
    topology = pretend_hosts(8, hosts)
    choice = choose_inter(shape, topology, Layout.ZIGZAG, device, (asked, ""), exchange)
    assert choice.value == value


def test_what_nothing_hides_counts_twice():
    """MHA at two hosts, gradients in bf16: 4 units of bytes in eight rounds against 5."""
    shape, topology = shape_of(32, 32, 2), pretend_hosts(4, 2)
    unit = 16384 * 32 * 128 * 2
    statistics = 16384 * 32 * 4  # of one of lse, delta
    assert exchange_bytes(shape, topology) == 4 * unit + statistics
    ring = min(nested_bytes(shape, topology, circulate) for circulate in Circulate)
    assert ring == 5 * unit + 2 * statistics
    found = AttentionCall(shape, topology)
    assert found.between == found.mode == "a2a" and found.heads == 1
    assert found.between_why.reason == (
        "between hosts a ring sends 644 MiB a rank, an exchange 514 MiB, of which 64.2 MiB have "
        "nothing to hide behind"
    )
    for other in ({"pieces": False}, {"heads_per_round": 4}, {"again": True}):
        assert replace(found, **other).between == "ring"


def test_what_was_asked_for_inside_a_host_stays():
    choice = choose_inter(
        shape_of(32, 32),
        pretend_hosts(8, 4),
        Layout.ZIGZAG,
        "cuda",
        ("auto", "intra=gather"),
        EIGHT,
    )
    assert choice.value == "ring" and "intra=gather was asked for" in choice.reason


@pytest.mark.parametrize("again", [False, True])
def test_exchanged_bytes_are_the_formulas(again):
    """n(4h_q + 4h_kv)(1 - 1/N) elements and the statistics, in bf16; n(5h_q + 6h_kv) with kept
    results."""
    shape, topology = shape_of(32, 8), pretend_hosts(4, 2)
    width = 16384 * 128 * 2
    tensors = 5 * 32 + 6 * 8 if again else 4 * 32 + 4 * 8
    statistics = 16384 * 32 * 4 * (3 if again else 2)
    assert exchange_bytes(shape, topology, again) == (width * tensors + statistics) // 2
