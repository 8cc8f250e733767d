"""A pipeline stage under `--burst-keep`: its layers, and what its ranks measure and agree on."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.comm.group import state_of
from megatron_burst.config import BurstConfig
from megatron_burst.logs import log_message
from megatron_burst.mcore.args import global_args
from megatron_burst.mcore.keep.module_costs import ModelLayers
from megatron_burst.mcore.keep.stage_layers import mtp_layers, stage_layers
from megatron_burst.mcore.options import with_environment
from megatron_burst.mcore.plan_file import rates_of
from megatron_burst.rates import Rates
from megatron_burst.recompute.auto.budget import KeepProblem, growth, in_flight
from megatron_burst.recompute.auto.first_step import FirstStep, host_gbs
from megatron_burst.recompute.keeping import WHO, Frame, running
from megatron_burst.recompute.offload import host_limit_bytes

_GIB = 1 << 30
_MOST = "tokens", "taken_bytes", "held_share", "num_models", "forward_s"  # worse if more


@dataclass(slots=True)
class Stage:
    """What "auto" chooses from, the same on all ranks of a stage."""

    # limit of host memory per rank, if `keep_host_gib` gives none; until the first step is over,
    # the least of the ranks that share its sequences only, as in `rates`
    host_bytes: int
    rates: Rates  # the GPU's, with the measured bandwidth to host memory
    first: FirstStep
    left_bytes: int | None = None  # device memory that the first step leaves; None: it is not over
    tokens: int = 0  # of the longest micro-batch of the first step on any rank
    taken_bytes: int = 0  # what that step took above what it began with
    free_bytes: float = inf  # see `KeepProblem`
    forward_s: float = 0.0  # seconds of a layer's forward in the first step; 0: not measured
    turn_s: float = 0.0  # seconds between the last layer's forward and its backward in that step
    rest_s: float = 0.0  # seconds of a layer's forward that only a whole layer saves; 0: unknown
    held_share: float = 0.0  # bytes that a layer's graph holds, by those of its input; 0: unknown
    models: list[ModelLayers] = field(default_factory=list)
    num_models: int = 1  # that the first step recomputed, which share what is left
    # what it was in the first pass of a checkpoint's call, for the recomputation of that
    by_frame: WeakKeyDictionary[Frame, "Stage"] = field(default_factory=WeakKeyDictionary)

    def budget_bytes(self, burst: BurstConfig, tokens: int) -> float | None:
        """Device memory that "auto" may add for micro-batches of so many tokens: what is given, or
        what the first step leaves, less what longer ones than it had take anyway; None: it is not
        over."""
        if burst.keep_budget_gib is not None:
            return burst.keep_budget_gib * _GIB / self.num_models
        if self.left_bytes is None:
            return None
        more = (growth(tokens, self.tokens) - 1) * self.taken_bytes
        return max(0.0, self.left_bytes - more) / self.num_models


# The only cache here: a stage by the group of the ranks that share its sequences, for its life.
_STAGES: WeakKeyDictionary[dist.ProcessGroup, Stage] = WeakKeyDictionary()


def stage_of(burst: BurstConfig, device: torch.device) -> Stage:
    """This rank's stage, for "auto".

    Ranks that share a sequence must make the same choice, or only some would communicate in
    recomputation. Ranks that share a layer's weights would wait for the slowest. So all agree,
    once before the first step and once after it: they reach their first layer together, unlike
    pipeline stages. A call of a checkpoint chooses in recomputation as in its first pass, though
    some optimizer made a step in between: what is kept is matched by the order of calls.
    """
    group = parallel_state.get_tensor_and_context_parallel_group()
    frames, stage = [run.frame for run in running()], _STAGES.get(group)
    if stage is None:
        stage = _STAGES[group] = _new_stage(group, burst, device)
    earlier = [stage.by_frame[frame] for frame in frames if frame in stage.by_frame]
    if earlier:
        stage = earlier[0]
    elif stage.first.is_over and stage.left_bytes is None:
        _agree(stage, group, burst)
    for frame in frames:
        stage.by_frame.setdefault(frame, stage if earlier else replace(stage))
    return stage


def _new_stage(group: dist.ProcessGroup, burst: BurstConfig, device: torch.device) -> Stage:
    """The stage before its first step."""
    rates = rates_of(with_environment(global_args() or Namespace()))
    limit, bandwidth = host_limit_bytes(burst.keep_host_gib), host_gbs(device) or rates.host_gbs
    worst = _worst((group,), burst, host_bytes=limit, host_gbs=bandwidth)
    return Stage(worst["host_bytes"], replace(rates, host_gbs=worst["host_gbs"]), FirstStep(device))


def _agree(stage: Stage, group: dist.ProcessGroup, burst: BurstConfig) -> None:
    """Set what the first step measured: the worst of all ranks."""
    groups = group, parallel_state.get_data_parallel_group(with_context_parallel=True)
    first = stage.first
    first.release_cache()
    stage.tokens = _worst(groups, burst, tokens=first.tokens)["tokens"]
    models = sum(model.are_all and model.config() is not None for model in stage.models)
    worst = _worst(
        groups, burst, left_bytes=first.left_bytes(stage.tokens), free_bytes=first.free_bytes(),
        taken_bytes=first.taken_bytes, held_share=first.held_share, num_models=max(1, models),
        forward_s=first.forward_s(), turn_s=first.turn_s(), rest_s=first.rest_s(),
        # what goes to the host leaves room for whole layers
        host_bytes=stage.host_bytes, host_gbs=stage.rates.host_gbs,
    )  # fmt: skip
    stage.rates = replace(stage.rates, host_gbs=worst.pop("host_gbs"))
    for name, number in worst.items():
        setattr(stage, name, number)
    log_of_stage(f"the first step left {stage.left_bytes / _GIB:.2f} GiB; a layer's forward takes "
                 f"{stage.forward_s * 1e3:.2f} ms, the loss {stage.turn_s * 1e3:.2f} ms; "
                 f"{stage.rates.host_gbs:.1f} GB/s to host memory")  # fmt: skip
    log_of_stage(f"a layer holds {stage.held_share:.1f} times its input for backward; keeping all "
                 f"of it saves {stage.rest_s * 1e3:.2f} ms besides attention")  # fmt: skip


def _worst(groups: Sequence[dist.ProcessGroup], burst: BurstConfig, **numbers: Any) -> Any:
    """Of each number the worst that a rank of the groups has: the most of `_MOST`, else the
    least."""
    for group in groups:
        texts = state_of(group, burst.timeout_s).consensus.all_gather(json.dumps(numbers), WHO)
        ranks = [json.loads(text) for text in texts]
        numbers = {name: (max if name in _MOST else min)(rank[name] for rank in ranks)
                   for name in numbers}  # fmt: skip
    return numbers


def problem_of(config: TransformerConfig, stage: Stage, shape: tuple[int, int], layer_bytes: int,
               half_saves: float = 0.0) -> KeepProblem:  # fmt: skip
    """The inputs of the choice for a pipeline stage. `shape`: rows and sequences of a micro-batch
    on this rank. `layer_bytes`: of attention's out and lse in one layer. `half_saves`: share of
    recomputation saved by keeping half of the rows; 0 if unsupported."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = config.virtual_pipeline_model_parallel_size or 1
    group_size = config.microbatch_group_size_per_vp_stage
    flying = in_flight(config.pipeline_model_parallel_size, rank, chunks, group_size)
    mtp = mtp_layers(config)
    estimate = stage.rates.matmul_s(shape[0] * shape[1] * _flops_per_token(config))
    return KeepProblem(
        len(stage_layers(config)) + mtp, flying, layer_bytes,
        shape[0] * config.context_parallel_size, half_saves, stage.forward_s or estimate,
        # with several in flight, other micro-batches come in between once
        stage.turn_s if flying == 1 else 0.0, free_bytes=stage.free_bytes, never_whole=mtp,
    )  # fmt: skip


def _flops_per_token(config: TransformerConfig) -> float:
    """FLOPs of a layer's linear layers on one rank, without attention's."""
    heads = 2 * (config.num_attention_heads + (config.num_query_groups or 0))
    products = 3 if config.gated_linear_unit else 2
    ffn = config.ffn_hidden_size
    if config.num_moe_experts:
        ffn = config.moe_router_topk * (config.moe_ffn_hidden_size or ffn)
    width = heads * config.kv_channels + products * ffn
    return 2 * config.hidden_size * width / config.tensor_model_parallel_size


def log_of_stage(choice: str) -> None:
    """Log a choice on the first rank of a pipeline stage."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if dist.get_rank() == 0 or (stage and parallel_state.get_data_parallel_rank(True) == 0):
        log_message(f"{WHO}: pipeline stage {stage}: {choice}")
