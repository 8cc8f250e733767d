"""What to keep within a budget: attention's results, then outputs of other modules."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_burst.rates import Rates

_USUAL = Rates()
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KeepProblem:
    """What is known about a pipeline stage."""

    layers: int  # attention layers of the stage, all its chunks together
    # how often each layer's results wait for backward at the same time, on average
    in_flight: float
    layer_bytes: int  # out and lse of one layer and micro-batch
    tokens: int  # of the whole sequence
    # share of its recomputation that a layer saves by keeping half of the rows; 0: none can
    half_saves: float = 0.75


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """What keeping a module's output takes and saves, in one layer and micro-batch."""

    name: str
    num_bytes: int
    flops: int  # of its recomputation


@dataclass(frozen=True, slots=True)
class KeepChoice:
    """What is kept, and why, as text for the user."""

    keep: str  # "none", "half" or "all"
    layers: int  # how many layers of the stage keep; the others recompute
    offload: bool  # whether it is offloaded
    reason: str  # figures

    def __str__(self) -> str:
        where = " in host memory" if self.offload else ""
        return f"keep {self.keep} of {self.layers} layers{where} ({self.reason})"


def in_flight(pp_size: int, pp_rank: int, num_chunks: int = 1) -> float:
    """Micro-batches whose activations a stage holds at most, in units of the whole stage.

    1F1B holds P - p of them on stage p; interleaved, Megatron warms up 2(P - p - 1) + (v - 1)P
    chunks of a v-th of the stage, and runs one more.

    Source: Megatron-Core 0.19.2, pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    if num_chunks == 1:
        return float(pp_size - pp_rank)
    return (2 * (pp_size - pp_rank - 1) + (num_chunks - 1) * pp_size + 1) / num_chunks


def choose_keep(
    problem: KeepProblem, budget_bytes: float, host_bytes: float = 0, rates: Rates = _USUAL
) -> KeepChoice:
    """The cheapest recomputation whose kept results fit into budgets of device and host memory.

    Everything if it fits; else everything offloaded if attention hides the copy, which for any
    model depends on the sequence length alone; else half of it, or all for some layers, whichever
    saves more recomputation.
    """
    per_layer = problem.layer_bytes * problem.in_flight
    total, layers = per_layer * problem.layers, problem.layers
    figures = f"{total / _GIB:.2f} GiB in all, {budget_bytes / _GIB:.2f} GiB given"
    if total <= budget_bytes:
        return KeepChoice("all", layers, False, figures)
    hides = hides_copy(problem.tokens, rates)
    if hides and total <= host_bytes and 2 * problem.layer_bytes <= budget_bytes:
        return KeepChoice(
            "all", layers, True, f"{figures}; attention hides the copy to host memory"
        )
    whole = min(layers, int(budget_bytes // per_layer))
    half = min(layers, int(budget_bytes // (per_layer / 2)))
    if problem.half_saves * half > whole:
        return KeepChoice("half", half, False, figures)
    return KeepChoice("all" if whole else "none", whole, False, figures)


def choose_modules(
    problem: KeepProblem, modules: Iterable[ModuleCost], budget_bytes: float
) -> dict[str, int]:
    """In how many layers to keep each module's output, with what attention's results leave of a
    budget: those first that save most time per byte."""
    spare = budget_bytes - problem.layer_bytes * problem.in_flight * problem.layers
    chosen = {}
    for each in sorted(modules, key=lambda module: -module.flops / module.num_bytes):
        per_layer = each.num_bytes * problem.in_flight
        layers = min(problem.layers, int(max(spare, 0) // per_layer))
        if layers:
            chosen[each.name] = layers
            spare -= layers * per_layer
    return chosen


def hides_copy(tokens: int, rates: Rates = _USUAL) -> bool:
    """Whether causal attention over this many tokens takes longer than copying its output.

    A row of one head with dimension d takes 2 S d FLOPs on average and is 2 d bytes in bf16.
    """
    return rates.attention_s(2 * tokens) >= rates.copy_s(2)
