"""Keeping with Megatron's recomputation: its checkpoints and attention, and which layers keep."""

from argparse import Namespace
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

from megatron_burst.comm.group import state_of
from megatron_burst.config import BurstConfig
from megatron_burst.mcore.args import global_args
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.plan_file import rates_of
from megatron_burst.mcore.refusals import refuse
from megatron_burst.recompute.budget import (
    KeepChoice,
    KeepProblem,
    ModuleCost,
    choose_keep,
    choose_modules,
    in_flight,
)
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import WHO, Frame, Keeping, Parcel, Resident, framed, running
from megatron_burst.recompute.later import packer
from megatron_burst.recompute.offload import host_limit_bytes, host_memory
from megatron_burst.say import say

_LEAST = 1 << 10  # elements of an input worth offloading

# The only cache here: free host memory that the ranks of a group found, for the group's life.
_FREE: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


# ---- what replaces functions of Megatron, called with the original: see patches.py -----------


def inputs_on_host(checkpoint, limit_gib: float | None, /, function, *args, **options):
    """A checkpoint that offloads its function's inputs."""
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
    keeping = Keeping(pack=packer(query.device, burst), debug=burst.keep_debug)
    return call_kept(partial(forward, self), (query, key, value, *args), options, keeping)


# ---- a layer's options ----------------------------------------------------------------------


def for_calls(burst: BurstConfig) -> BurstConfig:
    """Burst's options without those of the checkpoints around calls, which are already applied,
    and of modules beside attention."""
    offloads = burst.offloads_results
    room = burst.keep_host_gib if offloads or burst.keep == "auto" else None
    offload = "results" if offloads else "none"
    return replace(burst, keep_host_gib=room, keep_offload=offload, keep_modules=())


def own_config(config: TransformerConfig, layer_number: int, query, value) -> BurstConfig:
    """Burst's options for a layer with Megatron's own attention; refuses what cannot be kept."""
    burst = for_calls(burst_config_of(config))
    if burst.keep != "none":
        refuse("keep", config, WHO, skip=("recompute_modules",))  # it runs only if recomputed
        burst = resolved(burst, config, layer_number, query, value, half_saves=0.0)
    refuse("own", SimpleNamespace(keep=burst.keep, layer_number=layer_number), WHO)
    return burst


def resolved(
    burst: BurstConfig, config: TransformerConfig, layer_number: int, query: Tensor, value: Tensor,
    half_saves: float,
) -> BurstConfig:  # fmt: skip
    """Burst's options for one layer: with `keep` resolved, no more "auto" or number of layers.

    Args:
        burst: the model's, from `for_calls`.
        query, value: [s_local, b, h, d_qk] and [s_local, b, h_kv, d_v], of the layer's attention.
        half_saves: share of recomputation saved by keeping half; 0 if unsupported.
    """
    if burst.keep != "auto" and burst.keep_layers is None:
        return burst
    if burst.keep == "auto":
        layer_bytes = query.shape[:-1].numel() * _row_bytes(value.shape[-1], query.itemsize)
        problem = _problem(config, layer_bytes, query.shape[0], half_saves)
        burst = _chosen(burst, problem, _sharing(config))
    if burst.keep == "none" or burst.keep_layers is None:
        return burst
    if is_among(burst.keep_layers, config, layer_number):
        return replace(burst, keep_layers=None)
    return replace(
        burst, keep="none", keep_modules=(), keep_layers=None, keep_offload="none",
        keep_debug=False, keep_host_gib=None,
    )  # fmt: skip


def is_among(layers: int | None, config: TransformerConfig, layer_number: int) -> bool:
    """Whether a layer is among so many first ones of its pipeline stage; None: all of them."""
    return layers is None or layer_number in stage_layers(config)[:layers]


def _problem(
    config: TransformerConfig, layer_bytes: int, rows: int, half_saves: float
) -> KeepProblem:
    """The inputs of the choice for a pipeline stage.

    Args:
        config: the model's.
        layer_bytes: out and lse of one layer and micro-batch.
        rows: of one sequence on this rank.
        half_saves: as of `resolved`.
    """
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = config.virtual_pipeline_model_parallel_size or 1
    flying = in_flight(config.pipeline_model_parallel_size, rank, chunks)
    layers = len(stage_layers(config)) + _mtp_layers(config)
    tokens = rows * config.context_parallel_size
    return KeepProblem(layers, flying, layer_bytes, tokens, half_saves)


