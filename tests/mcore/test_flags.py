"""Flags: each configuration field has one, and its value arrives there."""

from argparse import ArgumentParser
from dataclasses import fields

import pytest

from megatron_burst.config import OPTIONS, BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore.args import add_flags

FLAGS = """--burst-keep half --burst-keep-layers 3 --burst-keep-offload both
    --burst-tune keep_debug=true,keep_host_gib=2.5"""


def parsed(flags):
    parser = ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags.split())


def config(flags):
    return BurstConfig.from_args(parsed(flags))


def test_every_flag_reaches_the_configuration():
    assert config("") == BurstConfig()
    assert config(FLAGS) == BurstConfig(
        keep="half", keep_layers=3, keep_offload="both", keep_debug=True, keep_host_gib=2.5
    )
    auto = config("--burst-keep auto --burst-keep-budget-gib 4")
    assert auto == BurstConfig(keep="auto", keep_budget_gib=4.0)


def test_every_field_has_a_flag():
    names = vars(parsed("")).keys()
    wanted = {f"burst_{name}" for name in OPTIONS}
    wanted.add("burst_tune")
    wanted |= {f"burst_loss_{field.name}" for field in fields(FusedLossConfig)}
    wanted.remove("burst_loss_grads")  # in Python only
    assert names == wanted | {
        "context_parallel_impl", "burst_fused_loss", "burst_plan", "burst_dump_args", "burst_log",
    }  # fmt: skip
    assert set(vars(parsed("")).values()) == {None, False, "megatron"}
    assert sum(name.startswith("burst_") for name in names) <= 16


@pytest.mark.parametrize(
    "flags",
    ["--burst-keep-layers 2.5", "--burst-keep most", "--burst-keep 0.5", "--burst-keep-offload"],
)
def test_values_are_checked(flags, capsys):
    with pytest.raises(SystemExit):
        parsed(flags)
    assert "usage" in capsys.readouterr().err


def test_numbers_are_whole_where_they_count_something():
    given = config("--burst-keep all --burst-keep-layers 2 --burst-tune timeout_s=1.5")
    assert (given.keep_layers, given.timeout_s) == (2, 1.5)
    assert type(given.keep_layers) is int


def test_tunings_of_all_flags_come_together_and_stay_text_for_checkpoints():
    given = parsed("--burst-tune force.circulate=q,nodes=2 --burst-tune overlap=false")
    assert given.burst_tune == ["force.circulate=q,nodes=2", "overlap=false"]
    assert BurstConfig.from_args(given) == BurstConfig(
        force=Force(circulate="q"), nodes=2, overlap=False
    )
    with pytest.raises(BurstError, match="given once.*got 'nodes=4'"):
        config("--burst-tune nodes=2 --burst-tune nodes=4")


def test_a_bad_tuning_is_refused_beside_the_nearest(capsys):
    with pytest.raises(SystemExit):
        parsed("--burst-tune force.circulat=q")
    said = capsys.readouterr().err.rpartition("error:")[2]  # after the usage
    assert (
        "got 'force.circulat=q', did you mean 'force.circulate'?" in said
        and "docs/how-to/settings.md#tunings" in said
    )
    assert "nccl_ctas" not in said


def test_help_says_what_a_value_needs():
    """The help of a flag that is refused alone names the flag that it needs; `auto` needs none."""
    parser = ArgumentParser()
    add_flags(parser)
    helps = {action.dest: action.help for action in parser._actions}
    assert "--burst-keep auto" in helps["burst_keep_budget_gib"]
    with pytest.raises(BurstError, match="keep_budget_gib must come with keep=auto"):
        config("--burst-keep all --burst-keep-budget-gib 2")
    assert config("--burst-keep auto").keep == "auto"
    assert "first step" in helps["burst_keep"]
