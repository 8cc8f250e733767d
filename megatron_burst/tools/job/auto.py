"""What a run's `--burst-keep auto` will choose, before the run; and all its choices, by budget."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.rates import Rates
from megatron_burst.recompute.auto.budget import (
    MOST_USED,
    WHOLE,
    KeepProblem,
    Placed,
    choose_keep,
    choose_modules,
    in_flight,
)
from megatron_burst.recompute.later_plan import recomputed_share
from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.job.kept import (
    HALF,
    RESULTS,
    items_of,
    largest_costs,
    last_flops,
    module_costs,
    placed_results,
    results_bytes,
)
from megatron_burst.tools.job.layer_time import Layer, head_seconds
from megatron_burst.tools.job.memory import memory_of, whole_bytes
from megatron_burst.tools.job.step import step_time
from megatron_burst.tools.job.strategy import Job, Strategy, again_layers, attention_call

_STEPS = 48  # budgets of a frontier, more of small ones
_FASTER = 0.9995  # time of a point beside the one before
_ALL = "all of a layer"  # what a table calls it


def rates_of(job: Job) -> Rates:
    """Speeds of the job's GPUs, as a plan has them for its run."""
    gpu = job.hardware.gpu
    forward = job.hardware.kernel(job.model.dim_qk).forward.points[-1][1]
    return Rates(gpu.matmul_tflops, forward, gpu.host_gbs)


@lru_cache(maxsize=1024)
def placed_by_auto(job: Job, strategy: Strategy) -> Strategy:
    """A strategy that keeps "auto" with the choice of its first pipeline stage; others as they are.

    The choice is the run's own. Its figures are predicted where a run measures them in its first
    step: the memory that is left, if the strategy has no budget, and a layer's forward.
    """
    if strategy.keep != "auto":
        return strategy
    strategy = _nothing_kept(strategy)
    # a rank's limit of host memory: half of its share, as in a run that gives none
    host = job.hardware.node.memory_gib * GIB / job.hardware.node.gpus / 2
    budget = budget_bytes(job, strategy)
    problem, rates = _problem(job, strategy), rates_of(job)
    if not problem.layers:
        return strategy
    choice = choose_keep(problem, budget, host, rates)
    modules = choose_modules(problem, largest_costs(job, strategy), budget, host, rates)
    whole = modules.pop(WHOLE, Placed()).device
    placed, layers = [], choice.layers - whole  # whole ones have attention's results too
    if choice.keep != "none" and layers:
        placed.append(placed_results(choice.keep, layers, choice.offload))
    return replace(strategy, placed=(*placed, *modules.items()), whole=whole)


def _nothing_kept(strategy: Strategy) -> Strategy:
    """As a first step is."""
    return replace(strategy, placed=(), whole=0)


def budget_bytes(job: Job, strategy: Strategy) -> float:
    """GPU memory for what is kept: as given, or what a step that keeps nothing leaves."""
    if strategy.keep_budget_gib is not None:
        return strategy.keep_budget_gib * GIB
    gpu = job.hardware.gpu
    left = (MOST_USED * gpu.memory_gib - gpu.reserved_gib) * GIB
    return max(0.0, left - memory_of(job, _nothing_kept(strategy)).peak)


def _problem(job: Job, strategy: Strategy) -> KeepProblem:
    nothing = _nothing_kept(strategy)
    turn = head_seconds(job, nothing) if strategy.pp == 1 else 0.0
    memory = memory_of(job, nothing)
    # only where each layer has a checkpoint of its own, and none is Mamba's
    has_own = not job.model.hybrid and "M" not in job.model.pattern
    whole = round(whole_bytes(job, nothing)) if has_own else 0
    return KeepProblem(
        again_layers(job.model, nothing), in_flight(strategy.pp, 0),
        round(results_bytes(job, strategy)), job.seq, _half_saves(job, nothing),
        Layer(job, nothing).forward, turn,
        whole, _rest_seconds(job, nothing),
        max(0.0, memory.layer - memory.head), job.model.predicted if strategy.pp == 1 else 0,
    )  # fmt: skip


def _rest_seconds(job: Job, strategy: Strategy) -> float:
    """Of a layer's forward, without attention and the last product."""
    layer, last = Layer(job, strategy), rates_of(job).matmul_s(last_flops(job, strategy))
    return layer.forward - layer.attention - last


def _half_saves(job: Job, strategy: Strategy) -> float:
    """Share of attention's recomputation that keeping half of the rows saves; 0 without CP."""
    return 1 - recomputed_share(attention_call(job, strategy)) if strategy.cp > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """An item that is kept, in one line of the table."""

    name: str
    device: int  # layers that keep it on the GPU
    host: int  # layers that offload it
    device_gib: float  # of all micro-batches that wait
    host_gib: float
    saved_ms: float  # of recomputation, in a micro-batch


def rows_of(job: Job, strategy: Strategy) -> tuple[Row, ...]:
    """What a strategy keeps on its first pipeline stage, item by item."""
    flights = in_flight(strategy.pp, 0)
    saves = {m.name: rates_of(job).matmul_s(m.flops) for m in module_costs(job, strategy)}
    saves[RESULTS] = Layer(job, strategy).attention
    saves[HALF] = saves[RESULTS] * _half_saves(job, strategy)
    rows = []
    for item in items_of(job, strategy):
        device, host = item.placed.device, item.placed.host
        gib = item.num_bytes * flights / GIB
        saved_ms = 1e3 * saves[item.name] * (device + host)
        rows.append(Row(item.name, device, host, gib * device, gib * host, saved_ms))
    if strategy.whole:
        gib = whole_bytes(job, strategy) * flights / GIB * strategy.whole
        seconds = saves[RESULTS] + _rest_seconds(job, strategy)
        rows.append(Row(_ALL, strategy.whole, 0, gib, 0.0, 1e3 * seconds * strategy.whole))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Point:
    """A plan's place on the frontier."""

    name: str
    keep_budget_gib: float | None  # that "auto" was given
    peak_gib: float
    seconds: float


def frontier(job: Job, strategy: Strategy) -> tuple[Point, ...]:
    """Peak memory and step time of a layout, from full recomputation over ever larger budgets to
    everything kept, then nothing recomputed; without budgets that make no step faster."""
    full = replace(
        _nothing_kept(strategy), recompute="full", keep="none", offload=False, again_layers=None,
        keep_budget_gib=None,
    )  # fmt: skip
    none = replace(full, recompute="none", offload_inputs=False)
    points = [_point(job, full, "full recomputation")]
    layers = again_layers(job.model, full) * in_flight(full.pp, 0)
    everything_gib = layers * whole_bytes(job, full) / GIB
    for step in range(_STEPS + 1):
        budget = everything_gib * (step / _STEPS) ** 2
        one = placed_by_auto(job, replace(full, keep="auto", keep_budget_gib=budget))
        point = _point(job, one, "--burst-keep auto")
        if point.seconds < _FASTER * points[-1].seconds:
            points.append(point)
    return (*points, _point(job, none, "nothing recomputed"))


def _point(job: Job, strategy: Strategy, name: str) -> Point:
    memory = memory_of(job, strategy)
    seconds = step_time(job, strategy, memory).seconds
    return Point(name, strategy.keep_budget_gib, memory.peak / GIB, seconds)
