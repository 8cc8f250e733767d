"""What to keep within a budget: attention's results, then outputs of other modules, or all of a
layer."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain, pairwise, takewhile
from math import inf

from megatron_burst.rates import Rates
from megatron_burst.recompute.auto.search import best_ways

WHOLE = "layer"  # all of a layer, which is then not recomputed: the name among those of modules
_USUAL = Rates()
_GIB = 1 << 30
# Share of a GPU's memory that is used, the only margin: for fragments, up to 1 MiB more for a
# tensor, what libraries take later, and tokens of this rank's experts, which vary.
MOST_USED = 0.92
_HIDDEN = 0.9  # share of the layers' time that copies may take
LAYERS_BEHIND = 2  # that copies to the host may be: what these packed is on the device in backward


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
    forward_s: float = 0.0  # seconds of a layer's forward, behind which copies to the host hide
    turn_s: float = 0.0  # and between the last layer's forward and its backward, as in a loss
    whole_bytes: int = 0  # that a layer which is not recomputed holds for backward; 0: not known
    whole_s: float = 0.0  # seconds of its forward, without attention
    # what a layer's backward takes beyond the rest of the step, as a loss: so much of what one
    # layer keeps is free
    free_bytes: float = inf
    never_whole: int = 0  # layers after all others that are always recomputed


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """What keeping a module's output takes and saves, in one layer and micro-batch."""

    name: str
    num_bytes: int
    flops: int  # of its recomputation
    waits: bool = False  # whether that waits for the GPU, which then waits for the CPU


