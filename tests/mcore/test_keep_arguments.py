"""Flags of keeping: how they reach BurstConfig, and what is refused before anything runs."""

from argparse import ArgumentParser, Namespace

import pytest

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore.keep_arguments import add_keep_flags, check_keep_args

FLAGS = """--burst-keep half --burst-keep-layers 3 --burst-keep-offload --burst-keep-offload-inputs
    --burst-keep-debug --burst-keep-host-gib 2.5"""
GIVEN = dict(
    recompute_granularity="full", attention_dropout=0.0, context_parallel_impl="burst",
    burst_keep="all", recompute_modules=None,
)  # fmt: skip


def parsed(flags):
    parser = ArgumentParser()
    add_keep_flags(parser.add_argument_group("burst"))
    return BurstConfig.from_args(parser.parse_args(flags.split()))


def test_every_flag_reaches_the_configuration():
    assert parsed("") == BurstConfig()
    assert parsed(FLAGS) == BurstConfig(
        keep="half", keep_layers=3, keep_offload=True, keep_offload_inputs=True, keep_debug=True,
        keep_host_gib=2.5,
    )  # fmt: skip
    auto = parsed("--burst-keep auto --burst-keep-budget-gib 4")
    assert auto == BurstConfig(keep="auto", keep_budget_gib=4.0)


REFUSED = [
    (dict(recompute_granularity=None), "activations must be recomputed.*no --recompute-granularit"),
    (dict(attention_dropout=0.1), "must not drop weights.*--attention-dropout 0.1; pass --attent"),
    (
        dict(recompute_granularity="selective", recompute_modules=["mlp", "moe"]),
        "attention must be among what is recomputed.*--recompute-modules mlp moe; add core_attn",
    ),
    (
        dict(burst_keep="half", context_parallel_impl="megatron"),
        "half: attention must be burst's.*--context-parallel-impl megatron; pass --burst-keep all",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refuses_what_could_not_be_kept(changes, message):
    check_keep_args(Namespace(**GIVEN))
    with pytest.raises(BurstError, match="^--burst-keep.*" + message):
        check_keep_args(Namespace(**GIVEN | changes))


def test_inputs_alone_may_wait_on_the_host_whatever_attention_is():
    check_keep_args(Namespace(**GIVEN | dict(burst_keep=None, attention_dropout=0.1)))
