"""What must hold for `--burst-fused-loss`, and its patches; independent of burst attention."""

import functools
from argparse import Namespace

from megatron_burst.config import FusedLossConfig
from megatron_burst.errors import BurstError
from megatron_burst.loss.options import LossOptions
from megatron_burst.mcore.argument_values import OFF, other_value
from megatron_burst.mcore.flags import LOSS_FLAG
from megatron_burst.mcore.loss_window import window_patches
from megatron_burst.patching import Patch


def wants_fused_loss(args: Namespace) -> bool:
    """Whether the flag is given."""
    return getattr(args, "burst_fused_loss", False)


def check_loss_args(args: Namespace) -> None:
    """Refuse arguments under which the fused loss would be wrong or off.

    Raises:
        BurstError: on every rank alike, naming the flag to change.
    """
    config = FusedLossConfig.from_args(args)
    LossOptions(config.label_smoothing, config.z_loss, config.softcap)
    if config.grads == "forward" and getattr(args, "fp16", False):
        raise BurstError(
            f"{LOSS_FLAG}: gradients must be computed in backward with --fp16, because before it "
            "they are not scaled yet and small ones vanish in 16 bit; got --burst-loss-grads "
            "forward; leave that out"
        )
    for name, off, flag, reason in _UNSUPPORTED:
        value = other_value(args, name, off)
        if value is not None:
            raise BurstError(
                f"{LOSS_FLAG}: cannot run with {flag}, because {reason}; got {name}={value}; leave "
                "one of them out"
            )


def loss_patches(config: FusedLossConfig | None = None) -> tuple[Patch, ...]:
    """Models get the fused loss when they are built: Megatron has no hook there for plugins."""
    building = tuple(
        Patch(
            owner=owner,
            name="__init__",
            parameters=_PARAMETERS[owner],
            why="attaches the fused loss to models as they are built, whoever builds them",
            wrap=functools.partial(_attach, config),
        )
        for owner in _PARAMETERS
    )
    return (*building, *window_patches())


def _attach(config: FusedLossConfig | None, build):
    def build_with_loss(self, *args, **kwargs):
        build(self, *args, **kwargs)
        from megatron_burst.mcore.loss import fuse_loss

        fuse_loss(self, config)

    return build_with_loss


_OFF = (*OFF, [], ())

# argument, values that are supported, the flag, why others are refused
_UNSUPPORTED = (
    ("fp16_lm_cross_entropy", _OFF, "--fp16-lm-cross-entropy", "the loss is in float32"),
    ("defer_embedding_wgrad_compute", _OFF, "--defer-embedding-wgrad-compute",
     "the weight's gradient comes with the loss"),
    ("overlap_moe_expert_parallel_comm", _OFF, "--overlap-moe-expert-parallel-comm",
     "its schedule computes the loss past the model's forward"),
    ("cuda_graph_impl", _OFF, "--cuda-graph-impl", "tokens that count are counted on the CPU"),
    ("enable_cuda_graph", _OFF, "--enable-cuda-graph", "tokens that count are counted on the CPU"),
    ("logits_load_dir", _OFF, "--logits-load-dir", "distillation needs the logits"),
    ("modelopt_enabled", _OFF, "--modelopt-enabled", "it replaces the output layer"),
    ("use_megatron_fsdp", _OFF, "--use-megatron-fsdp", "weights are sharded when they are read"),
    ("use_torch_fsdp2", _OFF, "--use-torch-fsdp2", "weights are sharded when they are read"),
)  # fmt: skip

_PARAMETERS = {
    "megatron.core.models.gpt.gpt_model:GPTModel": (
        "self", "config", "transformer_layer_spec", "vocab_size", "max_sequence_length",
        "pre_process", "post_process", "fp16_lm_cross_entropy", "parallel_output",
        "share_embeddings_and_output_weights", "position_embedding_type", "rotary_percent",
        "rotary_base", "rope_scaling", "rope_scaling_factor", "scatter_embedding_sequence_parallel",
        "seq_len_interpolation_factor", "mtp_block_spec", "pg_collection", "vp_stage",
    ),
    "megatron.core.models.hybrid.hybrid_model:HybridModel": (
        "self", "config", "hybrid_stack_spec", "vocab_size", "max_sequence_length",
        "hybrid_layer_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio",
        "hybrid_override_pattern", "pre_process", "post_process", "fp16_lm_cross_entropy",
        "parallel_output", "share_embeddings_and_output_weights", "position_embedding_type",
        "rotary_percent", "rotary_base", "scatter_embedding_sequence_parallel",
        "seq_len_interpolation_factor", "pg_collection", "vp_stage",
    ),
}  # fmt: skip
