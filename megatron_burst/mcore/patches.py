"""Every function of Megatron and torch that burst replaces: one table, which loads neither.

A row says what is replaced, by what, its signature in 0.19.2, and why. `RELEASES` and
`OTHER_FORMS` have what differs in other releases. Line numbers in `why` are of the 0.19.2 wheel,
below megatron/. `patching.undo_all` restores all of it.
"""

import functools
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.imports import when_imported
from megatron_burst.installed import find_megatron, minor
from megatron_burst.logs import log_message
from megatron_burst.patching import EVERY_RELEASE, NEWEST, Patch, Releases, on_undo
from megatron_burst.recompute.checkpoints import CHECKPOINTS

_CORE = "megatron.core"
_ARGUMENTS = "megatron.training.arguments"
_ATTENTION = f"{_CORE}.transformer.attention"
_DOT_PRODUCT = f"{_CORE}.transformer.dot_product_attention:DotProductAttention"
_TE = f"{_CORE}.extensions.transformer_engine"
_MCORE = "megatron_burst.mcore"

# places that releases have in different forms
ATTENTION = f"{_ATTENTION}:Attention.__init__"
LATENT = f"{_CORE}.transformer.multi_latent_attention:MultiLatentAttention.__init__"
ROTARY = f"{_CORE}.models.common.embeddings.rope_utils:apply_rotary_pos_emb"
DOCUMENTS = f"{_CORE}.utils:_get_batch_on_this_cp_rank_per_document_balancing"
FINE_TUNING = f"{_CORE}.utils:get_sft_batch_on_this_cp_rank"
GPT = f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__"
HYBRID = f"{_CORE}.models.hybrid.hybrid_model:HybridModel.__init__"
MAMBA = f"{_CORE}.models.mamba.mamba_model:MambaModel.__init__"
TE_RECOMPUTE = f"{_CORE}.recompute:te_checkpoint"
RECOMPUTE = f"{_CORE}.recompute:checkpointed_forward"
RECOMPUTE_OF_BLOCK = f"{_CORE}.transformer.transformer_block:TransformerBlock._checkpointed_forward"
TRANSFORMER_LAYER = f"{_CORE}.transformer.transformer_layer:TransformerLayer.forward"
LAYER_SPEC = "megatron.training.models.gpt:default_layer_spec"
TRAIN_STEP = "megatron.training.training:train_step"
TRAINING_LOG = "megatron.training.training:training_log"

# shared parameter lists
LAYER = "self config submodules layer_number attn_mask_type attention_type cp_comm_type"
GPT_HEAD = ("self config transformer_layer_spec vocab_size max_sequence_length pre_process "
            "post_process fp16_lm_cross_entropy")  # fmt: skip
GPT_TAIL = ("parallel_output share_embeddings_and_output_weights position_embedding_type "
            "rotary_percent rotary_base rope_scaling rope_scaling_factor "
            "scatter_embedding_sequence_parallel seq_len_interpolation_factor mtp_block_spec "
            "pg_collection vp_stage")  # fmt: skip
HYBRID_TAIL = ("parallel_output share_embeddings_and_output_weights position_embedding_type "
               "rotary_percent rotary_base scatter_embedding_sequence_parallel "
               "seq_len_interpolation_factor pg_collection")  # fmt: skip
STEP = ("forward_step_func data_iterator model optimizer opt_param_scheduler config "
        "forward_backward_func iteration")  # fmt: skip
LOGGED = ("loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag "
          "skipped_iter grad_norm params_norm num_zeros_in_grad max_attention_logit pg_collection "
          "is_first_iteration")  # fmt: skip
_FORWARD = "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"
_LAYER = f"{LAYER} pg_collection pp_layer_offset name"
_MTP_LAYER = f"{LAYER} pg_collection pp_layer_offset is_mtp_layer name"
_IN_LAYER = ("self hidden_states attention_mask context context_mask rotary_pos_emb rotary_pos_cos "
             "rotary_pos_sin rotary_pos_cos_sin attention_bias inference_context packed_seq_params "
             "sequence_len_offset")  # fmt: skip
_RECOMPUTED = ("self hidden_states attention_mask context context_mask rotary_pos_emb "
               "attention_bias packed_seq_params use_inner_quantization_context "
               "padding_mask")  # fmt: skip
_OF_LAYERS = "extract_layer_indices layer_offset"
_HYBRID_HEAD = ("vocab_size max_sequence_length hybrid_layer_pattern hybrid_attention_ratio "
                "hybrid_mlp_ratio hybrid_override_pattern pre_process post_process "
                "fp16_lm_cross_entropy")  # fmt: skip
