"""`plan --lengths`: a step by the rule that says which document goes where, and what to choose."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from megatron_burst.balance import BatchGrid, Costs, assign
from megatron_burst.balance.packing import best_fit, sequential
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.candidate import ROOMY, Candidate, missing_gib
from megatron_burst.tools.job.layer_time import UPDATE
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.step import costs_of
from megatron_burst.tools.job.strategy import Job, Strategy, least_multiple, misfit
from megatron_burst.tools.job.transfers import boundary_seconds
from megatron_burst.tools.lengths import Lengths
from megatron_burst.tools.simulate.micro_batches import MicroBatches, in_turn, step_of
from megatron_burst.tools.simulate.sample import Packing, Sample

SEQUENTIAL, BEST_FIT = "packed in sequence", "packed, best fit"
BALANCED, CHANGING = "balanced", "balanced, changing CP"
_LAYOUTS = 3  # others that are simulated, the fastest for micro-batches that are alike
_DRAWS = 3  # steps, with seeds from 0 on
_MORE = 1.25, 1.5, 2.0  # token limits over a packed micro-batch's; more than the last gains nothing
_ALIKE = 0.01  # of a step: what is not faster by more is not worth a larger limit or another rule


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step by one rule; figures are means of the draws."""

    rule: str
    grid: BatchGrid  # of the step, with the most tokens of a micro-batch that a rank has
    cp_sizes: tuple[int, ...]  # of micro-batches
    seconds: float  # predicted, gradients and optimizer included
    # share of the ranks' time in which they run no micro-batch, without gradients and optimizer
    waiting: float


@dataclass(frozen=True, slots=True)
class Documents:
    """What a plan says of a data set's documents."""

    strategy: Strategy  # how the job is sharded
    outcomes: tuple[Outcome, ...]  # the simplest first, the first is sequential packing
    token_limit: int  # tokens of a micro-batch that a rank has memory for
    drawn: np.ndarray  # of the first draw, tokens of each document
    cut: float  # share of documents longer than a packed micro-batch
    # of another layout, if it is faster with these documents
    other: Outcome | None = None
    elsewhere: Strategy | None = None

    @property
    def recommended(self) -> Outcome:
        """The simplest that is as fast as the fastest."""
        return _simplest(self.outcomes)


def typical_packing(lengths: Lengths, packed: int) -> Packing:
    """Of micro-batches packed in sequence the one whose pairs are nearest to their mean."""
    drawn = lengths.of_step(packed, 64, 1, seed=0)
    samples = [Sample.of(drawn[pack].tolist()) for pack in sequential(drawn, packed)]
    share = fmean(one.share for one in samples)
    nearest = min(samples, key=lambda one: abs(one.share - share))
    return Packing(Layout.DOCUMENTS, nearest.filling(packed))


def compare(job: Job, candidates: Sequence[Candidate], lengths: Lengths) -> Documents:
    """Simulate steps of documents drawn from `lengths` by each rule, for the best strategy, which
    is the first and fits, and some others; a sequence is a micro-batch of packed documents.

    Raises:
        BurstError: if sequences are too short for costs of micro-batches.
    """
    best = candidates[0]
    limit, draws, outcomes = _outcomes(job, best, lengths)
    documents = Documents(best.strategy, outcomes, limit, draws[0], lengths.share_above(job.seq))
    layouts: dict[str, Candidate] = {}
    for one in candidates:
        layouts.setdefault(one.strategy.layout, one)
    for other in [one for one in layouts.values() if one.fits][1 : 1 + _LAYOUTS]:
        with suppress(BurstError):
            fastest = _simplest(_outcomes(job, other, lengths)[2])
            least = (documents.other or documents.recommended).seconds
            if fastest.seconds < (1 - _ALIKE) * least:
                documents = replace(documents, other=fastest, elsewhere=other.strategy)
    return documents


