"""Places of Megatron that differ between releases: which releases have them, and their parameters.

From the wheels 0.16.1, 0.17.1 and 0.18.2 and from main (0.20); `patches.py` has 0.19.2. A row there
fits a release if any form of its place does, so a newer release needs a row here only if it changed
something. Megatron is not loaded.
"""

from megatron_burst.patching import NEWEST

_CORE = "megatron.core"

ATTENTION = f"{_CORE}.transformer.attention:Attention.__init__"
LATENT = f"{_CORE}.transformer.multi_latent_attention:MultiLatentAttention.__init__"
ROTARY = f"{_CORE}.models.common.embeddings.rope_utils:apply_rotary_pos_emb"
DOCUMENTS = f"{_CORE}.utils:_get_batch_on_this_cp_rank_per_document_balancing"
FINE_TUNING = f"{_CORE}.utils:get_sft_batch_on_this_cp_rank"
GPT = f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__"
HYBRID = f"{_CORE}.models.hybrid.hybrid_model:HybridModel.__init__"
MAMBA = f"{_CORE}.models.mamba.mamba_model:MambaModel.__init__"
FREE_OUTPUT = f"{_CORE}.pipeline_parallel.schedules:deallocate_output_tensor"
TE_RECOMPUTE = f"{_CORE}.recompute:te_checkpoint"
LAYER_SPEC = "megatron.training.models.gpt:default_layer_spec"
INITIALIZE = "megatron.training.initialize:initialize_megatron"
TRAIN_STEP = "megatron.training.training:train_step"
TRAINING_LOG = "megatron.training.training:training_log"
WARM_UP = "megatron.training.training:set_jit_fusion_options"

# shared parameter lists
LAYER = "self config submodules layer_number attn_mask_type attention_type cp_comm_type"
GPT_HEAD = (
    "self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "fp16_lm_cross_entropy"
)
GPT_TAIL = (
    "parallel_output share_embeddings_and_output_weights position_embedding_type rotary_percent "
    "rotary_base rope_scaling rope_scaling_factor scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor mtp_block_spec pg_collection vp_stage"
)
HYBRID_TAIL = (
    "parallel_output share_embeddings_and_output_weights position_embedding_type rotary_percent "
    "rotary_base scatter_embedding_sequence_parallel seq_len_interpolation_factor pg_collection"
)
STEP = (
    "forward_step_func data_iterator model optimizer opt_param_scheduler config "
    "forward_backward_func iteration"
)
LOGGED = (
    "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter "
    "grad_norm params_norm num_zeros_in_grad max_attention_logit pg_collection is_first_iteration"
)
_NO_CUDA_ARGUMENT = (
    "allow_no_cuda skip_mpu_initialization get_embedding_ranks get_position_embedding_ranks"
)

RELEASES = {  # first and last release that have a place, or need its patch
    DOCUMENTS: ((0, 19), NEWEST),
    FINE_TUNING: ((0, 18), (0, 18)),
    HYBRID: ((0, 18), NEWEST),
    MAMBA: ((0, 16), (0, 17)),
    FREE_OUTPUT: ((0, 16), (0, 17)),
    TE_RECOMPUTE: ((0, 18), NEWEST),
    LAYER_SPEC: ((0, 19), NEWEST),
}
OTHER_FORMS = {  # a place's parameters in releases where they differ from 0.19.2
    ATTENTION: {
        "0.16": f"{LAYER} pg_collection",
        "0.17": f"{LAYER} pg_collection pp_layer_offset",
    },
    LATENT: {"0.16, 0.17": f"{LAYER} pg_collection"},
    ROTARY: {
        "0.16 to 0.18": "t freqs config cu_seqlens mscale cp_group",
        "0.20": "t freqs config cu_seqlens mscale cp_group mla_rotary_interleaved inverse "
        "mla_output_remove_interleaving max_seqlen",
    },
    GPT: {"0.20": f"{GPT_HEAD} logit_dtype {GPT_TAIL}"},
    HYBRID: {
        "0.20": "self config hybrid_stack_spec vocab_size max_sequence_length "
        "hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern "
        f"pre_process post_process fp16_lm_cross_entropy logit_dtype {HYBRID_TAIL} vp_stage"
    },
    MAMBA: {
        "0.16": "self config mamba_stack_spec vocab_size max_sequence_length pre_process "
        "hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern post_process "
        f"fp16_lm_cross_entropy {HYBRID_TAIL}"
    },
    INITIALIZE: {
        "0.17": f"extra_args_provider args_defaults ignore_unknown_args {_NO_CUDA_ARGUMENT} "
        "parsed_args store",
        "0.18": f"{_NO_CUDA_ARGUMENT} store",
    },
    TRAIN_STEP: {"0.16 to 0.18": STEP},
    TRAINING_LOG: {"0.16, 0.17": LOGGED},
    WARM_UP: {"0.17, 0.18": ""},
}
