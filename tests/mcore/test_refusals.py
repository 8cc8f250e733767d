"""The table of what burst cannot do: each row refuses exactly its feature, in one message.

Guards against rows that refuse nothing or too much, and rows that are never checked. Tests with
Megatron's own parser, configuration and models show that the names are Megatron's:
test_arguments.py, test_core_attention.py, test_loss_uses.py.
"""

from argparse import Namespace
from enum import Enum
from types import SimpleNamespace

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore import offsets, refusals
from megatron_burst.mcore.args import check_args, check_keep_args, check_loss_args, check_unused
from megatron_burst.mcore.refusals import DELTA_NETS, TABLE, refuse, refuses


class Part(Enum):
    """Like Megatron's own names for what is captured."""

    attn, mlp, moe_router, full_iteration = range(4)


LOCAL, TE = dict(cuda_graph_impl="local"), dict(cuda_graph_impl="transformer_engine")
ITERATION = dict(cuda_graph_impl="full_iteration")
IN_LAYERS = [  # whole layers with their attention; then parts next to it
    "local", "transformer_engine", LOCAL | dict(cuda_graph_modules=[Part.attn, Part.mlp]),
    LOCAL | dict(cuda_graph_modules="full"), LOCAL | dict(cuda_graph_scope_deprecated=["full"]),
    TE | dict(cuda_graph_scope=["attn"]), TE | dict(cuda_graph_modules="mlp,new"),
    LOCAL | dict(cuda_graph_modules=[Part.mlp]),
    LOCAL | dict(cuda_graph_modules=[], cuda_graph_scope_deprecated=[Part.mlp]),
]  # fmt: skip
BESIDE = [
    LOCAL | dict(cuda_graph_modules=[Part.mlp], hybrid_layer_pattern="*-"),
    LOCAL | dict(cuda_graph_modules=[Part.moe_router]),
    TE | dict(cuda_graph_modules="mlp,moe_router"),
    TE | dict(cuda_graph_scope=[Part.moe_router, "moe_preprocess"]),
    LOCAL | dict(cuda_graph_modules=[], cuda_graph_scope_deprecated=[Part.moe_router]),
]  # fmt: skip
ALL = [ITERATION, LOCAL | dict(cuda_graph_scope=[Part.full_iteration])]
MLP = dict(cuda_graph_scope=["mlp"])
OLD = {  # flags of older releases, for Megatron's own graphs and TransformerEngine's
    "enable_cuda_graph": (
        [True, MLP | dict(enable_cuda_graph=True)],
        [
            False,
            MLP | dict(enable_cuda_graph=True, hybrid_layer_pattern="*-"),
            dict(enable_cuda_graph=True, cuda_graph_scope=["moe_router"]),
        ],
    ),
    "external_cuda_graph": ([True], [False, MLP | dict(external_cuda_graph=True)]),
}
GRAPHS = {"cuda_graph_impl": ([*IN_LAYERS, *ALL], ["none", *BESIDE])} | OLD
GRAPHS_OF_ITERATIONS = {"cuda_graph_impl": (ALL, ["none", *IN_LAYERS, *BESIDE])} | {
    name: ([{name: True, "cuda_graph_scope": ["full_iteration"]}], [False, True]) for name in OLD
}
READ_IN_PYTHON = {
    name: (
        [{name: value, "cuda_graph_impl": "local"}, TE | {name: value},
         {name: value, "enable_cuda_graph": True}],
        [None, value, TE | {name: value, "cuda_graph_modules": "mlp"}],
    )
    for name, value in {"qk_clip": True, "log_max_attention_logit": True, "burst_check": 100,
                        "burst_nan_guard": True, "burst_log": "all"}.items()
} | {
    "cuda_graph_warmup_steps": (
        [TE | dict(cuda_graph_warmup_steps=0)],
        [0, TE | dict(cuda_graph_warmup_steps=1),
         TE | dict(cuda_graph_warmup_steps=0, cuda_graph_modules="mlp")],
    )
}  # fmt: skip
INVARIANT = dict(burst_invariant=True)
SENT = "router", "token_dispatch"
IN_BATCHES = dict(batch_invariant_mode=True)
GRAPHS_ON_CPU = {"cuda_graph_impl": (["local", *BESIDE], ["none"])} | {
    name: ([True], [False]) for name in OLD
}
FLAG = ([True], [False])
ALONE = dict(cp_comm_type=None, context_parallel_size=1)
ANYWHERE, THD = dict(dataloader_inter_document_masking=True), dict(packed_seq_params="thd")
FUSED_YARN = dict(multi_latent_attention=True, rope_type="yarn", apply_rope_fusion=True)
SELECTIVE = dict(recompute_granularity="selective")
MLP = SELECTIVE | dict(recompute_modules=["mlp"])
ENDLESS = {"recompute_modules": ([MLP], [["mlp"], MLP | dict(add_bias_linear=False), SELECTIVE])}
MHA = dict(  # the Q, K and V of a token have 15360 elements, and 2^31 / 15360 is 139,810
    apply_rope_fusion=True, position_embedding_type="rope", multi_latent_attention=False,
    num_attention_heads=40, group_query_attention=False, num_query_groups=1, kv_channels=128,
    qk_layernorm=False, micro_batch_size=1, tensor_model_parallel_size=1, seq_length=4 * 139808,
)  # fmt: skip
LONG = MHA | dict(seq_length=4 * 139904)
MLA = dict(  # K and V of a token together have 32768 elements, and 2^31 / 32768 is 65536
    multi_latent_attention=True, rope_type="yarn", num_attention_heads=128, qk_head_dim=128,
    qk_pos_emb_head_dim=64, v_head_dim=128, seq_length=4 * 65536,
)  # fmt: skip
FEW = dict(num_query_groups=1, micro_batch_size=3)
GQA = dict(group_query_attention=True, num_query_groups=8)
NEMOTRON = dict(  # 64 heads of 2 x 64 + 1 and 2 groups of 2 x 128 a rank: 2^31 / 8768 is 244,922.9
    hybrid_layer_pattern="M*-", mamba_num_heads=256, mamba_head_dim=64, mamba_num_groups=8,
    mamba_state_dim=128, hidden_size=8192, micro_batch_size=1, tensor_model_parallel_size=1,
    seq_length=244920,
)  # fmt: skip
ULTRA = NEMOTRON | dict(seq_length=244928)
# By feature and argument: refused values, then accepted ones; a dict has more options.
CASES = {
    "command": {
        "seq_length": ([60, 62], [64, None, dict(seq_length=63, context_parallel_size=1)]),
    },
    "run": {
        "burst_nodes": ([3, 0, -2], [1, 2, 4]),
        "cp_comm_type": ([["a2a"], ["p2p", "p2p"]], [["p2p"], ["burst"], ["p2p", "burst"]]),
        "hierarchical_context_parallel_sizes": ([[2, 2]], [None]),
        "apply_rope_fusion": (
            [LONG, LONG | dict(position_embedding_type="yarn", sft=True),
             LONG | dict(position_embedding_type="mrope"),
             MHA | dict(micro_batch_size=2), LONG | GQA | dict(micro_batch_size=3),
             LONG | GQA | FEW | dict(tensor_model_parallel_size=2),
             LONG | GQA | dict(attention_output_gate=True, micro_batch_size=2),
             MHA | MLA | dict(seq_length=4 * 65600)],
            [
                MHA, LONG | GQA, LONG | dict(qk_layernorm=True),
                LONG | dict(apply_rope_fusion=False),
                LONG | dict(tensor_model_parallel_size=2), LONG | dict(context_parallel_size=8),
                LONG | dict(position_embedding_type="none"),
                LONG | dict(position_embedding_type="yarn"),
                LONG | dict(position_embedding_type="mrope", seq_length=LONG["seq_length"] // 2,
                            micro_batch_size=2),
                MHA | MLA, LONG | MLA | dict(rope_type="rope"),
                LONG | dict(qk_l2_norm=True), LONG | GQA | dict(micro_batch_size=2),
                LONG | dict(seq_length=None), LONG | dict(num_attention_heads=None),
                LONG | dict(kv_channels=None),
            ],
        ),
        "hybrid_layer_pattern": (["M-M-"], ["M*M-", "+", ""]),
        "mamba_state_dim": (
            [ULTRA, NEMOTRON | dict(micro_batch_size=2), ULTRA | dict(mamba_num_heads=None),
             ULTRA | dict(mamba_num_groups=2, seq_length=1 << 18),
             ULTRA | dict(hybrid_layer_pattern=None, hybrid_override_pattern="M*-"),
             ULTRA | dict(hybrid_layer_pattern=None, is_hybrid_model=True)],
            [NEMOTRON, ULTRA | dict(tensor_model_parallel_size=2),
             ULTRA | dict(context_parallel_size=8), ULTRA | dict(mamba_head_dim=63),
             ULTRA | dict(hybrid_layer_pattern="G*-"), ULTRA | dict(hybrid_layer_pattern=None),
             ULTRA | dict(seq_length=None), ULTRA | dict(mamba_num_groups=4),
             ULTRA | dict(mamba_num_heads=None, hidden_size=None),
             ULTRA | dict(mamba_num_groups=None)],
        ),
    },
    "invariant": {
        "attention_backend": (["auto", "fused"], ["flash"]),
        "flash_attention_version": (
            [IN_BATCHES, IN_BATCHES | dict(flash_attention_version=3)],
            [None, IN_BATCHES | dict(flash_attention_version=4)],
        ),
    },
    "built": {"create_attention_mask_in_dataloader": FLAG},
    "model": {
        "cp_comm_type": (
            ["p2p", ["p2p", "a2a"], None, ALONE],
            ["burst", ["p2p", "burst"], ALONE | dict(attn_mask_type="no_mask"),
             ALONE | dict(attn_mask_type=None)],
        )
    },
    "spec": {
        "mtp_num_layers": ([1], [0]),
        "burst_keep": (["all", "half", "auto"], ["none"]),
        "burst_keep_offload": (["inputs", "both"], ["none", "results"]),
        "dataloader_inter_document_masking": FLAG,
        "sft": ([dict(sft=True, has_te=False)], [False, dict(sft=True, has_te=True)]),
    },
    "attention": GRAPHS_OF_ITERATIONS | READ_IN_PYTHON | ENDLESS | {
        "attention_dropout": ([0.1], [0.0]),
        "reset_attention_mask": FLAG,
        "dataloader_inter_document_masking": (
            [ANYWHERE | dict(mtp_num_layers=1), ANYWHERE | dict(hybrid_layer_pattern="M*"),
             ANYWHERE | dict(hybrid_layer_pattern="G*"), ANYWHERE | FUSED_YARN,
             *(ANYWHERE | dict(experimental_attention_variant=name) for name in DELTA_NETS)],
            [True, False, ANYWHERE | dict(mtp_num_layers=1, context_parallel_size=1),
             ANYWHERE | FUSED_YARN | dict(apply_rope_fusion=False)],
        ),
        "hybrid_context_parallel": FLAG,
        "attention_cp_layout": (
            ["contiguous"],
            ["zigzag", dict(attention_cp_layout="contiguous", context_parallel_size=1)],
        ),
        "use_kitchen_attention": FLAG,
        "flash_attention_version": (
            [3, dict(flash_attention_version=3) | INVARIANT],
            [None, dict(flash_attention_version=4) | INVARIANT],
        ),
        "experimental_attention_variant": (["dsa", "dsv4_hybrid", "kda"], [*DELTA_NETS]),
        "batch_invariant_mode": ([True], [False, dict(batch_invariant_mode=True) | INVARIANT]),
        "transformer_impl": (["inference_optimized"], ["local", "transformer_engine"]),
        "fp8_dot_product_attention": FLAG,
        "fp8_multi_head_attention": FLAG,
        "attention_type": (["cross"], ["self"]),
        "attn_mask_type": (["arbitrary"], ["causal", "no_mask", "padding", "padding_causal"]),
    },
    "backend": {"attention_backend": (["local"], ["auto", "flash", "fused", "unfused"])},
    "call": {
        "attention_mask": ([(1, 1, 4, 4)], []),
        "attention_bias": ([(1, 2, 4, 4)], []),
        "packed_seq_params": (["sbhd", "None"], ["thd"]),
        "attn_mask_type": (
            ["padding", "padding_causal", None, THD | dict(attn_mask_type="arbitrary")],
            ["no_mask", THD | dict(attn_mask_type="padding")],
        ),
    },
    "packed": {
        "cu_seqlens_q": (["none"], []),
        "cu_seqlens_kv": (["other boundaries"], []),
        "cp_partition_mode": (
            ["contiguous"], ["zigzag", dict(cp_partition_mode="contiguous", cp_group_size=1)]
        ),
        "local_cp_size": ([2], [4]),
        "mtp_num_layers": ([1], [0]),
        "keep": (["auto"], ["none", "half", "all"]),
    },
    "cache": {
        "key_tokens": (
            [8, dict(query_tokens=8, key_tokens=8, engine=True, place="an inference engine")], [1]
        )
    },
    "recompute": GRAPHS | ENDLESS | {
        "recompute_granularity": (
            [None], ["full", dict(recompute_granularity=None, recompute_activations=True)]
        ),
    },
    "keep": {
        "recompute_modules": (
            [SELECTIVE | dict(recompute_modules=["mlp", "moe"])],
            [["mlp"], SELECTIVE | dict(recompute_modules=["mlp", "core_attn"]), SELECTIVE],
        ),
        "attention_dropout": ([0.1], [0.0]),
        "experimental_attention_variant": (["dsa"], [*DELTA_NETS]),
        "use_kitchen_attention": FLAG,
        "fp8_dot_product_attention": FLAG,
        "fp8_multi_head_attention": FLAG,
    },
    "half": {
        "context_parallel_impl": (
            [dict(context_parallel_impl="megatron", cp_comm_type=None)],
            ["burst", dict(context_parallel_impl="megatron")],  # by --cp-comm-type burst
        ),
        "cp_comm_type": (
            [["burst", "p2p"]],
            [["burst"], dict(burst_keep_layers=1, cp_comm_type=["burst", "p2p"])],
        ),
    },
    "modules": {
        "recompute_granularity": (["selective"], ["full"]),
        "fp8": (["hybrid"], []),
        "fp4": (["e2m1"], []),
        "cuda_graph_impl": (["local", "transformer_engine"], ["none"]),
        "enable_cuda_graph": FLAG,
        "external_cuda_graph": FLAG,
        "moe_enable_routing_replay": (
            [dict(moe_enable_routing_replay=True, burst_keep_modules=("router",))], [True],
        ),
        "burst_keep_modules": (
            [("linear_qkv", "linear_fc2"), ("token_dispatch",)],
            [("linear_qkv", "linear_kv_up_proj"), SENT, ()],
        ),
        "moe_token_dispatcher_type": (
            [dict(moe_token_dispatcher_type="allgather", burst_keep_modules=SENT)], ["allgather"],
        ),
        "moe_shared_expert_overlap": (
            [dict(moe_shared_expert_overlap=True, burst_keep_modules=SENT)], [True],
        ),
        "expert_model_parallel_size": (
            [dict(expert_model_parallel_size=1, burst_keep_modules=SENT)], [1],
        ),
    },
    "own": {"keep": (["half"], ["none", "all"])},
    "loss": GRAPHS_OF_ITERATIONS | ENDLESS | {
        "fp16_lm_cross_entropy": FLAG,
        "defer_embedding_wgrad_compute": FLAG,
        "overlap_moe_expert_parallel_comm": FLAG,
        "linear_cp_layout": (
            [dict(linear_cp_layout="contiguous", mtp_num_layers=1)],
            ["contiguous", dict(linear_cp_layout="zigzag", mtp_num_layers=1),
             dict(linear_cp_layout="contiguous", mtp_num_layers=1, context_parallel_size=1)],
        ),
        "logits_load_dir": (["logits"], []),
        "modelopt_enabled": FLAG,
    },
    "head": GRAPHS_OF_ITERATIONS | {
        "burst_loss_grads": (
            [dict(burst_loss_grads="forward", fp16=True)],
            ["forward", dict(burst_loss_grads="auto", fp16=True)],
        ),
        "fp16_lm_cross_entropy": FLAG,
        "defer_embedding_wgrad_compute": FLAG,
        "output_layer": (["Own"], []),
        "bias": FLAG,
        "parallel_output": ([False], [True]),
        "gtp_remat_size": ([2], [1]),
        "disable_grad_reduce": FLAG,
    },
    "cpu": GRAPHS_ON_CPU | {
        "fp8": (["hybrid"], []),
        "fp4": (["e2m1"], []),
        "tp_comm_overlap": FLAG,
        "moe_token_dispatcher_type": (["flex"], ["allgather", "alltoall"]),
        "optimizer_cpu_offload": FLAG,
        "batch_invariant_mode": FLAG,
        "log_memory_to_tensorboard": FLAG,
        "log_device_memory_used": FLAG,
        "record_memory_history": FLAG,
        "profile": ([True], [False, dict(profile=True, use_pytorch_profiler=True)]),
    },
}  # fmt: skip
BASE = dict(
    add_bias_linear=True, use_pytorch_profiler=False,
    context_parallel_size=4, seq_length=64, cp_comm_type=["burst"], context_parallel_impl="burst",
    recompute_granularity="full", attn_mask_type="causal", burst_keep_layers=None,
    cp_group_size=4, query_tokens=1, key_tokens=1, engine=False, place="one call", layer_number=3,
)  # fmt: skip
REFUSED = [
    (feature, argument, value)
    for feature, arguments in CASES.items()
    for argument, (refused, _) in arguments.items()
    for value in refused
]