def _outcomes(
    job: Job, best: Candidate, lengths: Lengths
) -> tuple[int, list[np.ndarray], tuple[Outcome, ...]]:
    """The token limit that fits a strategy, the documents of each draw, and steps by each rule."""
    strategy, packed = best.strategy, job.seq // best.strategy.cp
    micro_batches = job.batch // strategy.dp
    shared = _sharing_experts(strategy)
    grid = BatchGrid(strategy.dp, strategy.cp, micro_batches, packed, strategy.pp, shared)
    costs, sizes = _costs(job, strategy), _sizes_that_fit(job, strategy, grid)
    limit, each = _token_limit(job, strategy, sizes), least_multiple(strategy)
    draws = [lengths.of_step(job.seq, grid.slots, each, seed) for seed in range(_DRAWS)]
    update = dict(best.time.parts)[UPDATE] if best.time else 0.0

    def outcome(rule: str, grid: BatchGrid) -> Outcome:
        some = sizes if rule == CHANGING else (grid.cp,)
        steps = [
            step_of(_micro_batches(rule, drawn, grid, costs, some, seed), grid)
            for seed, drawn in enumerate(draws)
        ]
        seconds, waiting = fmean(s.seconds for s in steps), fmean(s.waiting for s in steps)
        return Outcome(rule, grid, some, update + seconds, waiting)

    ours = (BALANCED, CHANGING) if len(sizes) > 1 else (BALANCED,)
    outcomes = [outcome(rule, grid) for rule in (SEQUENTIAL, BEST_FIT, *ours)]
    more = sorted({min(int(packed * share), limit) for share in _MORE} - {packed})
    if wider := [replace(grid, token_limit=tokens) for tokens in more]:
        outcomes += [_simplest([outcome(rule, one) for one in wider]) for rule in ours]
    return limit, draws, tuple(outcomes)


def _sharing_experts(strategy: Strategy) -> int:
    """Data- and context-parallel ranks that share experts; tensor-parallel ones do so too."""
    ranks, shared = strategy.dp * strategy.cp, max(1, strategy.ep // strategy.tp)
    whole = shared <= strategy.cp or shared % strategy.cp == 0  # context-parallel groups
    return shared if ranks % shared == 0 and whole else ranks


def _micro_batches(
    rule: str, drawn: np.ndarray, grid: BatchGrid, costs: Costs, sizes: tuple[int, ...], seed: int
) -> MicroBatches:
    limit = grid.token_limit * grid.cp
    if rule == SEQUENTIAL:
        return in_turn(sequential(drawn, limit), drawn, grid, costs)
    if rule == BEST_FIT:
        return in_turn(best_fit(drawn, limit, seed), drawn, grid, costs)
    return assign(drawn, grid, costs, sizes).micro_batches


def _simplest(outcomes: Sequence[Outcome]) -> Outcome:
    """The first that is as fast as the fastest."""
    least = min(one.seconds for one in outcomes)
    return next(one for one in outcomes if one.seconds <= (1 + _ALIKE) * least)


def _costs(job: Job, strategy: Strategy) -> Costs:
    """Of micro-batches, with transfers between pipeline stages."""
    costs = costs_of(job, strategy)
    if not costs:
        raise BurstError(
            "plan: --lengths must come with a --seq-length of at least 8 x CP x TP, because costs "
            "of documents are fitted to micro-batches of several lengths; got "
            f"{job.seq} tokens, CP {strategy.cp}, TP {strategy.tp}; raise the length"
        )
    if strategy.pp == 1:
        return costs
    each = 2 * boundary_seconds(job, strategy) / (job.seq // strategy.cp)
    return replace(costs, token=costs.token + each)


def _sizes_that_fit(job: Job, strategy: Strategy, grid: BatchGrid) -> tuple[int, ...]:
    """Context-parallel sizes at which a rank has memory for a packed micro-batch's shard."""
    sizes = (cp for cp in grid.cp_sizes if _fits(job, strategy, cp, grid.token_limit))
    return tuple(sorted({*sizes, grid.cp}))


def _token_limit(job: Job, strategy: Strategy, sizes: Sequence[int]) -> int:
    """Tokens of a micro-batch that fit a rank at each of these sizes; at most those of its step."""
    step, packed = 2 * strategy.tp, job.seq // strategy.cp
    low, high = packed // step, packed * (job.batch // strategy.dp) // step + 1
    while low + 1 < high:
        middle = (low + high) // 2
        fits = all(_fits(job, strategy, cp, middle * step) for cp in sizes)
        low, high = (middle, high) if fits else (low, middle)
    return low * step


def _fits(job: Job, strategy: Strategy, cp: int, tokens: int) -> bool:
    """Whether sub-groups of a context-parallel group have memory for so many tokens of a rank."""
    groups = strategy.cp // cp
    narrow = replace(strategy, cp=cp, dp=strategy.dp * groups)
    batch, packing = job.batch * groups, Packing(Layout.DOCUMENTS)
    some = replace(job, seq=tokens * cp, batch=batch, packing=packing)
    if misfit(some, narrow):
        return False
    return max(missing_gib(some, memory_of(some, narrow), ROOMY)) <= 0
