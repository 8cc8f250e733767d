"""Keeping with Megatron's recomputation: its checkpoints and attention, and which layers keep."""

from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from types import SimpleNamespace

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, is_grad_enabled

from megatron_burst.config import BurstConfig
from megatron_burst.mcore.keep import stage_layers
from megatron_burst.mcore.keep.module_costs import may_differ, shared_shape
from megatron_burst.mcore.keep.stage import Stage, log_of_stage, problem_of, stage_of
from megatron_burst.mcore.options import burst_config_of
from megatron_burst.mcore.refusals import refuse
from megatron_burst.rates import Rates
from megatron_burst.recompute.auto import budget
from megatron_burst.recompute.auto.budget import KeepProblem, ModuleCost, Placed, choose_modules
from megatron_burst.recompute.inputs import offloaded_inputs
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import WHO, Frame, Keeping, framed, running
from megatron_burst.recompute.later import packer
from megatron_burst.recompute.offload import host_limit_bytes

# ---- what replaces functions of Megatron, called with the original: see patches.py -----------


def inputs_on_host(checkpoint, limit_gib: float | None, /, function, *args, **options):
    """A checkpoint that offloads its function's inputs."""
    frame = Frame()
    with offloaded_inputs(frame, limit_gib):
        return checkpoint(frame.bind(function), *args, **options)


def te_in_frames(checkpoint, /, function, *args, **options):
    """TransformerEngine's checkpoint that runs its function in a frame, with gradients."""
    return checkpoint(framed(function) if is_grad_enabled() else function, *args, **options)


def own_kept(forward, /, self, query, key, value, *args, **options):
    """The forward of Megatron's own attention, or of TransformerEngine's."""
    burst = own_config(self.config, self.layer_number, query, value) if running() else None
    if burst is None or burst.keep == "none":
        return forward(self, query, key, value, *args, **options)
    keeping = Keeping(pack=packer(query.device, burst), debug=burst.keep_debug)
    return call_kept(partial(forward, self), (query, key, value, *args), options, keeping)


# ---- a layer's options ----------------------------------------------------------------------


def own_config(config: TransformerConfig, layer_number: int, query, value) -> BurstConfig:
    """Burst's options for a layer with Megatron's own attention; refuses what cannot be kept."""
    burst = burst_config_of(config).for_calls()
    if burst.keep != "none":
        refuse("keep", config, WHO, skip=("recompute_modules",))  # it runs only if recomputed
        burst = resolved(burst, config, layer_number, query, value, half_saves=0.0)
    refuse("own", SimpleNamespace(keep=burst.keep, layer_number=layer_number), WHO)
    return burst


def resolved(burst: BurstConfig, config: TransformerConfig, layer_number: int, query: Tensor,
             value: Tensor, half_saves: float, waits: bool = False) -> BurstConfig:  # fmt: skip
    """Burst's options for one layer: with `keep` resolved, no more "auto" or number of layers.

    Args:
        burst: the model's, from `BurstConfig.for_calls`.
        query, value: [s_local, b, h, d_qk] and [s_local, b, h_kv, d_v], of the layer's attention.
        half_saves: share of recomputation saved by keeping half; 0 if unsupported.
        waits: whether "auto" keeps nothing in the first step, not even within a budget.
    """
    if burst.keep == "auto":
        stage = stage_of(burst, query.device)
        shape = query.shape[0], query.shape[1]
        budget_bytes = stage.budget_bytes(burst, shape[0] * shape[1])
        if budget_bytes is None or (waits and stage.left_bytes is None):
            return keeping_nothing(burst)
        layer_bytes = query.shape[:-1].numel() * _row_bytes(value.shape[-1], query.itemsize)
        problem = problem_of(config, stage, shape, layer_bytes, half_saves)
        choice = _choose(problem, budget_bytes, _host_bytes(burst, stage), stage.rates)
        burst = _chosen(burst, choice, problem.layers, stage_layers.sharing(config))
    if burst.keep_layers is None:  # all, or nothing is kept
        return burst
    if stage_layers.is_among(burst.keep_layers, config, layer_number):
        return replace(burst, keep_layers=None)
    return keeping_nothing(burst)


def keeping_nothing(burst: BurstConfig) -> BurstConfig:
    """The same options for calls of which nothing is kept."""
    return replace(burst, keep="none", keep_modules=(), keep_layers=None, keep_offload="none",
                   keep_debug=False, keep_host_gib=None, keep_budget_gib=None)  # fmt: skip


