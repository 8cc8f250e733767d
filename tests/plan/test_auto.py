"""The cheapest schedule by simulation; predictions against measured rows."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose import Choice, a2a_bytes
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Direction, Kernel
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.hardware import Curve, LinkSpeed
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.simulate import call as attention_cost
from megatron_burst.tools.simulate.call import attention_time, buffer_bytes, pass_time
from megatron_burst.tools.simulate.fastest import choose_call, ways

ROOT = Path(__file__).parents[2]
H200 = preset("h200")


@st.composite
def open_calls(draw) -> AttentionCall:
    """Calls that leave every choice open."""
    nodes, ranks = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4]))
    heads = draw(st.sampled_from([4, 8]))
    tokens = draw(st.sampled_from([1024, 8192, 65536]))
    shape = AttentionShape(
        1, tokens, heads * draw(st.sampled_from([1, 4])), heads, 128, 128, 2, 4, 4
    )
    return AttentionCall(shape, pretend_nodes(nodes * ranks, nodes))


def seconds(call: AttentionCall) -> float:
    return sum(attention_time(call, H200, direction).seconds for direction in Direction)


@settings(max_examples=20, deadline=None)
@given(open_calls())
def test_nothing_else_is_faster_than_what_is_chosen(call):
    chosen = choose_call(call, H200)
    assert chosen.call in set(ways(call))
    every = {way: seconds(way) for way in ways(call)}
    assert every[chosen.call] == chosen.seconds <= 1.01 * min(every.values())
    near = [way for way, time in every.items() if time <= 1.01 * min(every.values())]
    assert chosen.num_bytes == min(buffer_bytes(way) for way in near)


@settings(max_examples=40, deadline=None)
@given(open_calls(), st.data())
def test_a_resolved_call_passes_as_the_call_does(call, data):
    """Calls that resolve alike share a simulation and their buffers."""
    call = data.draw(st.sampled_from([call, *ways(call)]))
    call = replace(call, again=data.draw(st.booleans()))
    for direction in Direction:
        resolved, rank = call.resolved(direction), call.topology.cp_size - 1
        assert resolved.resolved(direction) == resolved
        assert resolved.program(rank, direction) == call.program(rank, direction)
        whole, told = attention_time(call, H200, direction), pass_time(call, H200, direction)
        assert (told.seconds, told.waits) == (whole.seconds, whole.waits)
    assert buffer_bytes(call.resolved(Direction.BACKWARD)) == buffer_bytes(call)


@pytest.mark.parametrize("intra", ["gather", "a2a"])
@pytest.mark.parametrize("circulate", ["kv", "q"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_more_nodes_need_no_more_buffers(intra, circulate, heads, monkeypatch):
    shape = AttentionShape(1, 8192, 32, 8, 128, 128, 2, 4, 4)
    monkeypatch.setattr(attention_cost, "_MOST_NODES", 100)
    sizes = {
        buffer_bytes.__wrapped__(
            AttentionCall(
                shape, pretend_nodes(2 * nodes, nodes), intra=intra, inter="ring",
                circulate=circulate, heads_per_round=heads,
            )
        )
        for nodes in (4, 5, 9, 13)
    }  # fmt: skip
    assert len(sizes) == 1


def test_what_was_asked_for_stays():
    shape = AttentionShape(1, 8192, 32, 8, 128, 128, 2, 4, 4)
    call = AttentionCall(shape, pretend_nodes(4, 1), intra="gather", heads_per_round=4)
    assert choose_call(call, H200).call == call
    open_ = AttentionCall(shape, pretend_nodes(4, 2), circulate="q")
    assert {way.circulate for way in ways(open_)} == {"q"}
    over_all = AttentionCall(shape, pretend_nodes(4, 2), inter="a2a", heads_per_round=2)
    assert {(way.inter, way.mode, way.heads) for way in ways(over_all)} == {("a2a", "a2a", 2)}
    ring = replace(open_, intra="ring")
    assert {(way.inter, way.intra) for way in ways(ring)} == {("ring", "ring")}


def test_ways_on_several_nodes():
    """Each mode inside a node under the ring, circulating either; and over all ranks."""
    shape = AttentionShape(1, 8192, 32, 8, 128, 128, 2, 4, 4)
    found = list(ways(AttentionCall(shape, pretend_nodes(8, 2))))
    assert len(set(found)) == len(found)
    assert {(way.inter, way.intra, way.circulate) for way in found} == {
        *(("ring", intra, c) for intra in ("ring", "gather", "a2a") for c in ("kv", "q")),
        ("a2a", "a2a", "auto"),
    }
    few_heads = replace(shape, heads_kv=2)  # one copy per rank
    found = list(ways(AttentionCall(few_heads, pretend_nodes(8, 2))))
    assert {way.heads for way in found if way.intra == "a2a"} == {1}
    uneven = replace(shape, heads_q=6, heads_kv=2)  # 4 ranks of a node do not divide them
    intras = {way.intra for way in ways(AttentionCall(uneven, pretend_nodes(8, 2)))}
    assert intras == {"ring", "gather"}


def with_network(gbs: float):
    inter = LinkSpeed(10.0, Curve(((1.0, gbs),)))
    return replace(H200, links=replace(H200.links, inter=inter))


@pytest.mark.parametrize("tokens", [1 << 16, 1 << 18])
@pytest.mark.parametrize(("nodes", "row", "heads"), [(2, 4, (32, 32)), (4, 1, (32, 8))])
def test_where_keys_that_stay_would_turn_the_bytes_the_exchange_is_no_slower(
    tokens, nodes, row, heads
):
    """The rule for traffic between nodes counts a ring's K and V twice, though they stay here."""
    shape = AttentionShape(1, tokens // (nodes * row), *heads, 128, 128, 2, 4, 4)
    call = AttentionCall(shape, pretend_nodes(nodes * row, nodes), resend="never")
    ring = replace(call, inter="ring")
    assert ring.recalls
    stays = (nodes - 1) * shape.rows_kv * 256 * (2 + ring.priced.grad_bytes)
    sent = a2a_bytes(shape, call.topology)
    assert stays < sent + sent // call._rounds_over_all
    assert call.between == "a2a"
    exchanged, round_ = (
        sum(pass_time(way, H200, d).seconds for d in Direction) for way in (call, ring)
    )
    assert exchanged < round_


def test_a_slow_network_changes_the_choice():
    slow, fast = with_network(5.0), with_network(200.0)
    grouped = AttentionShape(1, 16384, 32, 8, 128, 128, 2, 4, 4)
    call = AttentionCall(grouped, pretend_nodes(16, 2), intra="gather", resend="always")
    # smaller pieces are hidden and returned sooner
    loses = []
    for network in (slow, fast):
        pieces, whole = (
            sum(pass_time(replace(call, heads_per_round=n), network, d).seconds for d in Direction)
            for n in (4, 8)
        )
        loses.append(whole / pieces - 1)
    assert loses[0] > 0.05 > 0.02 > loses[1]
    call = AttentionCall(grouped, pretend_nodes(8, 4))
    # few KV heads are less to circulate than all queries are to send in an all-to-all
    assert choose_call(call, slow).call.between == "ring"
    assert choose_call(call, fast).call.between == "a2a"
    many = AttentionCall(replace(grouped, heads_kv=32), pretend_nodes(16, 2), inter="ring")
    assert choose_call(many, slow).call.circulate == "q"


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"inter": "ring", "intra": "ring"}, {"inter": "ring", "intra": "gather"},
        {"inter": "ring", "intra": "a2a"}, {"inter": "a2a"}, {"inter": "flat"},
        {"inter": "ring", "intra": "gather", "pieces": False},
        {"inter": "ring", "intra": "gather", "circulate": "q"},
    ],
)  # fmt: skip
def test_programs_are_the_engines_own(options, nodes):
    """What is simulated is what `engine/setup.py` builds for the same options."""
    import torch

    from megatron_burst.config import BurstConfig
    from megatron_burst.engine.setup import Pattern, attention_shape, resolve_inter, set_up, way_of

    topology = pretend_nodes(4, nodes)
    shape = AttentionShape(1, 64, 16, 8, 32, 32, 4, 4, 4)
    call = AttentionCall(shape, topology, backend="reference", mask=Mask.CAUSAL, **options)
    q, k, v = (torch.zeros(1, 64, heads, 32) for heads in (16, 8, 8))
    pattern = Pattern(Layout.ZIGZAG, Mask.CAUSAL, 1.0)
    if options == {"inter": "flat"}:
        options = {"flat": True}
    config = BurstConfig.of(backend="reference", **options)
    made_of = attention_shape(q, k, v)
    config, _ = resolve_inter(way_of(made_of, q.device, topology, pattern, config), config)
    assert ("flat" if config.tuning.flat else config.inter) == call.between
    arranged = topology if config.inter == "ring" else topology.flat()
    for rank in range(4):
        carrier = SimpleNamespace(topology=arranged, cp_rank=rank, transfer=Choice("pull"))
        made, _ = set_up(q, k, v, carrier, pattern, config)
        followed = made.followed.forward_executor, made.followed.backward_executor
        for executor, direction in zip(followed, Direction, strict=True):
            spec = call.spec(rank, direction)
            pulled = spec.pulled and arranged.intra_size > 1
            kernel = Kernel(True, True, True)  # of the reference
            in_units, unit = replace(spec, pulled=pulled, kernel=kernel).in_units()
            assert (executor.program, executor.unit) == (call.program_of(in_units), unit)


def test_predictions_of_lengths_that_were_not_fitted_are_near():
    """Guards the presets and the simulation against changes that degrade them."""
    pytest.importorskip("matplotlib")
    from benchmarks import validate_plan as validate

    names = ("attention", "ablation")
    rows = validate.read([ROOT / f"benchmarks/results/{n}_4xh200_one_node.csv" for n in names])
    found = validate.compare(rows)
    others = [one for one in found if one.kind == validate.KINDS[1]]
    assert len(others) > 10
    errors = [abs(one.error) for one in others]
    assert median(errors) < 0.1 and max(errors) < 0.25
    memory = [abs(e) for one in others if (e := one.memory_error) is not None]
    assert median(memory) < 0.05
    lost = validate.choices(found)
    assert sum(loss <= 0.03 for loss in lost) >= 0.9 * len(lost) > 0


def test_published_set_ups_are_planned_near_what_was_published():
    from benchmarks import published

    errors = [
        abs(published.predicted(row).time.tokens_per_gpu / row.tokens - 1)
        for row in published.PUBLISHED
        if row.tokens
    ]
    assert median(errors) < 0.1 and max(errors) < 0.25