def options_with(argument, value) -> SimpleNamespace:
    changes = value if isinstance(value, dict) else {argument: value}
    return SimpleNamespace(**BASE | changes)


def test_every_row_has_cases_and_every_case_a_row():
    rows = {(feature, row.argument) for row in TABLE for feature in row.features.split()}
    assert rows == {(feature, name) for feature, names in CASES.items() for name in names}
    assert len(rows) == sum(len(row.features.split()) for row in TABLE)  # none twice


@pytest.mark.parametrize("feature, argument, value", REFUSED, ids=str)
def test_a_row_refuses_in_one_sentence(feature, argument, value):
    refuse(feature, SimpleNamespace(**BASE), "nobody")
    options = options_with(argument, value)
    with pytest.raises(BurstError) as refused:
        refuse(feature, options, "somebody")
    said = str(refused.value)
    head, got, change = said.split("; ")
    assert head.startswith("somebody: cannot run with ") and ", because " in head
    shown = getattr(options, argument, None)
    words = " ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
    assert got.startswith("got ") and change and "\n" not in said
    assert words in got or str(shown) in got or shown is None or feature == "own"
    refuse(feature, options, "somebody", skip=(argument,))


@pytest.mark.parametrize("feature", CASES)
def test_what_is_fine_is_not_refused(feature):
    refuse(feature, SimpleNamespace(**BASE), "nobody")
    for argument, (_, fine) in CASES[feature].items():
        for value in fine:
            refuse(feature, options_with(argument, value), "somebody")


