"""Predictions against measured rows; what is simulated is what runs."""

from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.comm.group import state_of
from megatron_burst.resolve import reuses_remote
from megatron_burst.rules import a2a_bytes
from megatron_burst.schedule.modes import max_heads
from megatron_burst.schedule.spec import AttentionShape, Direction, Spec
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.hardware import Curve, LinkSpeed
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.simulate import call as attention_cost
from megatron_burst.tools.simulate.call import buffer_bytes, pass_time, resolved
from tests.options import burst_config
from tests.ranks import run_ranks
from tests.tools.simulate.calls import call_of, opened

ROOT = Path(__file__).parents[3]
H200 = preset("h200")


@pytest.mark.parametrize("circulate", ["kv", "q"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_more_nodes_need_no_more_buffers(circulate, heads, monkeypatch):
    shape = AttentionShape(1, 8192, 32, 8, 128, 128, 2, 4, 4)
    monkeypatch.setattr(attention_cost, "_MOST_NODES", 100)
    sizes = {
        buffer_bytes.__wrapped__(
            call_of(
                shape, pretend_nodes(2 * nodes, nodes), intra="gather", inter="ring",
                circulate=circulate, heads_per_round=heads,
            )
        )
        for nodes in (4, 5, 9, 13)
    }  # fmt: skip
    assert len(sizes) == 1


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
    topology = pretend_nodes(nodes * row, nodes)
    call = opened(shape, topology, resend="never")
    ring = resolved(replace(call, inter="ring"))
    assert reuses_remote(ring)
    stays = (nodes - 1) * shape.rows_kv * 256 * (2 + ring.shape.grad_bytes)
    sent, over_all = a2a_bytes(shape, topology), resolved(call)
    rounds = max_heads(shape, over_all.mode_topology, "a2a") / over_all.heads_per_round
    assert stays < sent + sent // rounds
    assert over_all.inter == "a2a"
    exchanged, round_ = (
        sum(pass_time(way, H200, d).seconds for d in Direction) for way in (over_all, ring)
    )
    assert exchanged < round_


def test_a_slow_network_changes_the_choice():
    slow, fast = with_network(5.0), with_network(200.0)
    grouped = AttentionShape(1, 16384, 32, 8, 128, 128, 2, 4, 4)
    # smaller pieces are hidden and returned sooner
    loses = []
    for network in (slow, fast):
        pieces, whole = (
            sum(
                pass_time(
                    call_of(
                        grouped, pretend_nodes(16, 2), intra="gather", resend="always",
                        heads_per_round=heads,
                    ),
                    network, direction,
                ).seconds
                for direction in Direction
            )
            for heads in (4, 8)
        )  # fmt: skip
        loses.append(whole / pieces - 1)
    assert loses[0] > 0.05 > 0.02 > loses[1]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"inter": "ring", "intra": "ring"}, {"inter": "ring", "intra": "gather"},
        {"intra": "a2a"}, {"inter": "a2a"}, {"inter": "flat"},
        {"inter": "ring", "intra": "gather", "pieces": False},
        {"inter": "ring", "intra": "gather", "circulate": "q"},
    ],
)  # fmt: skip
def test_programs_are_the_engines_own(options, nodes):
    """What is simulated is what `burst_attention` runs with the same options."""
    topology = pretend_nodes(4, nodes)
    shape = AttentionShape(1, 64, 16, 8, 32, 32, 4, 4, 4)
    call = call_of(shape, topology, backend="reference", device="cpu", **options)
    config = {"flat": True} if options == {"inter": "flat"} else options
    for rank, specs in enumerate(run_ranks(specs_of, 4, {"nodes": nodes, **config})):
        for found, direction in zip(specs, Direction, strict=True):
            of_pass = call.program_spec(rank, direction)
            values = {field.name: getattr(of_pass, field.name) for field in fields(Spec)}
            spec = Spec(**values | {"kernel": found.kernel})
            assert found == replace(spec, pulled=False)


def specs_of(rank, options):
    """Of both passes of a call on a rank."""
    torch.manual_seed(rank)
    q, k, v = (torch.zeros(1, 64, heads, 32) for heads in (16, 8, 8))
    config = burst_config(backend="reference", **options)
    burst_attention(q, k, v, config=config)
    (passes,) = state_of(dist.group.WORLD).resolved.values()
    return [passes.spec.program_spec(rank, direction) for direction in Direction]


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
    assert sum(loss <= 0.03 for loss in lost) >= 0.8 * len(lost) > 0 and max(lost) < 0.05


def test_published_set_ups_are_planned_near_what_was_published():
    from benchmarks import predict as published

    errors = [
        abs(published.predicted(row).time.tokens_per_gpu / row.tokens - 1)
        for row in published.PUBLISHED
        if row.tokens
    ]
    assert median(errors) < 0.1 and max(errors) < 0.25
