"""Which document of a global batch goes to which micro-batch of which ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_burst.balance.costs import WHO, Costs, pairs_of
from megatron_burst.balance.grid import BatchGrid, check_sizes, checked_lengths
from megatron_burst.balance.lanes import Lanes, filled, refine
from megatron_burst.balance.packing import starts_in_order
from megatron_burst.balance.slots import SizeClass, Units, lay_out
from megatron_burst.errors import require


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Documents that consecutive ranks of a context-parallel group run together."""

    documents: tuple[int, ...]  # indices into the lengths, the longest first
    ranks: range  # of the context-parallel group
    tokens: int  # without padding
    area: int  # (query, key) pairs
    seconds: float  # predicted, forward and backward, of a pipeline stage

    @property
    def cp(self) -> int:
        """The context-parallel size."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A step: all documents of its batch, each once."""

    # by data-parallel rank, then in the order in which they run: the sub-groups of the
    # context-parallel group, which all have one size
    micro_batches: tuple[tuple[tuple[MicroBatch, ...], ...], ...]
    seconds: float  # predicted, of the step without gradients and optimizer
    bound: float  # the same, if all work could be spread perfectly at the best allowed sizes
    longest: float  # of the step of a rank that has little besides the longest document

    @property
    def efficiency(self) -> float:
        """The bound over the predicted step."""
        return self.bound / self.seconds

    def of_rank(self, dp_rank: int, cp_rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one rank, in order."""
        slots = self.micro_batches[dp_rank]
        return tuple(next(one for one in slot if cp_rank in one.ranks) for slot in slots)


def assign(
    lengths: Sequence[int] | np.ndarray,
    grid: BatchGrid,
    costs: Costs,
    cp_sizes: Sequence[int] | None = None,
) -> Assignment:
    """Assign documents so that ranks, and in a pipeline micro-batches, take equally long.

    Equal on all ranks that pass equal arguments: nothing is random, and nothing is sent. Never
    slower, as predicted, than the documents packed in the given order, where that fills the grid.

    Args:
        lengths: tokens of each document of a global batch, with the padding that sharding needs.
        grid: ranks, micro-batches and the token limit.
        costs: seconds of a micro-batch.
        cp_sizes: context-parallel sizes that a micro-batch may have (all: `grid.cp_sizes`); by
            default only the group's own. Never slower, as predicted, than that.

    Raises:
        BurstError: if a size, a length or the grid is refused, or documents do not fit.
    """
    sizes = tuple(cp_sizes or (grid.cp,))
    check_sizes(grid, sizes)
    given = checked_lengths(lengths, grid)
    order = np.argsort(-given, kind="stable")
    long_first = given[order]
    area = pairs_of(long_first)
    seconds = {
        cp: costs.per_token(cp) * long_first + costs.pair / cp * area for cp in sorted(set(sizes))
    }
    units = Units(long_first, seconds, costs.fixed)
    drafts = [_in_order(given, order, units, grid)]
    # in a pipeline narrow sizes may leave too few documents that make micro-batches alike
    for least in sorted({*(seconds if grid.pp > 1 else [min(seconds)]), grid.cp}):
        some = {cp: each for cp, each in seconds.items() if cp >= least}
        drafts.append(_draft(replace(units, seconds=some), grid))
    fits = [one for one in drafts if one is not None]
    require(WHO, [(
        fits,
        f"documents must fit whole into {grid.slots} micro-batches of {grid.token_limit * grid.cp} "
        "tokens, because all are in the same step",
        f"{len(given)} documents of {given.sum()} tokens, which were not found to fit",
        "have more micro-batches in a step, or raise the token limit",
    )])  # fmt: skip
    found = min(fits, key=lambda one: one.step)
    return _assignment(found, order, units, area, grid)


@dataclass(frozen=True)
class _Draft:
    """An assignment as arrays.

    Attributes:
        bin_of: the bin of each document, the longest first.
        ranks, cps, at: of each bin, its data-parallel rank, size, and place in the group.
        seconds: of each bin.
        step: predicted.
    """

    bin_of: np.ndarray
    ranks: np.ndarray
    cps: np.ndarray
    at: np.ndarray
    seconds: np.ndarray
    step: float


def _draft(units: Units, grid: BatchGrid) -> _Draft | None:
    """The documents at the sizes that `units` has; None if they do not fit."""
    classes = lay_out(units, grid)
    if classes is None:
        return None
    bins, parts, first, behind = [], [], 0, np.zeros(grid.dp)
    for one in classes:
        found = _fill(one, units, grid, behind)
        if found is None:
            return None
        groups = grid.cp // one.cp
        at = np.tile(np.arange(groups), len(one.ranks))
        bins.append((np.repeat(one.ranks, groups), np.full(len(at), one.cp), at))
        if grid.pp == 1:
            lanes = np.zeros((grid.dp, groups))
            where = bins[-1][0][found], at[found]
            np.add.at(lanes, where, units.seconds[one.cp][one.documents.start :][: len(found)])
            taken = lanes.max(axis=1)
            behind += taken.mean() - taken
        parts.append(found + first)
        first += len(at)
    ranks, cps, at = map(np.concatenate, zip(*bins, strict=True))
    return _timed(np.concatenate(parts), ranks, cps, at, units, grid)


def _fill(one: SizeClass, units: Units, grid: BatchGrid, behind: np.ndarray) -> np.ndarray | None:
    """The bins of a size's documents, numbered slot by slot; `behind`: seconds that each rank has
    less of wider sizes than the mean."""
    groups = grid.cp // one.cp
    some = slice(one.documents.start, one.documents.stop)
    lengths, seconds = units.lengths[some], units.seconds[one.cp][some]
    at, ranks = np.tile(np.arange(groups), len(one.ranks)), np.repeat(one.ranks, groups)
    more = behind[one.ranks] / np.bincount(one.ranks, minlength=grid.dp)[one.ranks]
    lane_of, targets = np.arange(len(at)), np.repeat(one.targets + more, groups)
    if grid.pp == 1 and (grid.ep == 1 or groups == 1) and grid.ep <= grid.cp:
        _, lane_of = np.unique(ranks * groups + at, return_inverse=True)
        targets = np.bincount(lane_of, targets)
    lanes = Lanes(lane_of, targets, grid.token_limit * one.cp)
    found = filled(lengths, seconds, lanes, (np.arange(one.alone) * groups).tolist())
    if found is None:  # by tokens alone more fit
        alike = replace(lanes, targets=np.zeros(len(targets)))
        found = filled(lengths, lengths.astype(float), alike, [])
    if found is not None:
        refine(lengths, seconds, lanes, found)
    return found


def _in_order(given: np.ndarray, order: np.ndarray, units: Units, grid: BatchGrid) -> _Draft | None:
    """Documents packed as they come, each micro-batch until the next does not fit, for rank after
    rank; None if that takes more or fewer micro-batches than there are."""
    starts = starts_in_order(given, grid.token_limit * grid.cp, grid.slots)
    if len(starts) != grid.slots:
        return None
    bin_of = np.searchsorted(starts, np.arange(len(given)), "right") - 1
    ranks, zeros = np.arange(grid.slots) % grid.dp, np.zeros(grid.slots, dtype=int)
    return _timed(bin_of[order], ranks, zeros + grid.cp, zeros, units, grid)


def _timed(
    bin_of: np.ndarray,
    ranks: np.ndarray,
    cps: np.ndarray,
    at: np.ndarray,
    units: Units,
    grid: BatchGrid,
) -> _Draft:
    """A draft with its predicted step."""
    each = np.zeros(len(bin_of))
    for cp, seconds in units.seconds.items():
        here = cps[bin_of] == cp
        each[here] = seconds[here]
    found = np.bincount(bin_of, each, len(ranks)) + units.fixed
    step = _step_in_step(found, ranks, cps, grid) if grid.in_step else _step(found, ranks, cps, at)
    return _Draft(bin_of, ranks, cps, at, found, step)


def _step(seconds: np.ndarray, ranks: np.ndarray, cps: np.ndarray, at: np.ndarray) -> float:
    """Sub-groups of one size run through their micro-batches, and wait before the next size."""
    total = np.zeros(ranks.max() + 1)
    for cp in np.unique(cps):
        lanes = np.zeros((len(total), at.max() + 1))
        here = cps == cp
        np.add.at(lanes, (ranks[here], at[here]), seconds[here])
        total += lanes.max(axis=1)
    return float(total.max())


def _step_in_step(
    seconds: np.ndarray, ranks: np.ndarray, cps: np.ndarray, grid: BatchGrid
) -> float:
    """Ranks wait for each other in every micro-batch; the pipeline fills and empties at the pace
    of the slowest: sum + (PP - 1) x largest, as in a flow shop whose stages are alike."""
    slots = _slots_of(ranks, cps, grid)
    times = np.zeros(grid.slots)
    np.maximum.at(times, slots, seconds)
    together = max(1, grid.ep // grid.cp)  # data-parallel ranks that share experts
    by_rank = times.reshape(-1, together, grid.micro_batches).max(axis=1)
    return float((by_rank.sum(axis=1) + (grid.pp - 1) * by_rank.max(axis=1)).max())


def _slots_of(ranks: np.ndarray, cps: np.ndarray, grid: BatchGrid) -> np.ndarray:
    """Slot of each bin: rank after rank, in each the narrow sizes first."""
    within = np.lexsort((np.arange(len(ranks)), cps, ranks))
    share = np.cumsum(cps[within]) - cps[within]  # ranks of the slots before, all of one rank's
    slots = np.zeros(len(ranks), dtype=int)
    slots[within] = share // grid.cp
    return slots


def _assignment(
    draft: _Draft, order: np.ndarray, units: Units, area: np.ndarray, grid: BatchGrid
) -> Assignment:
    by_bin = np.argsort(draft.bin_of, kind="stable")
    count = len(draft.ranks)
    edges = np.searchsorted(draft.bin_of[by_bin], np.arange(count + 1)).tolist()
    documents = order[by_bin].tolist()
    tokens = np.bincount(draft.bin_of, units.lengths, count).astype(np.int64).tolist()
    areas = np.zeros(count, dtype=np.int64)
    np.add.at(areas, draft.bin_of, area)
    slots: list[list[MicroBatch]] = [[] for _ in range(grid.slots)]
    columns = (_slots_of(draft.ranks, draft.cps, grid), draft.cps, draft.at, areas, draft.seconds)
    for bin_, (slot, cp, at, pairs, seconds) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        some = tuple(documents[edges[bin_] : edges[bin_ + 1]])
        ranks = range(at * cp, (at + 1) * cp)
        slots[slot].append(MicroBatch(some, ranks, tokens[bin_], pairs, seconds))
    every, m = tuple(map(tuple, slots)), grid.micro_batches
    by_rank = tuple(every[rank * m : (rank + 1) * m] for rank in range(grid.dp))
    least = units.least(grid)
    bound = (units.fixed + float(least.sum()) / grid.slots) * (m + grid.pp - 1)
    longest = min(float(each[0]) for cp, each in units.seconds.items()
                  if units.lengths[0] <= grid.token_limit * cp)  # fmt: skip
    alone = units.fixed * (m - 1) + (units.fixed + longest) * grid.pp
    return Assignment(by_rank, draft.step, bound, alone)