@pytest.mark.parametrize(
    "options, numbers",
    [
        (dict(seq_length=60), "--seq-length 60 and --context-parallel-size 4; .* 56 or 64$"),
        (
            dict(burst_nodes=3),
            "--burst-tune nodes=3 and --.*-size 4; .* divisors of 4$",
        ),
    ],
)
def test_numbers_to_choose_are_told(options, numbers):
    with pytest.raises(BurstError, match=numbers):
        for feature in ("command", "run"):
            refuse(feature, SimpleNamespace(**BASE | options), "somebody")


def arguments(**changes) -> Namespace:
    given = dict(burst_keep="all")
    return Namespace(**BASE | given | changes)


@pytest.mark.parametrize(
    "ask, changes, who",
    [
        (check_args, dict(burst_tune=["nodes=3"]), "--context-parallel-impl burst"),
        (check_args, dict(use_kitchen_attention=True), "--context-parallel-impl burst"),
        (check_keep_args, dict(recompute_granularity=None), "--burst-keep"),
        (check_keep_args, dict(attention_dropout=0.1), "--burst-keep"),
        (check_keep_args, dict(burst_keep="half", cp_comm_type=["p2p", "burst"]),
         "--burst-keep half"),
        (check_keep_args, dict(burst_tune=["keep_modules=linear_fc1"], fp8="hybrid"),
         "--burst-tune keep_modules"),
        (check_keep_args, dict(burst_keep=None, cuda_graph_impl="local"),
         "--burst-keep-offload inputs"),
        (check_loss_args, dict(modelopt_enabled=True), "--burst-fused-loss"),
    ],
)  # fmt: skip
def test_a_command_line_is_asked_for_each_of_its_features(ask, changes, who):
    ask(arguments())
    with pytest.raises(BurstError, match=f"^{who}: cannot run with "):
        ask(arguments(**changes))