def most(layers: Iterable[Sequence[ModuleCost]]) -> tuple[ModuleCost, ...]:
    """Of each module the most bytes in one of these layers, and the mean of what it saves over all
    of them, also those without it."""
    layers, by_name = list(layers), defaultdict(list)
    for cost in chain.from_iterable(layers):
        by_name[cost.name].append(cost)
    return tuple(ModuleCost(name, max(cost.num_bytes for cost in costs),
                            sum(cost.flops for cost in costs) // len(layers), costs[0].waits)
                 for name, costs in sorted(by_name.items()))  # fmt: skip


def router_bytes(experts: int, active: int, itemsize: int) -> int:
    """Bytes of a token's decision that are kept: its probabilities and map over all experts, the
    scores that a balancing loss reads, and indices and weights of those that it goes to."""
    return experts * (itemsize + 1 + 4) + active * (8 + 4 + 8)


@dataclass(frozen=True, slots=True)
class Placed:
    """In how many layers of a stage a module's output is kept, on the device and in host memory."""

    device: int = 0
    host: int = 0

    def at_peak(self, in_flight: float) -> float:
        """Outputs of a layer and micro-batch that it adds to the peak of a layer's backward, if so
        many micro-batches wait: the running layer's own are there anyway, and those of another are
        being fetched."""
        fetches = self.host > 0 and (self.device + self.host) * in_flight > 1
        return max(0.0, self.device * in_flight - 1) + fetches

    def spread(self, layers: int) -> list[bool | None]:
        """For each layer, whether its output is in host memory; None: not kept.

        Those in host memory are evenly spread, so that copies do not fall behind; the last layer's
        stays on the device, because its backward follows at once.
        """
        most = layers - bool(self.device)
        edges = [index * self.host // most for index in range(most + 1)] if most else [0]
        on_host: list[bool | None] = [after > before or None for before, after in pairwise(edges)]
        on_host += [None] * (layers - most)
        free = [index for index, is_there in enumerate(on_host) if is_there is None]
        for index in free[max(0, len(free) - self.device) :]:
            on_host[index] = False
        return on_host

    def __str__(self) -> str:
        device, host = f"{self.device} layers", f"{self.host} on the host"
        return " and ".join([device] * bool(self.device) + [host] * bool(self.host))


type _Plan = list[tuple[ModuleCost, Placed]]


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


def in_flight(pp_size: int, pp_rank: int, chunks: int = 1, group_size: int | None = None) -> float:
    """Micro-batches whose activations a stage holds at most, in units of the whole stage.

    1F1B holds P - p of them on stage p; interleaved, Megatron warms up 2(P - p - 1) + (v - 1)g
    chunks of a v-th of the stage, and runs one more. g micro-batches of a chunk follow one another:
    `group_size`, by default P.

    Source: Megatron-Core 0.19.2, pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    if chunks == 1:
        return float(pp_size - pp_rank)
    group_size = group_size or pp_size
    return (2 * (pp_size - pp_rank - 1) + (chunks - 1) * group_size + 1) / chunks


def growth(tokens: int, first: int) -> float:
    """How many times the memory of a micro-batch of `first` tokens one of `tokens` takes at most:
    the square where attention stores its scores; 1 for shorter ones."""
    return max(1.0, tokens / first) ** 2 if first else 1.0


def choose_keep(
    problem: KeepProblem, budget_bytes: float, host_bytes: float = 0, rates: Rates = _USUAL
) -> KeepChoice:
    """The cheapest recomputation whose kept results fit into budgets of device and host memory.

    Everything if it fits; offloaded if the copy is hidden and it takes more than half of the
    budget, which other modules can use. Else half of it, or all for some layers, whichever saves
    more. A copy hides behind the layers' forward, or behind attention alone (`hides_copy`).
    """
    layers, per_layer = problem.layers, problem.layer_bytes * problem.in_flight
    total = per_layer * layers
    figures = f"{total / _GIB:.2f} GiB in all, {budget_bytes / _GIB:.2f} GiB given"
    behind_layers = layers * problem.layer_bytes <= _hidden_bytes(problem, rates)
    hides = behind_layers or hides_copy(problem.tokens, rates)
    has_room = total <= host_bytes and 2 * problem.layer_bytes <= budget_bytes
    leaves_room = 2 * total <= budget_bytes or not (behind_layers and has_room)
    if total <= budget_bytes and leaves_room:
        return KeepChoice("all", layers, False, figures)
    if hides and has_room:
        return KeepChoice("all", layers, True, f"{figures}; the copy to host memory is hidden")
    whole = min(layers, int(budget_bytes // per_layer))
    half = min(layers, int(budget_bytes // (per_layer / 2)))
    if problem.half_saves * half > whole:
        return KeepChoice("half", half, False, figures)
    return KeepChoice("all" if whole else "none", whole, False, figures)


def choose_modules(problem: KeepProblem, modules: Iterable[ModuleCost], budget_bytes: float,
                   host_bytes: float = 0, rates: Rates = _USUAL) -> dict[str, Placed]:  # fmt: skip
    """Where to keep each module's output, and in how many layers everything (`WHOLE`, the last
    ones), with what attention's results leave of budgets of device and host memory: first of what
    waits for the GPU, then so that most time is saved.

    A layer's own output exists in its backward whether it was kept or not, so one layer of each
    module is free, within `free_bytes`. What goes to the host hides behind the forward of the
    stage's layers; it is fetched a layer ahead, which takes room on the device.
    """
    attention = choose_keep(problem, budget_bytes, host_bytes, rates)
    if attention.keep != "all" or attention.layers < problem.layers:
        return {}
    layers, flying = problem.layers, problem.in_flight
    spare = budget_bytes - problem.layer_bytes * (2 if attention.offload else layers * flying)
    copied = layers * problem.layer_bytes if attention.offload else 0  # of one micro-batch
    host = min(host_bytes / flying, _hidden_bytes(problem, rates)) - copied
    sized = (module for module in modules if module.num_bytes)  # not experts without a token
    best_first = sorted(sized, key=lambda x: (not x.waits, -x.flops / x.num_bytes))
    choices = [
        (whole, _best_beside(problem, whole, best_first, (room, host), rates))
        for whole, room in enumerate(_left_by_whole(problem, spare, attention.offload))
    ]
    whole, best = max(choices, key=lambda choice: _saved(problem, *choice, rates))
    chosen = {module.name: placed for module, placed in best if placed.device}
    return chosen | ({WHOLE: Placed(whole)} if whole else {})


def _left_by_whole(problem: KeepProblem, spare: float, is_offloaded: bool) -> Iterator[float]:
    """What n = 0, 1, 2, ... whole layers, which are not recomputed, leave of the device.

        left(n) = spare + free - n * size * in_flight

    - size: what a whole layer holds, without attention's results if `spare` counts them already.
    - free: the last layer's backward recomputes nothing, so it has room for its own `size`, within
      `free_bytes`; not if recomputed layers (`never_whole`) come before it in backward.
    """
    most = (problem.layers - problem.never_whole) * bool(problem.whole_bytes)
    size = max(0, problem.whole_bytes - problem.layer_bytes * (not is_offloaded))
    free = 0.0 if problem.never_whole else min(size, problem.free_bytes)
    lefts = (spare + free - size * whole * problem.in_flight for whole in range(1, most + 1))
    yield from (spare, *takewhile(lambda room: room >= 0, lefts))


def _saved(problem: KeepProblem, whole: int, placed: _Plan, rates: Rates) -> tuple[int, float]:
    """Waits and seconds that recomputation then does without."""
    layers = [(module, at.device + at.host) for module, at in placed]
    waits = sum(n for x, n in layers if x.waits) + whole * any(x.waits for x, _ in layers)
    return waits, rates.matmul_s(sum(x.flops * n for x, n in layers)) + whole * problem.whole_s


class _Way(Enum):
    """How much of the budgets a module takes in its turn; the first layer costs nothing."""

    DEVICE = auto()  # as much as the device has room for
    HOST = auto()  # one layer on the device, the others on the host
    LEFT = auto()  # one layer on the device, and what others leave of it


def _best_beside(problem: KeepProblem, whole: int, modules: Sequence[ModuleCost],
                 spare: tuple[float, float], rates: Rates) -> _Plan:  # fmt: skip
    """What saves most beside so many whole layers, with what is left of the device and the host;
    beside whole layers no output of a module is free."""
    free = 0.0 if whole else problem.free_bytes
    recomputed = replace(problem, layers=problem.layers - whole, free_bytes=free)

    def placed(ways: Sequence[_Way]) -> _Plan:
        return _placed(recomputed, modules, ways, *spare)

    def saved(ways: Sequence[_Way]) -> tuple[int, float]:
        return _saved(problem, whole, placed(ways), rates)

    return placed(best_ways(len(modules), tuple(_Way), saved))


def _placed(problem: KeepProblem, modules: Sequence[ModuleCost], ways: Sequence[_Way], spare: float,
            host: float) -> _Plan:  # fmt: skip
    """In turn as much of each module as fits, in its way; then more, with what is left."""
    placed, free = {}, problem.free_bytes
    for module, way in zip(modules, ways, strict=True):
        size = module.num_bytes
        spare_now = spare - max(0.0, size - free)  # its first layer may cost something
        fitting = int((spare_now / size + 1) // problem.in_flight) if spare_now >= 0 else 0
        most = min(problem.layers, fitting)
        device = most if way is _Way.DEVICE else min(most, 1)
        fits = size * Placed(device, 1).at_peak(problem.in_flight) <= spare_now
        offloads = way is _Way.HOST and device and fits
        on_host = min(problem.layers - device, int(host // size)) if offloads else 0
        placed[module] = Placed(device, max(on_host, 0))
        if device:
            spare = spare_now - size * placed[module].at_peak(problem.in_flight)
            free = max(0.0, free - size)
        host -= placed[module].host * size
    for module, at in placed.items():
        size = module.num_bytes * problem.in_flight
        room = int(max(spare, 0) // size) if at.device else 0
        more = min(room, problem.layers - at.device - at.host)
        placed[module] = Placed(at.device + more, at.host)
        spare -= more * size
    return list(placed.items())


def _hidden_bytes(problem: KeepProblem, rates: Rates) -> float:
    """Bytes of a micro-batch that are copied during the forward of the stage's layers, and what
    comes before their backward; copies are at most `LAYERS_BEHIND` behind."""
    after = min(problem.turn_s, LAYERS_BEHIND * problem.forward_s)
    return _HIDDEN * (problem.layers * problem.forward_s + after) / rates.copy_s(1)


def hides_copy(tokens: int, rates: Rates = _USUAL) -> bool:
    """Whether causal attention over this many tokens takes longer than copying its output.

    A row of one head with dimension d takes 2 S d FLOPs on average and is 2 d bytes in bf16.
    """
    return rates.attention_s(2 * tokens) >= rates.copy_s(2)
