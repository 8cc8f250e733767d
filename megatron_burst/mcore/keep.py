"""Keeping under Megatron's recomputation: checkpoints as frames, layers, its own attention."""

from dataclasses import replace
from functools import partial

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore.keep_layers import settled
from megatron_burst.patching import Patch
from megatron_burst.recompute.frames import Frame, framed, running
from megatron_burst.recompute.half import packer
from megatron_burst.recompute.host import host_memory
from megatron_burst.recompute.keep import call_kept, in_frames, torch_patches
from megatron_burst.recompute.keeping import WHO, WHOLE, Keeping, Parcel, Resident

_LEAST = 1 << 10  # elements of an input that is worth a copy
_OWN_CHECKPOINT = ("function", "distribute_saved_activations", "args")
_OWN_FORWARD = (
    "self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias",
    "packed_seq_params",
)  # fmt: skip
_TE_FORWARD = (*_OWN_FORWARD, "num_splits")
_TE_CHECKPOINT = (
    "forward_func", "distribute_saved_activations", "get_rng_state_tracker", "tp_group", "args",
    "kwargs",
)  # fmt: skip


def keep_patches() -> tuple[Patch, ...]:
    """What keeping needs: checkpoints that run in frames, and Megatron's own attention kept."""
    patches = [
        Patch(
            owner="megatron.core.tensor_parallel.random:CheckpointFunction",
            name="forward",
            parameters=("ctx", "run_function", "distribute_saved_activations", "args"),
            why="pairs a layer's first pass with its replay; there is no hook around them",
            wrap=in_frames,
        ),
        *torch_patches(),
    ]
    if HAVE_TE:
        patches.append(
            Patch(
                owner="transformer_engine.pytorch.distributed",
                name="checkpoint",
                parameters=("function", "args", "kwargs"),
                why="the same for TransformerEngine's checkpoint, which fp8 and fp4 layers use",
                wrap=_te_in_frames,
                package="transformer_engine",
            )
        )
    patches.append(_keep_own(DotProductAttention, _OWN_FORWARD))
    if HAVE_TE:
        patches.append(_keep_own(TEDotProductAttention, _TE_FORWARD))
    return tuple(patches)


def switch_on(burst: BurstConfig) -> None:
    """Put the patches in force, as far as the options need them."""
    if burst.keep != "none":
        for patch in keep_patches():
            patch.apply()
    if burst.keep_offload_inputs:
        for patch in input_patches(burst):
            patch.apply()


def input_patches(burst: BurstConfig) -> tuple[Patch, ...]:
    """What puts the inputs of recomputed layers into host memory; the first options count."""
    places = {"megatron.core.tensor_parallel": ("checkpoint", _OWN_CHECKPOINT)}
    if HAVE_TE:  # fp8 and fp4 layers and heads of multi-token prediction
        for owner in ("megatron.core.recompute", "megatron.core.extensions.transformer_engine"):
            places[owner] = "te_checkpoint", _TE_CHECKPOINT
    return tuple(
        Patch(
            owner=owner,
            name=name,
            parameters=parameters,
            why="layers call it by this name; hooks for what it saves must be set around the call",
            wrap=partial(_inputs_on_host, burst.keep_host_gib),
        )
        for owner, (name, parameters) in places.items()
    )


def _inputs_on_host(limit_gib: float | None, checkpoint):
    def checkpoint_on_host(function, *args, **options):
        frame = Frame()

        def pack(x: Tensor) -> Parcel:
            if not (x.requires_grad and x.is_contiguous() and x.numel() >= _LEAST):
                return Resident((x,))
            return host_memory(x.device, limit_gib).pack((x.detach(),), input_of=frame)

        with saved_tensors_hooks(pack, lambda parcel: parcel.get()[0]):
            return checkpoint(frame.bind(function), *args, **options)

    return checkpoint_on_host


def _te_in_frames(checkpoint):
    def checkpoint_in_frame(function, *args, **options):
        return checkpoint(framed(function), *args, **options)

    return checkpoint_in_frame


def _keep_own(attention: type, parameters: tuple[str, ...]) -> Patch:
    return Patch(
        owner=f"{attention.__module__}:{attention.__name__}",
        name="forward",
        parameters=parameters,
        why="keeps what Megatron's own attention saves for its backward, with --burst-keep",
        wrap=_own_kept,
    )


def _own_kept(forward):
    def forward_kept(self, query, key, value, *args, **options):
        if not running():
            return forward(self, query, key, value, *args, **options)
        burst = own_config(self.config, self.layer_number, query, value)
        if burst.keep == "none":
            return forward(self, query, key, value, *args, **options)
        keeping = Keeping(WHOLE, packer(query.device, burst), burst.tuning.keep_debug)
        return call_kept(partial(forward, self), (query, key, value, *args), options, keeping)

    return forward_kept


def for_calls(burst: BurstConfig) -> BurstConfig:
    """Burst's options without those of the checkpoints around calls, once these are switched on."""
    room = burst.keep_host_gib if burst.keep_offload or burst.keep == "auto" else None
    return replace(burst, keep_offload_inputs=False, keep_host_gib=room)


def own_config(config: TransformerConfig, layer_number: int, query, value) -> BurstConfig:
    """Burst's options for a layer that runs Megatron's own attention.

    Raises:
        BurstError: if its results cannot be kept as asked.
    """
    from megatron_burst.mcore.core_attention import burst_config_of

    burst = for_calls(burst_config_of(config))
    if burst.keep != "none":
        check_keep(config)
        burst = settled(burst, config, layer_number, query, value, half_saves=0.0)
    if burst.keep == "half":
        raise BurstError(
            f"{WHO}: half must be kept of burst attention only, because no other deals out rows "
            f"anew; got Megatron's own attention in layer {layer_number}; pass --burst-keep all, "
            "or --context-parallel-impl burst"
        )
    return burst


def check_keep(config: TransformerConfig) -> None:
    """Refuse a configuration under which a replay without attention would differ.

    Raises:
        BurstError: naming the option and what to change.
    """
    if config.attention_dropout:
        raise BurstError(
            f"{WHO}: attention must not drop weights, because a replay that does not run it would "
            f"not draw its random numbers; got attention_dropout={config.attention_dropout}; pass "
            "--attention-dropout 0"
        )
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        raise BurstError(
            f"{WHO}: attention must not be fp8, because its scales are not kept; got fp8 "
            "attention; switch it off"
        )
