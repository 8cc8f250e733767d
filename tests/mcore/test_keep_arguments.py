"""What is refused of the flags of keeping before anything runs."""

from argparse import Namespace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.mcore.keep_arguments import check_keep_args

GIVEN = dict(
    recompute_granularity="full", attention_dropout=0.0, context_parallel_impl="burst",
    burst_keep="all", recompute_modules=None,
)  # fmt: skip


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
