"""Which document of a global batch goes to which micro-batch of which ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from megatron_burst.balance import grid as grids
from megatron_burst.balance.costs import WHO, Costs, pairs_of
from megatron_burst.balance.drafts import Draft, draft_in_order, draft_of
from megatron_burst.balance.grid import BatchGrid, enough_documents, room_for
from megatron_burst.balance.pipeline import alike
from megatron_burst.balance.slots import SlotLayout, Units, patterned
from megatron_burst.errors import BurstError, require
from megatron_burst.integers import integer

_ALIKE = 1e-3  # of a step: layouts that are to gain no more are not filled


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
        ranks = len(self.micro_batches), self.micro_batches[0][0][-1].ranks.stop
        dp_rank = integer(WHO, "dp_rank", dp_rank, 0, ranks[0] - 1, "it is a rank of the grid")
        cp_rank = integer(WHO, "cp_rank", cp_rank, 0, ranks[1] - 1, "it is a rank of the grid")
        slots = self.micro_batches[dp_rank]
        return tuple(next(part for part in slot if cp_rank in part.ranks) for slot in slots)


def assign(lengths: Sequence[int] | np.ndarray, grid: BatchGrid, costs: Costs,
           cp_sizes: Sequence[int] | None = None) -> Assignment:  # fmt: skip
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
    sizes = grids.check_sizes(grid, costs, cp_sizes)
    tokens = grids.check_documents(lengths, grid)
    require(WHO, (enough_documents(tokens.size, grid), room_for(int(tokens.sum()), grid)))
    if fastest := _fastest(tokens, grid, costs, sizes):
        return fastest
    raise BurstError(
        f"{WHO}: documents must fit into {grid.slots} micro-batches of "
        f"{grid.token_limit * grid.cp} tokens without being cut, because one step trains on all of "
        f"them; got {len(tokens)} documents with {tokens.sum()} tokens, for which no assignment "
        "was found; use more micro-batches in a step, or raise the token limit"
    )


def assign_fewest(
    lengths: Sequence[int] | np.ndarray, grid: BatchGrid, costs: Costs, multiple: int = 1
) -> Assignment:
    """Assign documents to as few micro-batches as they were found to fit into, at the group's
    size: for frameworks that count the micro-batches of a step by its tokens.

    Args:
        lengths: as for `assign`.
        grid: as for `assign`; each data-parallel rank has at least its `micro_batches`.
        costs: seconds of a micro-batch.
        multiple: divides the number of a rank's micro-batches, as interleaved pipelines need.

    Raises:
        BurstError: if a length or the multiple is refused, or documents do not fit however many
            micro-batches there are.
    """
    grids.check_sizes(grid, costs, None)
    tokens = grids.check_documents(lengths, grid)
    why = "an interleaved pipeline runs so many micro-batches at a time"
    multiple = integer(WHO, "multiple", multiple, 1, why=why)
    fewest = ceil(int(tokens.sum()) / (grid.token_limit * grid.cp * grid.dp))
    count = ceil(max(grid.micro_batches, fewest) / multiple) * multiple
    # more would leave some empty
    while (count + multiple) * grid.dp <= len(tokens):
        if fastest := _fastest(tokens, replace(grid, micro_batches=count), costs, (grid.cp,)):
            return fastest
        count += multiple
    return assign(tokens, replace(grid, micro_batches=count), costs)


def _fastest(
    tokens: np.ndarray, grid: BatchGrid, costs: Costs, sizes: Sequence[int]
) -> Assignment | None:
    """The fastest assignment, as predicted; None if the documents were not found to fit."""
    order = np.argsort(-tokens, kind="stable")
    long_first = tokens[order]
    area = pairs_of(long_first)
    seconds = {
        cp: costs.per_token(cp) * long_first + costs.pair / cp * area for cp in sorted(set(sizes))
    }
    units = Units(long_first, seconds, costs.fixed)
    drafts = [draft_in_order(tokens, order, units, grid), *_drafts(units, grid)]
    best = min(filter(None, drafts), key=lambda draft: draft.step, default=None)
    return None if best is None else _assignment(best, order, units, area, grid)


def _drafts(units: Units, grid: BatchGrid) -> Iterator[Draft]:
    """Drafts at the group's own size, and at changing ones, as far as they may be faster."""
    own = replace(units, seconds={grid.cp: units.seconds[grid.cp]})
    best = inf
    fixed = (alike(own, grid) if grid.pp > 1 else None) or patterned(own, grid)
    for layout in [fixed, *_changing(units, grid)]:
        if layout is None or layout.expected >= (1 - _ALIKE) * best:
            continue
        if draft := draft_of(layout.classes, units, grid):
            yield draft
            best = min(best, draft.step)


def _changing(units: Units, grid: BatchGrid) -> list[SlotLayout]:
    """Layouts of several sizes, the one with the shortest step first.

    In a pipeline narrow sizes may leave too few documents that make micro-batches alike, so the
    narrowest size is tried too.
    """
    lay_out, sizes = (alike if grid.pp > 1 else patterned), sorted(units.seconds)[:-1]
    layouts = []
    for least in sizes if grid.pp > 1 else sizes[:1]:
        wider = {cp: seconds for cp, seconds in units.seconds.items() if cp >= least}
        layouts.append(lay_out(replace(units, seconds=wider), grid))
    return sorted(filter(None, layouts), key=lambda layout: layout.expected)


def _assignment(
    draft: Draft, order: np.ndarray, units: Units, area: np.ndarray, grid: BatchGrid
) -> Assignment:
    by_bin = np.argsort(draft.bin_of, kind="stable")
    bins, many = draft.bins, len(draft.seconds)
    edges = np.searchsorted(draft.bin_of[by_bin], np.arange(many + 1)).tolist()
    documents = order[by_bin].tolist()
    tokens = np.bincount(draft.bin_of, units.lengths, many).astype(np.int64).tolist()
    areas = np.zeros(many, dtype=np.int64)
    np.add.at(areas, draft.bin_of, area)
    slots: list[list[MicroBatch]] = [[] for _ in range(grid.slots)]
    columns = (bins.slots(grid), bins.cps, bins.at, areas, draft.seconds)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for bin_, (slot, cp, at, pairs, seconds) in enumerate(rows):
        members, ranks = documents[edges[bin_] : edges[bin_ + 1]], range(at * cp, (at + 1) * cp)
        slots[slot].append(MicroBatch(tuple(members), ranks, tokens[bin_], pairs, seconds))
    batches, m = tuple(map(tuple, slots)), grid.micro_batches
    by_rank = tuple(batches[rank * m : (rank + 1) * m] for rank in range(grid.dp))
    least = units.least(grid)
    bound = (units.fixed + float(least.sum()) / grid.slots) * (m + grid.pp - 1)
    longest = min(float(seconds[0]) for cp, seconds in units.seconds.items()
                  if units.lengths[0] <= grid.token_limit * cp)  # fmt: skip
    alone = units.fixed * (m - 1) + (units.fixed + longest) * grid.pp
    return Assignment(by_rank, draft.step, bound, alone)