_HYBRID = f"{_HYBRID_HEAD} {HYBRID_TAIL} vp_stage"
_TE_CHECKPOINT = (
    "forward_func distribute_saved_activations get_rng_state_tracker tp_group args kwargs"
)
# shared reasons
_CORES = ("specs name Megatron's own core attention, and --spec does not reach the layers of "
          "multi-token prediction")  # fmt: skip
_OWN = "keeps what Megatron's own attention saves for its backward, with --burst-keep"
_INPUTS = "layers call it by this name; hooks for what it saves must be set around the call"
_BUILT = "attaches the fused loss to models when they are built, by any code"
_DEFERS = "has models return deferred logits, whoever builds them"


RELEASES = {  # first and last release that have a place, or need its patch
    DOCUMENTS: ((0, 19), NEWEST),
    FINE_TUNING: ((0, 18), (0, 18)),
    HYBRID: ((0, 18), NEWEST),
    MAMBA: ((0, 16), (0, 17)),
    TE_RECOMPUTE: ((0, 18), NEWEST),
    RECOMPUTE: ((0, 18), NEWEST),
    RECOMPUTE_OF_BLOCK: ((0, 16), (0, 17)),
    LAYER_SPEC: ((0, 19), NEWEST),
}
OTHER_FORMS = {  # a place's parameters in releases where they differ from 0.19.2
    ATTENTION: {
        "0.16": f"{LAYER} pg_collection",
        "0.17": f"{LAYER} pg_collection pp_layer_offset",
        "after #6402": _MTP_LAYER,
    },
    LATENT: {"0.16, 0.17": f"{LAYER} pg_collection", "after #6402": _MTP_LAYER},
    ROTARY: {
        "0.16 to 0.18": "t freqs config cu_seqlens mscale cp_group",
        "0.20": "t freqs config cu_seqlens mscale cp_group mla_rotary_interleaved inverse "
        "mla_output_remove_interleaving max_seqlen",
    },
    GPT: {"0.20": f"{GPT_HEAD} logit_dtype {GPT_TAIL}"},
    HYBRID: {
        "0.20": f"self config hybrid_stack_spec {_HYBRID_HEAD} logit_dtype {HYBRID_TAIL} vp_stage"
    },
    MAMBA: {
        "0.16": "self config mamba_stack_spec vocab_size max_sequence_length pre_process "
        "hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern post_process "
        f"fp16_lm_cross_entropy {HYBRID_TAIL}"
    },
    RECOMPUTE: {
        "after #6776": f"{_RECOMPUTED} {_OF_LAYERS} cp_layout_state",
        "after #6815": f"{_RECOMPUTED} {_OF_LAYERS} cp_layout_state packed_sequence_cp_metadata",
    },
    RECOMPUTE_OF_BLOCK: {"0.16": _RECOMPUTED, "wrapped by slime": "self args kwargs"},
    TRANSFORMER_LAYER: {"0.16": "self args kwargs"},
    TRAIN_STEP: {"0.16 to 0.18": STEP},
    TRAINING_LOG: {"0.16, 0.17": LOGGED},
}


def rows(*groups: str) -> tuple[Patch, ...]:
    """The patches of these groups, or of all, whose place this Megatron has."""
    return there(patch for patch in TABLE if not groups or patch.group in groups)


def there(patches: Iterable[Patch]) -> tuple[Patch, ...]:
    """Those whose place this Megatron has: in this release, with TransformerEngine or without as
    the patch says, and with megatron.training where that holds it."""
    megatron = find_megatron()
    if megatron is None:
        return tuple(patches)  # `apply` reports it

    def is_there(patch: Patch) -> bool:
        first, last = patch.releases
        has_module = megatron.training or not patch.module.startswith("megatron.training")
        if not (first <= minor(megatron.version) <= last and has_module):
            return False
        return patch.te is None or patch.te == importlib.import_module(_TE).HAVE_TE

    return tuple(filter(is_there, patches))


def apply(*groups: str, arguments: tuple[Any, ...] = ()) -> None:
    """Apply the patches of groups, with arguments that go to the replacements after the originals.
    Idempotent.

    Raises:
        BurstError: if Megatron or torch differs from what the table was written for.
    """
    for patch in rows(*groups):
        patch.apply(*arguments)


def apply_when_imported(*groups: str, arguments: tuple[Any, ...] = ()) -> None:
    """Apply the patches of groups, each as soon as its module is imported.

    One that does not fit is skipped with a log line: whoever imports the module may not want burst
    at all.
    """
    for patch in rows(*groups):
        on_undo(when_imported(patch.module, functools.partial(try_apply, patch, arguments)))


