"""Keeping under Megatron's recomputation: its checkpoints and attention, and which layers keep."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_burst.comm.state import state_of
from megatron_burst.config import BurstConfig
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.refusals import check
from megatron_burst.plan.keep import KeepChoice, KeepProblem, choose_keep, in_flight
from megatron_burst.recompute.half import packer
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import WHO, Frame, Keeping, Parcel, Resident, framed, running
from megatron_burst.recompute.offload import host_limit_bytes, host_memory
from megatron_burst.say import say

_LEAST = 1 << 10  # elements of an input that is worth a copy

# The one cache here: what the ranks of a group have found free on their nodes, as long as it lives.
_FREE: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


# ---- what replaces functions of Megatron, called with the original: see patches.py -----------


def inputs_on_host(checkpoint, limit_gib: float | None, /, function, *args, **options):
    """A checkpoint that puts its function's inputs into host memory."""
    frame = Frame()

    def pack(x: Tensor) -> Parcel:
        if not (x.requires_grad and x.is_contiguous() and x.numel() >= _LEAST):
            return Resident((x,))
        return host_memory(x.device, limit_gib).pack((x.detach(),), input_of=frame)

    with saved_tensors_hooks(pack, lambda parcel: parcel.get()[0]):
        return checkpoint(frame.bind(function), *args, **options)


def te_in_frames(checkpoint, /, function, *args, **options):
    """TransformerEngine's checkpoint that runs its function in a frame."""
    return checkpoint(framed(function), *args, **options)


def own_kept(forward, /, self, query, key, value, *args, **options):
    """The forward of Megatron's own attention, or of TransformerEngine's."""
    burst = own_config(self.config, self.layer_number, query, value) if running() else None
    if burst is None or burst.keep == "none":
        return forward(self, query, key, value, *args, **options)
    keeping = Keeping(pack=packer(query.device, burst), debug=burst.tuning.keep_debug)
    return call_kept(partial(forward, self), (query, key, value, *args), options, keeping)


# ---- a layer's options ----------------------------------------------------------------------


def for_calls(burst: BurstConfig) -> BurstConfig:
    """Burst's options without those of the checkpoints around calls, once these are switched on."""
    offloads = burst.offloads_results
    room = burst.tuning.keep_host_gib if offloads or burst.keep == "auto" else None
    return replace(burst.tuned(keep_host_gib=room), keep_offload="results" if offloads else "none")


def own_config(config: TransformerConfig, layer_number: int, query, value) -> BurstConfig:
    """Burst's options for a layer of Megatron's own attention; refuses what it cannot keep."""
    burst = for_calls(burst_config_of(config))
    if burst.keep != "none":
        check("keep", config, WHO, skip=("recompute_modules",))  # it runs: it is among them
        burst = resolved(burst, config, layer_number, query, value, half_saves=0.0)
    check("own", SimpleNamespace(keep=burst.keep, layer_number=layer_number), WHO)
    return burst


def resolved(
    burst: BurstConfig, config: TransformerConfig, layer_number: int, query: Tensor, value: Tensor,
    half_saves: float,
) -> BurstConfig:  # fmt: skip
    """Burst's options for one layer: whether it keeps is resolved, "auto" and the layers are gone.

    Args:
        burst: for the model, of `for_calls`.
        config: of the layer.
        layer_number: Megatron's.
        query: [s_local, b, h, d_qk], of the layer's attention.
        value: [s_local, b, h_kv, d_v].
        half_saves: share of recomputation that the layer saves by keeping half; 0 if it cannot.
    """
    if burst.keep != "auto" and burst.keep_layers is None:
        return burst
    stage = stage_layers(config)
    if burst.keep == "auto":
        heads = sum(get_mtp_num_layers_to_build(config, chunk) for chunk in _chunks(config))
        problem = _problem(config, len(stage) + heads, query, value, half_saves)
        with_them = sum(number in stage for number in range(1, heads + 1))
        burst = _chosen(burst, problem, with_them)
    if burst.keep == "none" or burst.keep_layers is None:
        return burst
    if layer_number in stage[: burst.keep_layers]:
        return replace(burst, keep_layers=None)
    burst = burst.tuned(keep_debug=False, keep_host_gib=None)
    return replace(burst, keep="none", keep_layers=None, keep_offload="none")


def _problem(
    config: TransformerConfig, layers: int, query: Tensor, value: Tensor, half_saves: float
) -> KeepProblem:
    """What the choice for a stage of so many layers depends on."""
    rows = query.shape[:-1].numel()
    layer_bytes = rows * (value.shape[-1] * query.itemsize + max(4, query.itemsize))
    tokens = query.shape[0] * config.context_parallel_size
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = config.virtual_pipeline_model_parallel_size or 1
    flying = in_flight(config.pipeline_model_parallel_size, rank, chunks)
    return KeepProblem(layers, flying, layer_bytes, tokens, half_saves)


def _chosen(burst: BurstConfig, problem: KeepProblem, with_them: int) -> BurstConfig:
    """Options with the choice in the place of "auto".

    `with_them`: layers of multi-token prediction that keep as decoder layers of their number do.
    """
    choice = _choose(problem, burst, _host_bytes(burst))
    some = 0 < choice.layers < problem.layers
    off = {} if choice.keep != "none" else {"keep_debug": False}
    burst = burst.tuned(**off if choice.offload else off | {"keep_host_gib": None})
    layers = max(0, choice.layers - with_them) if some else None
    offload = "results" if choice.offload else "none"
    return replace(
        burst, keep=choice.keep, keep_budget_gib=None, keep_layers=layers, keep_offload=offload
    )


@lru_cache(maxsize=32)
def _choose(problem: KeepProblem, burst: BurstConfig, host_bytes: int) -> KeepChoice:
    """The choice for a stage; made, and told, once."""
    choice = choose_keep(problem, burst.keep_budget_gib * 2**30, host_bytes)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if dist.get_rank() == 0 or (stage and parallel_state.get_data_parallel_rank(True) == 0):
        say(f"{WHO}: pipeline stage {stage}: {choice}")
    return choice


def _host_bytes(burst: BurstConfig) -> int:
    """Most host memory of a rank: as asked, or what the one with least has free.

    Ranks that attend to one sequence must choose alike, or some would communicate in recomputation
    and others not. Those that share a layer's weights would wait for the slowest. So both agree,
    once: they come to their first layer together, which pipeline stages do not.
    """
    if burst.tuning.keep_host_gib is not None:
        return host_limit_bytes(burst.tuning.keep_host_gib)
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group not in _FREE:
        mine = f"{host_limit_bytes(None)} bytes of host memory"
        everyones = state_of(group, burst.tuning.timeout_s).board.share(mine, WHO)
        _FREE[group] = min(int(free.split()[0]) for free in everyones)
    return _FREE[group]


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


def _chunks(config: TransformerConfig) -> Sequence[int | None]:
    chunks = config.virtual_pipeline_model_parallel_size
    return range(chunks) if chunks else (None,)
