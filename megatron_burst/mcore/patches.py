"""Every function of Megatron and torch that burst replaces: one table, which loads neither.

A row says what is replaced, by what, its signature in 0.19.2, and why. `releases.py` has what
differs in other releases. Line numbers in `why` are of the 0.19.2 wheel, below megatron/.
`megatron_burst.undo_all()` restores all of it.
"""

import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.installed import find_megatron, minor
from megatron_burst.mcore import releases
from megatron_burst.patching import EVERY_RELEASE, Patch, when_imported
from megatron_burst.say import say

_CORE = "megatron.core"
_ARGUMENTS = "megatron.training.arguments"
_ATTENTION = f"{_CORE}.transformer.attention"
_DOT_PRODUCT = f"{_CORE}.transformer.dot_product_attention:DotProductAttention"
_TE = f"{_CORE}.extensions.transformer_engine"
_DISPATCHER = f"{_CORE}.transformer.moe.token_dispatcher"
_LAUNCH = "megatron_burst.mcore.launch"
_SPECS = "megatron_burst.mcore.specs"
_RECOMPUTE = "megatron_burst.mcore.recompute"
_PACKED = "megatron_burst.mcore.packed"
_KEEP = "megatron_burst.recompute.keep"
_LOSS = "megatron_burst.mcore.fused_loss"
_LOG = "megatron_burst.mcore.transfer_log"
_CPU = "megatron_burst.tools.cpu_mode"

# shared parameter lists
_FORWARD = "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"
_LAYER = f"{releases.LAYER} pg_collection pp_layer_offset name"
_HYBRID = (
    "vocab_size max_sequence_length hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio "
    "hybrid_override_pattern pre_process post_process fp16_lm_cross_entropy "
    f"{releases.HYBRID_TAIL} vp_stage"
)
_TE_CHECKPOINT = (
    "forward_func distribute_saved_activations get_rng_state_tracker tp_group args kwargs"
)
# shared reasons
_CORES = (
    "specs name Megatron's own core attention, and --spec does not reach the layers of "
    "multi-token prediction"
)
_OWN = "keeps what Megatron's own attention saves for its backward, with --burst-keep"
_INPUTS = "layers call it by this name; hooks for what it saves must be set around the call"
_BUILT = "attaches the fused loss to models when they are built, by any code"
_RNG = (
    "the RNG tracker forks CUDA's generator (core/tensor_parallel/random.py:318), and full "
    "recomputation restores it (:528); here both work on the CPU's"
)
_STREAMS = (
    "DDP is built on a side stream (training/models/dist_utils.py:303), timers wait for the GPU "
    "(core/timers.py:152)"
)
_NO_CUDA = (
    "training/initialize.py:66 asserts CUDA unless told otherwise, :270 and :447 build no groups "
    "and no RNG states without a device"
)


def rows(*groups: str) -> tuple[Patch, ...]:
    """The patches of these groups, or of all but CPU mode's, whose place this Megatron has."""
    wanted = [p for p in TABLE if p.group in groups or (not groups and p.group[:3] != "cpu")]
    there = [patch for patch in wanted if _is_there(patch)]
    return tuple(patch for patch in there if patch.te is None or patch.te == _has_te())


def _is_there(patch: Patch) -> bool:
    """Whether this release has the place; a wheel without megatron.training has none there."""
    megatron = find_megatron()
    if megatron is None:
        return True  # `apply` reports it
    first, last = patch.releases
    trains = megatron.training is not None or not patch.module.startswith("megatron.training")
    return first <= minor(megatron.version) <= last and trains


def apply(*groups: str, given: tuple[Any, ...] = ()) -> None:
    """Apply the patches of groups. Idempotent.

    Args:
        groups: names in the table.
        given: passed to the replacements, after the originals.

    Raises:
        BurstError: if Megatron or torch differs from what the table was written for.
    """
    for patch in rows(*groups):
        patch.apply(*given)


def apply_when_imported(*groups: str, given: tuple[Any, ...] = ()) -> None:
    """Apply the patches of groups, each as soon as its module is imported.

    One that does not fit is skipped with a log line: whoever imports the module may not want burst
    at all.
    """
    for patch in rows(*groups):
        when_imported(patch.module, functools.partial(_try, patch, given))