def modules_within(burst: BurstConfig, config: TransformerConfig, stage: Stage, x: Tensor,
                   costs: tuple[ModuleCost, ...],
                   may_be_whole: bool) -> dict[str, Placed]:  # fmt: skip
    """Where "auto" keeps the output of each module, and all of a layer if it may be whole.

    The stage's budget is known; of the layer's input only the size counts; costs are those of the
    modules that may be kept.
    """
    shape = shared_shape(config, x)
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    dim = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    tokens = prod(shape)
    layer_bytes = tokens * heads * _row_bytes(dim, x.itemsize)
    problem = problem_of(config, stage, shape, layer_bytes)
    if may_be_whole:
        whole_s = stage.rest_s or problem.forward_s
        problem = replace(problem, whole_bytes=whole_bytes(config, stage, x), whole_s=whole_s)
    budgets = stage.budget_bytes(burst, tokens), _host_bytes(burst, stage)
    if 0 < stage.tokens < tokens:
        log_of_stage(f"a micro-batch of {tokens} tokens is longer than those of the first step "
                     f"({stage.tokens}): {budgets[0] / 2**30:.2f} GiB are left for what it "
                     "keeps")  # fmt: skip
    chosen = _modules(problem, *budgets, stage.rates, costs, may_differ(config))
    return stage_layers.of_decoder(chosen, config)


def whole_bytes(config: TransformerConfig, stage: Stage, x: Tensor) -> int:
    """Bytes that a layer which is not recomputed holds, as the first step measured it, for an input
    of which only the size counts; 0: it did not."""
    if not stage.held_share or stage_layers.layer_kind(config) not in stage.first.kinds:
        return 0
    longer = budget.growth(prod(shared_shape(config, x)), stage.tokens) ** 0.5  # x is longer too
    # a checkpoint may hold a part of the input, whose rest lives on only in whole layers
    ranks = config.tensor_model_parallel_size if config.distribute_saved_activations else 1
    return int((stage.held_share + (1 - 1 / ranks)) * x.nbytes * longer)


@lru_cache(maxsize=32)
def _modules(problem: KeepProblem, budget_bytes: float, host_bytes: int, rates: Rates,
             costs: tuple[ModuleCost, ...], differ: bool) -> dict[str, Placed]:  # fmt: skip
    """The choice for a stage; made and logged once. If layers differ, costs are the largest."""
    chosen = choose_modules(problem, costs, budget_bytes, host_bytes, rates)
    at_most = ", at most" * differ
    for module in costs:
        if module.name in chosen:
            log_of_stage(_words(module, chosen[module.name], problem, rates) + at_most)
    if budget.WHOLE in chosen:
        log_of_stage(_words_of_whole(chosen[budget.WHOLE].device, problem) + at_most)
    return chosen


def _words(module: ModuleCost, placed: Placed, problem: KeepProblem, rates: Rates) -> str:
    gib = problem.in_flight * module.num_bytes / 2**30  # in each layer
    saved = rates.matmul_s(module.flops) * (placed.device + placed.host) * 1e3
    return (f"keep the output of {module.name} in {placed}: {placed.device * gib:.2f} GiB, on the "
            f"host {placed.host * gib:.2f} GiB, saves {saved:.1f} ms a micro-batch")  # fmt: skip


def _words_of_whole(layers: int, problem: KeepProblem) -> str:
    gib = layers * problem.in_flight * problem.whole_bytes / 2**30
    return (f"recompute nothing in {layers} layers, with attention's results: {gib:.2f} GiB, "
            f"saves {layers * problem.whole_s * 1e3:.1f} ms a micro-batch")  # fmt: skip


def _chosen(burst: BurstConfig, choice: budget.KeepChoice, layers: int, mtp: int) -> BurstConfig:
    """Options with "auto" replaced by the choice for a stage of so many layers; `mtp`: number of
    multi-token prediction layers that keep like the decoder layers of the same number."""
    only_some = 0 < choice.layers < layers
    return replace(burst, keep=choice.keep, keep_budget_gib=None,
                   keep_layers=max(0, choice.layers - mtp) if only_some else None,
                   keep_offload="results" if choice.offload else "none",
                   keep_host_gib=burst.keep_host_gib if choice.offload else None,
                   keep_debug=burst.keep_debug and choice.keep != "none")  # fmt: skip


@lru_cache(maxsize=32)
def _choose(
    problem: KeepProblem, budget_bytes: float, host_bytes: int, rates: Rates
) -> budget.KeepChoice:
    """The choice for a stage; made and logged once."""
    choice = budget.choose_keep(problem, budget_bytes, host_bytes, rates)
    log_of_stage(str(choice))
    return choice


def _host_bytes(burst: BurstConfig, stage: Stage) -> int:
    """Limit of host memory per rank: the given one, or the least that any rank has free. 0 in the
    first step: pinning memory takes seconds, which would count as the layers' own."""
    if stage.left_bytes is None:
        return 0
    limit_gib = burst.keep_host_gib
    return stage.host_bytes if limit_gib is None else host_limit_bytes(limit_gib)


def _row_bytes(dim: int, itemsize: int) -> int:
    """Of attention's output and lse, in one row and head."""
    return dim * itemsize + max(4, itemsize)