def try_apply(patch: Patch, arguments: tuple[Any, ...] = ()) -> None:
    """Apply a patch that is skipped with a log line if it does not fit."""
    try:
        patch.apply(*arguments)
    except BurstError as error:
        log_message(str(error), logging.WARNING)


def switch_on_keep(burst: BurstConfig) -> None:
    """Apply what keeping needs; the first limit for offloaded inputs wins."""
    if burst.keep != "none":
        apply("checkpoints", "keep")
    if burst.offloads_inputs:
        apply("inputs", arguments=(burst.keep_host_gib,))


def patches_of(
    *rows: tuple[str, str, str, str, str], te: bool | None = None,
    releases: Mapping[str, Releases] = RELEASES,
    forms: Mapping[str, Mapping[str, str]] = OTHER_FORMS,
) -> Iterator[Patch]:  # fmt: skip
    """The patches of rows (group, place, becomes, parameters, why). By place, `releases` are the
    first and last that have it, if not all do, and `forms` the parameters in other releases."""
    for group, place, becomes, parameters, why in rows:
        yield Patch(group, place, becomes, tuple(parameters.split()), why,
                    package=place.partition(".")[0].replace("megatron", "megatron-core"), te=te,
                    others=tuple(tuple(form.split()) for form in forms.get(place, {}).values()),
                    releases=releases.get(place, EVERY_RELEASE))  # fmt: skip