def _try(patch: Patch, given: tuple[Any, ...]) -> None:
    try:
        patch.apply(*given)
    except BurstError as error:
        say(str(error), logging.WARNING)


def switch_on_keep(burst: BurstConfig) -> None:
    """Apply what keeping needs; the first limit for offloaded inputs wins."""
    if burst.keep != "none":
        apply("checkpoints", "keep")
    if burst.offloads_inputs:
        apply("inputs", given=(burst.tuning.keep_host_gib,))


def _has_te() -> bool:
    """Whether Megatron has found TransformerEngine."""
    return bool(importlib.import_module(_TE).HAVE_TE)


def _of(group: str, *rows: tuple[str, str, str, str], te: bool | None = None) -> Iterator[Patch]:
    """Patches of a group: (place, becomes, parameters, why)."""
    for place, becomes, parameters, why in rows:
        yield Patch(
            group, place, becomes, tuple(parameters.split()), why,
            package=place.partition(".")[0].replace("megatron", "megatron-core"),
            te=te,
            others=tuple(map(tuple, map(str.split, releases.OTHER_FORMS.get(place, {}).values()))),
            releases=releases.RELEASES.get(place, EVERY_RELEASE),
        )  # fmt: skip


TABLE: tuple[Patch, ...] = (
    # applied by every entry point
    *_of(
        "flags",
        (f"{_ARGUMENTS}:add_megatron_arguments", f"{_LAUNCH}:with_flags", "parser",
         "adds burst's flags: Megatron's parser has no hook for plugins"),
        (f"{_ARGUMENTS}:validate_args", f"{_LAUNCH}:validate_flags", "args defaults",
         "checks burst's flags, and switches burst on if they ask for it"),
    ),
    # applied for scripts without burst too
    *_of(
        "helpers",
        (f"{_CORE}.datasets.utils:compile_helpers", f"{_LAUNCH}:compile_unless_built", "",
         "the wheel has the data set helpers built, but not the Makefile that would build them, "
         "and Megatron exits without it (training/initialize.py:175)"),
    ),
    # applied by --context-parallel-impl burst and by megatron_burst.auto
    *_of(
        "attention",
        (releases.ATTENTION, f"{_SPECS}:build_burst", _LAYER, _CORES),
        (releases.LATENT, f"{_SPECS}:build_burst", _LAYER,
         "builds its core attention itself, after Attention has built one"),
    ),
    # for options that a script sets, in heterogeneous models
    *_of(
        "layers",
        (f"{_CORE}.transformer.heterogeneous.heterogeneous_config:"
         "HeterogeneousTransformerConfig.get_config_for_layer", f"{_SPECS}:with_options",
         "self layer_number",
         "copies only Megatron's own fields into a layer's configuration, so `burst` is lost"),
    ),
    # also applied by the flag
    *_of(
        "asked",
        (releases.ATTENTION, f"{_SPECS}:refuse_unset", _LAYER,
         "a script may bypass the validate_args that sets cp_comm_type, and the flag would have "
         "no effect"),
    ),
    # for packed samples
    *_of(
        "packed",
        (releases.DOCUMENTS,
         f"{_PACKED}:shard_without_te", "batch cp_group",
         "TransformerEngine's extension tells which rows a rank has (core/utils.py:2441), and "
         "without TransformerEngine there is none"),
        (releases.FINE_TUNING, f"{_PACKED}:shard_without_te", "batch cp_group", "the same in 0.18"),
        te=False,
    ),
    # for --dataloader-inter-document-masking
    *_of(
        "anywhere",
        (releases.ROTARY,
         f"{_PACKED}:rotate_anywhere",
         "t freqs config cu_seqlens mscale cp_group mla_rotary_interleaved",
         "assumes that each document is sharded on its own (rope_utils.py:184), but these "
         "samples are sharded as a whole"),
    ),
    # not replaced, but relied on
    *_of(
        "hook points",
        (f"{_ATTENTION}:CoreAttentionBuilder.__call__", "",
         "self config layer_number attn_mask_type attention_type cp_comm_type softmax_scale "
         "pg_collection",
         "Megatron builds burst's core attention with these"),
    ),
    *_of(
        "spec",
        (releases.LAYER_SPEC, "", "config vp_stage",
         "--spec megatron_burst.spec layer_spec"),
    ),
    # applied by megatron_burst.keep, with --burst-keep or without Megatron
    *_of(
        "checkpoints",
        ("torch.utils.checkpoint:CheckpointFunction.forward", f"{_KEEP}:in_frames",
         "ctx run_function preserve_rng_state args",
         "reentrant checkpoints have no hook around the first pass and recomputation"),
        ("torch.utils.checkpoint:_checkpoint_without_reentrant_generator", f"{_KEEP}:with_contexts",
         "fn preserve_rng_state context_fn determinism_check debug early_stop args kwargs",
         "other checkpoints have context_fn, which each caller would have to pass"),
    ),
    # also applied by --burst-keep
    *_of(
        "keep",
        (f"{_CORE}.tensor_parallel.random:CheckpointFunction.forward", f"{_KEEP}:in_frames",
         "ctx run_function distribute_saved_activations args",
         "pairs a layer's first pass with recomputation; there is no hook around them"),
        (f"{_DOT_PRODUCT}.forward", f"{_RECOMPUTE}:own_kept", _FORWARD, _OWN),
    ),
    *_of(
        "keep",
        ("transformer_engine.pytorch.distributed:checkpoint", f"{_RECOMPUTE}:te_in_frames",
         "function args kwargs", "the same for the checkpoint that fp8 and fp4 layers use"),
        (f"{_TE}:TEDotProductAttention.forward", f"{_RECOMPUTE}:own_kept",
         f"{_FORWARD} num_splits", _OWN),
        te=True,
    ),
    # applied by --burst-keep-offload inputs; given: limit in GiB
    *_of(
        "inputs",
        (f"{_CORE}.tensor_parallel:checkpoint", f"{_RECOMPUTE}:inputs_on_host",
         "function distribute_saved_activations args", _INPUTS),
    ),
    *_of(
        "inputs",
        (releases.TE_RECOMPUTE, f"{_RECOMPUTE}:inputs_on_host", _TE_CHECKPOINT,
         _INPUTS),
        (f"{_TE}:te_checkpoint", f"{_RECOMPUTE}:inputs_on_host", _TE_CHECKPOINT, _INPUTS),
        te=True,
    ),
    # applied by --burst-fused-loss; given: its configuration
    *_of(
        "loss",
        (releases.GPT, f"{_LOSS}:build_with_loss",
         f"{releases.GPT_HEAD} {releases.GPT_TAIL}", _BUILT),
        (releases.HYBRID, f"{_LOSS}:build_with_loss",
         f"self config hybrid_stack_spec {_HYBRID}", _BUILT),
        (releases.MAMBA, f"{_LOSS}:build_with_loss",
         f"self config mamba_stack_spec {_HYBRID}", _BUILT),
    ),
    # applied by --burst-log
    *_of(
        "log",
        (releases.TRAIN_STEP, f"{_LOG}:count_in_step",
         f"{releases.STEP} pg_collection p2p_communicator",
         "evaluations run between steps, and nothing is called where a step begins"),
        (releases.TRAINING_LOG, f"{_LOG}:log_transfers",
         f"{releases.LOGGED} seqlen_squared_sum_in_batch total_real_tokens_in_batch",
         "names the timers that it logs (training/training.py:2624)"),
    ),
    # for CPU mode, to build and run a model; see cpu_mode.py
    *_of(
        "cpu",
        ("torch.autograd.graph:_engine_run_backward", f"{_CPU}:run_backward_in_mode",
         "t_outputs args kwargs",
         "a mode is off while it answers a call, and Tensor.backward, which recomputes, is one"),
        ("torch.cuda:current_device", "=torch.cpu:current_device", "",
         "layers allocate there: core/tensor_parallel/layers.py:1000, "
         "core/models/common/embeddings/rotary_pos_embedding.py:162"),
        ("torch.cuda:get_rng_state", f"={_CPU}:get_rng_state", "device", _RNG),
        ("torch.cuda.random:get_rng_state", f"={_CPU}:get_rng_state", "device", _RNG),
        ("torch.cuda:set_rng_state", f"={_CPU}:set_rng_state", "new_state device", _RNG),
        (f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state", f"={_CPU}:set_rng_state",
         "new_state device graph_safe", _RNG),
        ("torch.cuda:manual_seed", "=torch:manual_seed", "seed", _RNG),
        (f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__", f"{_CPU}:build_marked",
         "cls config hidden_size eps persist_layer_norm zero_centered_gamma normalization",
         "core/transformer/torch_norm.py:50 refuses sequence parallelism, which only asks for a "
         "mark on the parameters (core/distributed/finalize_model_grads.py:452 reduces their "
         "gradients)"),
    ),
    # and for DDP, the optimizers, the schedules and pretrain()
    *_of(
        "cpu training",
        ("torch.cuda:Stream", "=torch.cpu:Stream", "device priority kwargs", _STREAMS),
        ("torch.cuda:Event", "=torch.cpu:Event", "enable_timing blocking interprocess external",
         _STREAMS),
        ("torch.cuda:stream", "=torch.cpu:stream", "stream", _STREAMS),
        ("torch.cuda:current_stream", "=torch.cpu:current_stream", "device", _STREAMS),
        ("torch.cuda:synchronize", "=torch.cpu:synchronize", "device", _STREAMS),
        ("torch.cpu:Stream.record_event", f"={_CPU}:record_event", "self",
         "core/transformer/moe/token_dispatcher.py:946 waits for the event, which torch's stream "
         "of a CPU does not return"),
        (f"{_DISPATCHER}:maybe_move_tensor_to_cpu", f"={_CPU}:as_numbers",
         "tensor as_numpy record_stream",
         "core/transformer/moe/token_dispatcher.py:930 makes NumPy arrays of the splits of an "
         "all-to-all that lie on a GPU, and torch takes no tensors"),
        (releases.FREE_OUTPUT, f"{_CPU}:shrink_output", "out deallocate_pipeline_outputs",
         "interleaved schedules free what they send before it is sent (0.16.1: "
         "core/pipeline_parallel/schedules.py:1522, :1600); from 0.18 on they wait"),
        ("torch.distributed:DeviceMesh.from_group", f"{_CPU}:mesh_on_the_cpu",
         "group device_type mesh mesh_dim_names",
         "both FSDPs hard-code the device of their mesh: core/distributed/"
         "torch_fully_sharded_data_parallel.py:81, fsdp/mcore_fsdp_adapter.py:418"),
        ("torch.cuda:device_count", "=torch.cpu:device_count", "", _NO_CUDA),
        ("torch.cuda:set_device", "=torch.cpu:set_device", "device", _NO_CUDA),
        (releases.INITIALIZE, f"{_CPU}:initialize_without_cuda",
         "allow_no_cuda skip_mpu_initialization get_embedding_ranks get_position_embedding_ranks "
         "store skip_model_parallel_init seed_pp_group seed_dp_group seed_tp_group seed_ep_group "
         "seed_etp_group skip_random_seed",
         _NO_CUDA),
        (f"{_ARGUMENTS}:get_device_arch_version", f"={_CPU}:newest_architecture", "",
         "training/arguments.py:1414 asks the GPU's architecture, to demand one hardware queue "
         "before Blackwell (10)"),
        (f"{_ARGUMENTS}:validate_args", f"{_CPU}:validate_adjusted", "args defaults",
         "defaults are TransformerEngine, NCCL and CUDA extensions"),
        (releases.WARM_UP, f"={_CPU}:warm_nothing_up", "tp_size",
         "training/initialize.py:497 feeds random tensors to fused functions to compile them: "
         "nothing is compiled here, and the draws, whose number depends on the context parallel "
         "size, would move the generator that the weights are drawn from next"),
    ),
)  # fmt: skip