def _row_bytes(dim: int, itemsize: int) -> int:
    """Of attention's output and lse, in one row and head."""
    return dim * itemsize + max(4, itemsize)


def _mtp_layers(config: TransformerConfig) -> int:
    return sum(get_mtp_num_layers_to_build(config, chunk) for chunk in _chunks(config))


def _sharing(config: TransformerConfig) -> int:
    """Number of multi-token prediction layers that keep like decoder layers of their number."""
    stage = stage_layers(config)
    return sum(number in stage for number in range(1, _mtp_layers(config) + 1))


def modules_within(
    burst: BurstConfig, config: TransformerConfig, shape: tuple[int, int], itemsize: int,
    costs: tuple[ModuleCost, ...],
) -> dict[str, int]:  # fmt: skip
    """In how many of the stage's first layers "auto" keeps the output of each module.

    Args:
        burst: the model's.
        config: the model's.
        shape: rows and sequences of a micro-batch on this rank.
        itemsize: of activations, in bytes.
        costs: of each module that may be kept.
    """
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    dim = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    layer_bytes = shape[0] * shape[1] * heads * _row_bytes(dim, itemsize)
    problem = _problem(config, layer_bytes, shape[0], 0.0)
    return _modules(problem, burst.keep_budget_gib, costs, _sharing(config))


@lru_cache(maxsize=32)
def _modules(
    problem: KeepProblem, budget_gib: float, costs: tuple[ModuleCost, ...], with_them: int
) -> dict[str, int]:
    """The choice for a stage; made and logged once."""
    chosen = choose_modules(problem, costs, budget_gib * 2**30)
    if chosen:
        words = ", ".join(f"{name} of {layers} layers" for name, layers in chosen.items())
        _say_of_stage(f"with the rest of the budget: outputs of {words}")
    return {
        name: layers if layers == problem.layers else max(0, layers - with_them)
        for name, layers in chosen.items()
    }


def _chosen(burst: BurstConfig, problem: KeepProblem, with_them: int) -> BurstConfig:
    """Options with "auto" replaced by the choice.

    `with_them`: number of multi-token prediction layers that keep like the decoder layers of the
    same number.
    """
    choice = _choose(problem, burst, _host_bytes(burst))
    some = 0 < choice.layers < problem.layers
    layers = max(0, choice.layers - with_them) if some else None
    return replace(
        burst, keep=choice.keep, keep_budget_gib=None, keep_layers=layers,
        keep_offload="results" if choice.offload else "none",
        keep_host_gib=burst.keep_host_gib if choice.offload else None,
        keep_debug=burst.keep_debug and choice.keep != "none",
    )  # fmt: skip


@lru_cache(maxsize=32)
def _choose(problem: KeepProblem, burst: BurstConfig, host_bytes: int) -> KeepChoice:
    """The choice for a stage; made and logged once."""
    rates = rates_of(global_args() or Namespace())
    choice = choose_keep(problem, burst.keep_budget_gib * 2**30, host_bytes, rates)
    _say_of_stage(str(choice))
    return choice


def _say_of_stage(choice: str) -> None:
    """Log a choice on the first rank of a pipeline stage."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if dist.get_rank() == 0 or (stage and parallel_state.get_data_parallel_rank(True) == 0):
        say(f"{WHO}: pipeline stage {stage}: {choice}")


def _host_bytes(burst: BurstConfig) -> int:
    """Limit of host memory per rank: the given one, or the least that any rank has free.

    Ranks that share a sequence must make the same choice, or only some would communicate in
    recomputation. Ranks that share a layer's weights would wait for the slowest. So both agree,
    once: they reach their first layer together, unlike pipeline stages.
    """
    if burst.keep_host_gib is not None:
        return host_limit_bytes(burst.keep_host_gib)
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group not in _FREE:
        mine = f"{host_limit_bytes(None)} bytes of host memory"
        everyones = state_of(group, burst.timeout_s).board.share(mine, WHO)
        _FREE[group] = min(int(free.split()[0]) for free in everyones)
    return _FREE[group]


def stage_layers(config: TransformerConfig) -> list[int]:
    """Numbers of this process's decoder layers that may be recomputed, over all its chunks.

    A multi-token prediction layer counts as the decoder layer of the same number, if there is one.
    "block" recomputes only the first layers of each chunk; with quantized layers it may be others.
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
