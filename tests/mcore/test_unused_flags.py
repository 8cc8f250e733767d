"""Burst flags that nothing in a run would read are refused where they are given."""

from argparse import ArgumentParser
from dataclasses import fields

import pytest

from megatron_burst.config import OPTIONS
from megatron_burst.errors import BurstError
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore.args import check_unused
from megatron_burst.mcore.launch import validate_flags, with_flags


def megatron_arguments(parser):
    parser.add_argument("--cp-comm-type", nargs="+")
    return parser


def parsed(words: str):
    parser = with_flags(megatron_arguments, ArgumentParser(), lambda args: None)
    return parser.parse_args(words.split())


BURST = "--context-parallel-impl burst"
FOR_ATTENTION = {
    "intra": "gather", "inter": "a2a", "invariant": "", "backend": "reference",
    "tune": "force.circulate=q", "log": "",
}  # fmt: skip
FOR_LOSS = {"label_smoothing": "0.1", "z_loss": "0.0", "softcap": "30"}


def test_there_is_a_case_for_every_option_that_has_a_flag():
    names = {name for name in OPTIONS if not name.startswith("keep")}
    assert FOR_ATTENTION.keys() == names | {"tune", "log"}
    assert FOR_LOSS.keys() == {f.name for f in fields(FusedLossConfig)} - {"grads"}


@pytest.mark.parametrize("name", FOR_ATTENTION)
def test_options_of_attention_need_burst(name):
    given = f"--burst-{name.replace('_', '-')} {FOR_ATTENTION[name]}"
    with pytest.raises(BurstError, match=f"^--burst-.*must come with {BURST}.*got no {BURST}; add"):
        check_unused(parsed(given))
    check_unused(parsed(f"{given} {BURST}"))
    check_unused(parsed(f"{given} --cp-comm-type p2p burst"))  # by spec, without patches


@pytest.mark.parametrize("name", FOR_LOSS)
def test_options_of_the_loss_need_it(name):
    given = f"--burst-loss-{name.replace('_', '-')} {FOR_LOSS[name]}"
    with pytest.raises(BurstError, match="^--burst-loss-.*must come with --burst-fused-loss"):
        check_unused(parsed(f"{given} {BURST}"))
    check_unused(parsed(f"{given} --burst-fused-loss"))


def test_keeping_works_with_megatrons_own_attention_too():
    check_unused(
        parsed("--burst-keep all --burst-keep-offload results --burst-tune keep_host_gib=2")
    )
    check_unused(parsed("--burst-keep all --burst-tune keep_debug=true"))
    with pytest.raises(BurstError, match="^--burst-tune: must come"):
        check_unused(parsed("--burst-keep all --burst-tune keep_debug=true,overlap=false"))


def test_they_are_refused_when_arguments_are_validated():
    with pytest.raises(BurstError, match="^--burst-intra --burst-tune: must come"):
        given = parsed("--burst-intra ring --burst-tune nodes=2")
        validate_flags(lambda args, defaults: args, given)