TABLE: tuple[Patch, ...] = (
    *patches_of(
        # applied by every entry point
        ("flags", f"{_ARGUMENTS}:add_megatron_arguments", f"{_MCORE}.launch:with_flags", "parser",
         "adds burst's flags: Megatron's parser has no hook for plugins"),
        ("flags", f"{_ARGUMENTS}:validate_args", f"{_MCORE}.launch:validate_flags", "args defaults",
         "checks burst's flags, and switches burst on if they ask for it"),
        # applied for scripts without burst too
        ("helpers", f"{_CORE}.datasets.utils:compile_helpers",
         f"{_MCORE}.launch:compile_unless_built", "",
         "the wheel has the data set helpers built, but not the Makefile that would build them, "
         "and Megatron exits without it (training/initialize.py:175)"),
        # applied by --context-parallel-impl burst and by megatron_burst.auto
        ("attention", ATTENTION, f"{_MCORE}.specs:build_burst", _LAYER, _CORES),
        ("attention", LATENT, f"{_MCORE}.specs:build_burst", _LAYER,
         "builds its core attention itself, after Attention has built one"),
        # for options that a script sets, in heterogeneous models
        ("layers", f"{_CORE}.transformer.heterogeneous.heterogeneous_config:"
         "HeterogeneousTransformerConfig.get_config_for_layer", f"{_MCORE}.specs:with_options",
         "self layer_number",
         "copies only Megatron's own fields into a layer's configuration, so `burst` is lost"),
        # for --batch-invariant-mode with --burst-invariant
        ("invariant", f"{_CORE}.transformer.transformer_config:TransformerConfig.__post_init__",
         f"{_MCORE}.launch:at_any_cp_size", "self",
         "asserts that batch-invariant models have one context-parallel rank, as "
         "TransformerEngine's attention needs (core/transformer/transformer_config.py:2892)"),
        # also applied by the flag
        ("asked", ATTENTION, f"{_MCORE}.specs:refuse_unset", _LAYER, "a script may bypass the "
         "validate_args that sets cp_comm_type, and the flag would have no effect"),
    ),
    # for packed samples
    *patches_of(
        ("packed", DOCUMENTS, f"{_MCORE}.packed:shard_without_te", "batch cp_group",
         "TransformerEngine's extension tells which rows a rank has (core/utils.py:2441), and "
         "without TransformerEngine there is none"),
        ("packed", FINE_TUNING, f"{_MCORE}.packed:shard_without_te", "batch cp_group",
         "the same in 0.18"),
        te=False,
    ),
    *patches_of(
        # for --dataloader-inter-document-masking
        ("anywhere", ROTARY, f"{_MCORE}.packed:rotate_anywhere",
         "t freqs config cu_seqlens mscale cp_group mla_rotary_interleaved",
         "assumes that each document is sharded on its own (rope_utils.py:184), but these "
         "samples are sharded as a whole"),
        # for micro-batches with masks of slices
        ("positions", f"{_CORE}.models.common.embeddings.rotary_pos_embedding:"
         "RotaryEmbedding.get_rotary_seq_len", f"{_MCORE}.sliced:length_with_positions",
         "self inference_context transformer transformer_input transformer_config "
         "packed_seq_params inference_params",
         "the table of RoPE counts through the sample, and only this method is given the "
         "parameters"),
        # not replaced, but relied on
        ("hook points", f"{_ATTENTION}:CoreAttentionBuilder.__call__", "", "self config "
         "layer_number attn_mask_type attention_type cp_comm_type softmax_scale pg_collection",
         "Megatron builds burst's core attention with these"),
        ("spec", LAYER_SPEC, "", "config vp_stage", "--spec megatron_burst.spec layer_spec"),
    ),
    # applied by megatron_burst.keep, with --burst-keep or without Megatron
    *CHECKPOINTS,
    *patches_of(
        # also applied by --burst-keep
        ("keep", f"{_CORE}.tensor_parallel.random:CheckpointFunction.forward",
         "megatron_burst.recompute.keep:in_frames",
         "ctx run_function distribute_saved_activations args",
         "pairs a layer's first pass with recomputation; there is no hook around them"),
        ("keep", f"{_DOT_PRODUCT}.forward", f"{_MCORE}.keep.recompute:own_kept", _FORWARD, _OWN),
        ("keep", TRANSFORMER_LAYER, f"{_MCORE}.keep.kept_modules:in_layer",
         f"{_IN_LAYER} padding_mask inference_params",
         "modules of a layer have no hook that could replace their call"),
        *(("keep", place, f"{_MCORE}.keep.whole_layers:with_fewer_checkpoints",
           f"{_RECOMPUTED} {_OF_LAYERS}",
           "whether a layer is in a checkpoint is decided here, by two options for all layers")
          for place in (RECOMPUTE, RECOMPUTE_OF_BLOCK)),
        ("keep", f"{_CORE}.transformer.moe.token_dispatcher:"
         "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
         f"{_MCORE}.keep.kept_modules:counted_once", "self point tokens_per_expert",
         "waits for the GPU in recomputation too, which then runs no kernel until the CPU has "
         "launched the experts' (core/transformer/moe/token_dispatcher.py:913)"),
        # applied by --burst-keep-offload inputs; arguments: limit in GiB
        ("inputs", f"{_CORE}.tensor_parallel:checkpoint", f"{_MCORE}.keep.recompute:inputs_on_host",
         "function distribute_saved_activations args", _INPUTS),
        # applied by --burst-fused-loss; arguments: its configuration
        ("loss", GPT, f"{_MCORE}.fused_loss:build_with_loss", f"{GPT_HEAD} {GPT_TAIL}", _BUILT),
        *(("loss", place, f"{_MCORE}.fused_loss:build_with_loss",
           f"self config {spec} {_HYBRID}", _BUILT)
          for place, spec in ((HYBRID, "hybrid_stack_spec"), (MAMBA, "mamba_stack_spec"))),
        # applied by log_probs=1 of MEGATRON_BURST
        ("log probs", GPT, f"{_MCORE}.log_probs.head:build_deferring", f"{GPT_HEAD} {GPT_TAIL}",
         _DEFERS),
        *(("log probs", place, f"{_MCORE}.log_probs.head:build_deferring",
           f"self config {spec} {_HYBRID}", _DEFERS)
          for place, spec in ((HYBRID, "hybrid_stack_spec"), (MAMBA, "mamba_stack_spec"))),
        # applied by --burst-log
        ("log", TRAIN_STEP, f"{_MCORE}.transfer_log:count_in_step",
         f"{STEP} pg_collection p2p_communicator",
         "evaluations run between steps, and nothing is called where a step begins"),
        ("log", TRAINING_LOG, f"{_MCORE}.transfer_log:log_transfers",
         f"{LOGGED} seqlen_squared_sum_in_batch total_real_tokens_in_batch",
         "names the timers that it logs (training/training.py:2624)"),
    ),
    *patches_of(
        ("keep", "transformer_engine.pytorch.distributed:checkpoint",
         f"{_MCORE}.keep.recompute:te_in_frames", "function args kwargs",
         "the same for the checkpoint that fp8 and fp4 layers use"),
        ("keep", f"{_TE}:TEDotProductAttention.forward", f"{_MCORE}.keep.recompute:own_kept",
         f"{_FORWARD} num_splits", _OWN),
        *(("inputs", place, f"{_MCORE}.keep.recompute:inputs_on_host", _TE_CHECKPOINT, _INPUTS)
          for place in (TE_RECOMPUTE, f"{_TE}:te_checkpoint")),
        te=True,
    ),
)  # fmt: skip
