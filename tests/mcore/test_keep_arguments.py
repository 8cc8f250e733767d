"""What is refused of the flags of keeping before anything runs."""

from argparse import Namespace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.mcore.keep_arguments import check_keep_args

GIVEN = dict(
    recompute_granularity="full", attention_dropout=0.0, context_parallel_impl="burst",
    burst_keep="all", burst_keep_layers=None, recompute_modules=None, cp_comm_type=["burst"],
)  # fmt: skip


REFUSED = [
    (dict(recompute_granularity=None), "activations must be recomputed.*no --recompute-granularit"),
    (dict(attention_dropout=0.1), "must not drop weights.*--attention-dropout 0.1; pass --attent"),
    (
        dict(recompute_granularity="selective", recompute_modules=["mlp", "moe"]),
        "attention must be among what is recomputed.*--recompute-modules mlp moe; add core_attn",
    ),
    (
        dict(burst_keep="half", context_parallel_impl="megatron", cp_comm_type=None),
        "half: attention must be burst's.*--context-parallel-impl megatron; pass --burst-keep all",
    ),
    (
        dict(burst_keep="half", cp_comm_type=["burst", "p2p"]),
        "half: attention must be burst's.*--cp-comm-type burst p2p; pass --burst-keep all",
    ),
    (dict(cuda_graph_impl="local"), "CUDA graphs must be off.*--cuda-graph-impl local; leave it"),
    (dict(enable_cuda_graph=True), "CUDA graphs must be off.*--enable-cuda-graph True; leave it"),
    (dict(experimental_attention_variant="dsa"), "must be softmax attention.*dsa; leave --burst-k"),
    (dict(use_kitchen_attention=True), "must be burst's.*--use-kitchen-attention True; leave"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refuses_what_could_not_be_kept(changes, message):
    check_keep_args(Namespace(**GIVEN))
    with pytest.raises(BurstError, match="^--burst-keep.*" + message):
        check_keep_args(Namespace(**GIVEN | changes))


ALLOWED = [
    dict(recompute_granularity=None, recompute_activations=True),  # Megatron's short form
    dict(burst_keep="half", context_parallel_impl="megatron"),  # by spec and --cp-comm-type burst
    dict(burst_keep="half", burst_keep_layers=1, cp_comm_type=["burst", "p2p"]),
    dict(cuda_graph_impl="none", enable_cuda_graph=False, experimental_attention_variant=None),
]


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_passes_what_can_be_kept(changes):
    check_keep_args(Namespace(**GIVEN | changes))


def test_inputs_alone_may_wait_on_the_host_whatever_attention_is():
    alone = GIVEN | dict(burst_keep=None, attention_dropout=0.1)
    check_keep_args(Namespace(**alone))
    for change in (dict(recompute_granularity=None), dict(cuda_graph_impl="local")):
        with pytest.raises(BurstError, match="^--burst-keep-offload-inputs: .* leave .*out$"):
            check_keep_args(Namespace(**alone | change))
