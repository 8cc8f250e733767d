"""The cheapest schedule by simulation; predictions beside measured rows."""

import importlib.util
import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.plan.attention import AttentionCall, attention_time
from megatron_burst.plan.auto import choose_call, ways
from megatron_burst.plan.buffers import buffer_bytes, slot_count
from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.hardware import preset
from megatron_burst.plan.schedule import Cargo, Direction
from megatron_burst.plan.topology import pretend_hosts

ROOT = Path(__file__).parents[2]
H200 = preset("h200")


@st.composite
def open_calls(draw) -> AttentionCall:
    """Calls that leave everything open."""
    hosts, ranks = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4]))
    heads = draw(st.sampled_from([4, 8]))
    tokens = draw(st.sampled_from([1024, 8192, 65536]))
    shape = AttentionShape(
        1, tokens, heads * draw(st.sampled_from([1, 4])), heads, 128, 128, 2, 4, 4
    )
    return AttentionCall(shape, pretend_hosts(hosts * ranks, hosts))


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


@settings(max_examples=20, deadline=None)
@given(open_calls(), st.floats(0.0, 1.0))
def test_a_bound_on_memory_is_kept_where_it_can_be(call, part):
    sizes = [buffer_bytes(way) for way in ways(call)]
    bound = min(sizes) + part * (max(sizes) - min(sizes))
    assert choose_call(call, H200, bound).num_bytes <= bound
    assert choose_call(call, H200, 0.0).num_bytes == min(sizes)


@given(st.sampled_from(list(Cargo)), st.integers(1, 5), st.integers(1, 1 << 30))
def test_slots_are_counted_as_the_engine_makes_them(cargo, rounds, num_bytes):
    from megatron_burst.plan.slots import pulled_count

    assert slot_count(cargo, rounds, num_bytes, True) == pulled_count(cargo, rounds, num_bytes)


def test_what_was_asked_for_stays():
    shape = AttentionShape(1, 8192, 32, 8, 128, 128, 2, 4, 4)
    call = AttentionCall(shape, pretend_hosts(4, 1), intra="gather", heads_per_round=4)
    assert choose_call(call, H200).call == call
    ring = AttentionCall(shape, pretend_hosts(4, 2), circulate="q")
    assert {(way.intra, way.circulate) for way in ways(ring)} == {("ring", "q")}


def test_predictions_of_lengths_that_were_not_fitted_are_near():
    """Guards the presets and the simulation against changes that spoil them."""
    pytest.importorskip("matplotlib")
    validate = _module("validate_plan")
    names = ("attention", "ablation")
    rows = validate.read([ROOT / f"benchmarks/results/{n}_4xh200_one_host.csv" for n in names])
    found = [one for row in rows if (one := validate.compare(row, H200))]
    others = [one for one in found if not one.fitted]
    assert len(others) > 10
    errors = [abs(one.error) for one in others]
    assert median(errors) < 0.1 and max(errors) < 0.25
    memory = [abs(e) for one in others if (e := one.memory_error) is not None]
    assert median(memory) < 0.05
    lost = validate.choices(found)
    assert sum(loss <= 0.03 for loss in lost) >= 0.9 * len(lost) > 0


def test_published_set_ups_are_planned_near_what_was_published():
    published = _module("published")
    errors = []
    for row in published.PUBLISHED:
        if row.tokens:
            errors.append(abs(published.predicted(row).time.tokens_per_gpu / row.tokens - 1))
    assert median(errors) < 0.1 and max(errors) < 0.25


def _module(name: str):
    """A script of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
