"""Contradictory options are refused where they are given; tunings as text."""

from argparse import Namespace

import numpy as np
import pytest

from megatron_burst.config import (
    TUNINGS,
    BurstConfig,
    Force,
    legal_tunings,
    parse_tunings,
)
from megatron_burst.errors import BurstError
from megatron_burst.loss.options import FusedLossConfig

REFUSALS = {
    "a2a around a ring": (
        {"inter": "a2a", "intra": "ring"},
        "inter=a2a must come without another mode.*intra=ring",
    ),
    "a2a around gather": ({"inter": "a2a", "intra": "gather"}, "inter=a2a must .*intra=gather"),
    "flat around gather": (
        {"force": Force(flat=True), "intra": "gather"},
        "flat must come without.*=gather",
    ),
    "flat around a ring": (
        {"force": Force(flat=True), "inter": "ring"},
        "flat must come without.*inter=ring",
    ),
    "invariant in a ring": ({"invariant": True, "intra": "ring"}, "invariant must.*intra=ring"),
    "invariant around a ring": ({"invariant": True, "inter": "ring"}, "invariant must.*=ring"),
    "invariant and flat": (
        {"invariant": True, "force": Force(flat=True)},
        "flat and invariant must come",
    ),
    "before `force`": (
        {"circulate": "q"},
        r"circulate must be.*got circulate; pass force=Force\(circulate=\.\.\.\)",
    ),
    "unknown": ({"inter": "exchange"}, "inter must be one of auto, ring, a2a, "),
}


@pytest.mark.parametrize("options, words", REFUSALS.values(), ids=REFUSALS)
def test_contradictions_are_refused(options, words):
    with pytest.raises(BurstError, match=words):
        BurstConfig(**options)


def test_an_old_name_is_refused_with_the_new_one_and_rounds_are_one_or_several():
    with pytest.raises(BurstError, match="circulate must.*--burst-tune force.circulate="):
        parse_tunings("circulate=q")
    with pytest.raises(BurstError, match="must not both be set"):
        Force(pieces=False, heads_per_round=2)


def test_the_loss_has_two_ways_to_its_gradients():
    assert FusedLossConfig(grads="forward") != FusedLossConfig()
    with pytest.raises(BurstError, match="grads must be one of recompute, forward, .*got 'auto'"):
        FusedLossConfig(grads="auto")


@pytest.mark.parametrize("intra", ["auto", "ring", "gather", "a2a"])
def test_a_ring_between_nodes_goes_around_anything(intra):
    assert BurstConfig(inter="ring", intra=intra).intra == intra


GIVEN = {
    "": {},
    "force.circulate=q": {"force": Force(circulate="q")},
    "nodes=2,force.flat=true,overlap=false": {
        "nodes": 2, "force": Force(flat=True), "overlap": False,
    },
    "deterministic=true": {"deterministic": True},
    "force.heads_per_round=3,nccl_ctas=8,keep_debug=true": {
        "force": Force(heads_per_round=3), "nccl_ctas": 8, "keep_debug": True,
    },
    "force.pieces=false,force.grad_wire=input,force.resend=never,force.transfer=pull": {
        "force": Force(pieces=False, grad_wire="input", resend="never", transfer="pull"),
    },
    "keep_host_gib=0.5,timeout_s=1e2": {"keep_host_gib": 0.5, "timeout_s": 100.0},
    "nan_guard=true,check=100": {"nan_guard": True, "check": 100},
    "keep_modules=linear_qkv+linear_fc1": {"keep_modules": ("linear_qkv", "linear_fc1")},
}  # fmt: skip


@pytest.mark.parametrize("text", GIVEN, ids=lambda text: text or "none")
def test_tunings_are_read_by_the_types_of_their_fields(text):
    assert parse_tunings(text) == GIVEN[text]
    args = Namespace(burst_tune=[text], burst_keep="all", burst_keep_offload="results")
    kept = {"keep": "all", "keep_offload": "results"}
    assert BurstConfig.from_args(args) == BurstConfig(**kept | GIVEN[text])


def test_every_tuning_is_among_those_that_are_read():
    read = {pair.partition("=")[0] for text in GIVEN for pair in text.split(",") if pair}
    assert read == set(TUNINGS)


@pytest.mark.parametrize(
    "text, pair",
    [
        ("overlab=q", "overlab=q"), ("force.circulate", "force.circulate"),
        ("force.circulate=vk", "force.circulate=vk"),
        ("overlap=False", "overlap=False"), ("nodes=2.5", "nodes=2.5"), ("nodes=", "nodes="),
        ("nodes=2,,overlap=true", ""), ("nodes=2,nodes=4", "nodes=4"),
        ("nodes=2, overlap=true", " overlap"),
        ("timeout=3", "timeout=3"), ("timeout_s=two", "timeout_s=two"),
        ("timeout_s=", "timeout_s="), ("timeout_s=nan", "timeout_s=nan"),
    ],
)  # fmt: skip
def test_what_is_no_tuning_is_refused_beside_the_nearest(text, pair):
    with pytest.raises(BurstError, match=r"^HERE: each tuning must.*docs/how-to/settings.md#tunings") as refusal:
        parse_tunings(text, "HERE")
    said, name = str(refusal.value), pair.partition("=")[0]
    assert f"; got '{pair}" in said
    legal = dict(pair.partition("=")[::2] for pair in legal_tunings().split(", "))
    assert legal.keys() == set(TUNINGS)
    assert f", as {name}={legal[name]}," in said if name in legal else ", as name=value," in said
    meant = {"overlab": "overlap", "timeout": "timeout_s", " overlap": "overlap"}.get(name)
    assert said.count("did you mean") == (meant is not None)
    assert meant is None or f", did you mean '{meant}'?" in said
    assert "keep_debug" not in said


@pytest.mark.parametrize(
    "text",
    ["force.heads_per_round=0", "nccl_ctas=-1", "timeout_s=0", "check=0", "keep_host_gib=-0.5"],
)
def test_numbers_that_must_be_positive_are_refused(text):
    with pytest.raises(BurstError, match="must be (whole, )?positive and below 1e9.*got"):
        parse_tunings(text)


@pytest.mark.parametrize("value", [1.5, "2", 0])
@pytest.mark.parametrize(
    "name, options",
    [("check", BurstConfig), ("heads_per_round", Force), ("nccl_ctas", BurstConfig)],
)
def test_what_counts_something_is_whole_in_python_too(name, options, value):
    """A check of 1.5 was a TypeError in the first call that it might have drawn."""
    wanted = f"{name} must be whole, positive and below 1e9.*got {value}"
    with pytest.raises(BurstError, match=wanted):
        options(**{name: value})
    assert getattr(options(**{name: np.int64(3)}), name) == 3


@pytest.mark.parametrize("number", [0.0, -1.0, 1e18, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["keep_budget_gib", "keep_host_gib", "timeout_s"])
def test_so_are_those_that_are_no_end(name, number):
    """An infinite budget was a ValueError in a forward, a time-out of 1e18 an OverflowError."""
    with pytest.raises(BurstError, match=f"{name} must be positive and below 1e9.*got"):
        BurstConfig(**{"keep": "auto", name: number})


def test_in_words_only_what_differs_from_the_defaults_is_said():
    assert str(BurstConfig()) == "BurstConfig()"
    assert str(BurstConfig(nodes=2, intra="ring")) == "BurstConfig(intra='ring', nodes=2)"
