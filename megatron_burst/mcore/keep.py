"""Keeping under Megatron's recomputation: checkpoints as frames, layers, its own attention."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_burst.config import BurstConfig, available_host_bytes
from megatron_burst.errors import BurstError
from megatron_burst.patching import Patch
from megatron_burst.plan.keep import KeepChoice, KeepProblem, choose_keep, in_flight
from megatron_burst.recompute.frames import Frame, framed, running
from megatron_burst.recompute.half import packer
from megatron_burst.recompute.host import host_memory
from megatron_burst.recompute.keep import call_kept, in_frames, torch_patches
from megatron_burst.recompute.keeping import WHO, WHOLE, Keeping

_LEAST = 1 << 10  # elements of an input that is worth a copy
_OWN_CHECKPOINT = ("function", "distribute_saved_activations", "args")
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
    own = [DotProductAttention, *([TEDotProductAttention] if HAVE_TE else [])]
    return (*patches, *map(_keep_own, own))


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

        def pack(x: Tensor):
            if not (x.requires_grad and x.is_contiguous() and x.numel() >= _LEAST):
                return x
            return host_memory(x.device, limit_gib).pack((x.detach(),), input_of=frame)

        def unpack(packed) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed.get()[0]

        with saved_tensors_hooks(pack, unpack):
            return checkpoint(frame.bind(function), *args, **options)

    return checkpoint_on_host


def _te_in_frames(checkpoint):
    def checkpoint_in_frame(function, *args, **options):
        return checkpoint(framed(function), *args, **options)

    return checkpoint_in_frame


def _keep_own(attention: type) -> Patch:
    return Patch(
        owner=f"{attention.__module__}:{attention.__name__}",
        name="forward",
        parameters=tuple(inspect.signature(attention.forward).parameters),
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
        keeping = Keeping(WHOLE, packer(query.device, burst), burst.keep_debug)
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
        burst = settled(burst, config, layer_number, query, value, can_half=False)
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


def settled(
    burst: BurstConfig,
    config: TransformerConfig,
    layer_number: int,
    query: Tensor,
    value: Tensor,
    can_half: bool = True,
) -> BurstConfig:
    """Burst's options for one layer: whether it keeps is settled, "auto" and the layers are gone.

    Args:
        burst: for the model, of `for_calls`.
        config: of the layer.
        layer_number: Megatron's.
        query: [s_local, b, h, d_qk], of the layer's attention.
        value: [s_local, b, h_kv, d_v].
        can_half: whether the layer can keep half.
    """
    if burst.keep in ("none", "all", "half") and burst.keep_layers is None:
        return burst
    stage = stage_layers(config)
    if burst.keep == "auto":
        rows = query.shape[:-1].numel()
        layer_bytes = rows * (value.shape[-1] * query.itemsize + max(4, query.itemsize))
        tokens = query.shape[0] * config.context_parallel_size
        pipeline = (
            config.pipeline_model_parallel_size,
            parallel_state.get_pipeline_model_parallel_rank(),
            config.virtual_pipeline_model_parallel_size or 1,
        )
        heads = _mtp_layers(config)
        problem = KeepProblem(
            len(stage) + heads, in_flight(*pipeline), layer_bytes, tokens, can_half
        )
        choice = _choose(problem, burst)
        with_them = sum(number in stage for number in range(1, heads + 1))
        burst = replace(
            burst,
            keep=choice.keep,
            keep_budget_gib=None,
            keep_layers=max(0, choice.layers - with_them)
            if 0 < choice.layers < problem.layers
            else None,
            keep_offload=choice.offload,
            keep_host_gib=burst.keep_host_gib if choice.offload else None,
            keep_debug=burst.keep_debug and choice.keep != "none",
        )
    if burst.keep == "none" or burst.keep_layers is None:
        return burst
    if layer_number in stage[: burst.keep_layers]:
        return replace(burst, keep_layers=None)
    off = {"keep_offload": False, "keep_host_gib": None, "keep_debug": False}
    return replace(burst, keep="none", keep_layers=None, **off)


@lru_cache(maxsize=32)
def _choose(problem: KeepProblem, burst: BurstConfig) -> KeepChoice:
    """The choice for a stage; made, and said, once."""
    given = burst.keep_host_gib
    host_bytes = available_host_bytes() / 2 if given is None else given * 2**30
    choice = choose_keep(problem, burst.keep_budget_gib * 2**30, host_bytes)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if dist.get_rank() == 0 or (stage and parallel_state.get_data_parallel_rank(True) == 0):
        print(f"{WHO}: pipeline stage {stage}: {choice}", flush=True)
    return choice


def stage_layers(config: TransformerConfig) -> list[int]:
    """Numbers of this process's decoder layers that may be recomputed, over all its chunks.

    A layer of multi-token prediction counts as the one with its number, if there is one. Of each
    chunk "block" recomputes the first layers only; where these are quantised, others may be.
    """
    if config.recompute_method == "block" and not (config.fp8 or config.fp4):
        most = config.recompute_num_layers
    else:
        most = config.num_layers
    numbers = []
    for chunk in _chunks(config):
        first = get_transformer_layer_offset(config, chunk) + 1
        numbers += range(first, first + min(get_num_layers_to_build(config, chunk), most))
    return numbers


def _mtp_layers(config: TransformerConfig) -> int:
    """How many layers of multi-token prediction this process has."""
    return sum(get_mtp_num_layers_to_build(config, chunk) for chunk in _chunks(config))


def _chunks(config: TransformerConfig) -> Sequence[int | None]:
    chunks = config.virtual_pipeline_model_parallel_size
    return range(chunks) if chunks else (None,)