def test_inputs_alone_may_wait_on_the_host_whatever_attention_is():
    check_keep_args(arguments(burst_keep=None, attention_dropout=0.1, cp_comm_type=None))


def test_numbers_of_the_loss_are_checked():
    assert FusedLossConfig().label_smoothing == 0
    with pytest.raises(BurstError, match=r"label_smoothing must be in \[0, 1\)"):
        check_loss_args(arguments(burst_loss_label_smoothing=1.5))
    check_unused(arguments(burst_tune=["keep_host_gib=2"]))


@pytest.mark.parametrize("padded", [False, True])
def test_hybrids_may_mask_documents_where_megatron_pads_each(padded, tmp_path, monkeypatch):
    """From #6912 on, pretrain_hybrid.py does, and pretrain_gpt.py does not."""
    place = tmp_path / "core/context_parallel"
    place.mkdir(parents=True)
    (place / "utils.py").touch() if padded else None
    monkeypatch.setattr(refusals, "find_megatron", lambda: SimpleNamespace(folder=tmp_path))
    hybrid = options_with("", ANYWHERE | dict(hybrid_layer_pattern="M*"))
    assert refuses("attention", "dataloader_inter_document_masking", hybrid) != padded
    gpt = options_with("", ANYWHERE | dict(mtp_num_layers=1))
    assert refuses("attention", "dataloader_inter_document_masking", gpt)


@pytest.mark.parametrize("fixed", [0, 5, 6])
def test_mamba_kernels_that_count_in_64_bits_run_longer_samples(fixed, tmp_path, monkeypatch):
    """All kernels of the scan must, and the convolution counts to 2^32. The package is not
    loaded."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("raise RuntimeError('loaded')")
    kernel = "@triton.jit\ndef kernel():\n    at = tl.program_id(axis=0)"
    for number, name in enumerate(offsets._SCAN):
        half = kernel + ("" if number == fixed else ".to(tl.int64)")
        text = (kernel + ".to(tl.int64)\n" + half) if number <= fixed else kernel
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    offsets._scans_in_64_bits.cache_clear()
    for seq, right in ((244_928, fixed == 6), (489_845, fixed == 6), (489_856, False)):
        options = SimpleNamespace(**ULTRA | dict(seq_length=seq), context_parallel_size=4)
        assert refuses("run", "mamba_state_dim", options) != right
    offsets._scans_in_64_bits.cache_clear()
