"""Drafts of an assignment: documents in bins, with the step that they are predicted to take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_burst.balance.grid import BatchGrid
from megatron_burst.balance.lanes import Lanes, filled, refine
from megatron_burst.balance.packing import starts_in_order
from megatron_burst.balance.slots import SizeClass, Units


@dataclass(frozen=True)
class Bins:
    """What documents go into: a sub-group's part of a slot."""

    ranks: np.ndarray  # data-parallel rank of each
    cps: np.ndarray  # its context-parallel size
    at: np.ndarray  # its place among the sub-groups

    @classmethod
    def of(cls, classes: Sequence[SizeClass], grid: BatchGrid) -> "Bins":
        """Those of a layout, slot after slot."""
        parts = []
        for size in classes:
            groups, slots = grid.cp // size.cp, len(size.ranks)
            ranks, places = np.repeat(size.ranks, groups), np.tile(np.arange(groups), slots)
            parts.append((ranks, np.full(slots * groups, size.cp), places))
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def slots(self, grid: BatchGrid) -> np.ndarray:
        """Slot of each bin: rank after rank, in each the narrow sizes first."""
        within = np.lexsort((np.arange(len(self.ranks)), self.cps, self.ranks))
        cps = self.cps[within]
        slots = np.zeros(len(cps), dtype=int)
        slots[within] = (np.cumsum(cps) - cps) // grid.cp  # by ranks of the bins before
        return slots


@dataclass(frozen=True)
class Draft:
    """An assignment as arrays."""

    bin_of: np.ndarray  # the bin of each document, the longest first
    bins: Bins  # which there are
    seconds: np.ndarray  # of each bin
    step: float  # predicted


def draft_in_order(
    lengths: np.ndarray, order: np.ndarray, units: Units, grid: BatchGrid
) -> Draft | None:
    """Documents packed as they come, each micro-batch until the next does not fit, for rank after
    rank; None if that takes more or fewer micro-batches than there are."""
    starts = starts_in_order(lengths, grid.token_limit * grid.cp, grid.slots)
    if len(starts) != grid.slots:
        return None
    bin_of = np.searchsorted(starts, np.arange(len(lengths)), "right") - 1
    ranks, zeros = np.arange(grid.slots) % grid.dp, np.zeros(grid.slots, dtype=int)
    return _timed(bin_of[order], Bins(ranks, zeros + grid.cp, zeros), units, grid)


def draft_of(classes: Sequence[SizeClass], units: Units, grid: BatchGrid) -> Draft | None:
    """Documents in the micro-batches of a layout; None if they do not fit."""
    fill = _alike if grid.pp > 1 else _by_size
    bin_of = fill(classes, units, grid)
    return None if bin_of is None else _timed(bin_of, Bins.of(classes, grid), units, grid)


def _by_size(classes: Sequence[SizeClass], units: Units, grid: BatchGrid) -> np.ndarray | None:
    """The bin of each document; ranks that have less of the wider sizes get more of the next."""
    parts, first, lag_s = [], 0, np.zeros(grid.dp)
    for size in classes:
        bins = _fill(size, units, grid, lag_s)
        if bins is None:
            return None
        groups = grid.cp // size.cp
        lanes = np.zeros((grid.dp, groups))
        seconds = units.seconds[size.cp][size.documents.start : size.documents.stop]
        np.add.at(lanes, (size.ranks[bins // groups], bins % groups), seconds)
        busy_s = lanes.max(axis=1)
        lag_s += busy_s.mean() - busy_s
        parts.append(bins + first)
        first += len(size.ranks) * groups
    return np.concatenate(parts)


def _fill(size: SizeClass, units: Units, grid: BatchGrid, lag_s: np.ndarray) -> np.ndarray | None:
    """The bins of a size's documents, numbered slot by slot; `lag_s`: seconds that each rank has
    less of wider sizes than the mean."""
    groups, members = grid.cp // size.cp, slice(size.documents.start, size.documents.stop)
    lengths, seconds = units.lengths[members], units.seconds[size.cp][members]
    at, ranks = np.tile(np.arange(groups), len(size.ranks)), np.repeat(size.ranks, groups)
    more = lag_s[size.ranks] / np.bincount(size.ranks, minlength=grid.dp)[size.ranks]
    lane_of, targets = np.arange(len(at)), np.repeat(size.targets + more, groups)
    if (grid.ep == 1 or groups == 1) and grid.ep <= grid.cp:
        _, lane_of = np.unique(ranks * groups + at, return_inverse=True)
        targets = np.bincount(lane_of, targets)
    lanes, stops = Lanes(lane_of, targets, grid.token_limit * size.cp), [len(lengths)]
    bins = filled(lengths, [seconds], [lanes], stops, [])
    if bins is None:  # by tokens alone more fit
        tokens, no_targets = lengths.astype(float), replace(lanes, targets=0 * targets)
        bins = filled(lengths, [tokens], [no_targets], stops, [])
    if bins is not None:
        refine(lengths, seconds, lanes, bins)
    return bins


def _alike(classes: Sequence[SizeClass], units: Units, grid: BatchGrid) -> np.ndarray | None:
    """The bin of each document; every bin is to take as long as its slot's target."""
    lanes, stops = [], [size.documents.stop for size in classes]
    for size in classes:
        targets = np.repeat(size.targets, grid.cp // size.cp)
        lanes.append(Lanes(np.arange(len(targets)), targets, grid.token_limit * size.cp))
    seconds = [units.seconds[size.cp] for size in classes]
    placed = [n * (grid.cp // classes[0].cp) for n in range(classes[0].alone)]
    bin_of = filled(units.lengths, seconds, lanes, stops, placed)
    if bin_of is None:  # by tokens alone more fit
        tokens = [units.lengths / size.cp for size in classes]
        no_targets = [replace(of_size, targets=0 * of_size.targets) for of_size in lanes]
        bin_of = filled(units.lengths, tokens, no_targets, stops, [])
    if bin_of is None:
        return None
    first = 0
    for of_size, costs in zip(lanes, seconds, strict=True):
        here = np.flatnonzero((bin_of >= first) & (bin_of < first + len(of_size.targets)))
        bins = bin_of[here] - first
        refine(units.lengths[here], costs[here], of_size, bins)
        bin_of[here] = bins + first
        first += len(of_size.targets)
    return bin_of


def _timed(bin_of: np.ndarray, bins: Bins, units: Units, grid: BatchGrid) -> Draft:
    """A draft with its predicted step."""
    of_document = np.zeros(len(bin_of))
    for cp, seconds in units.seconds.items():
        of_size = bins.cps[bin_of] == cp
        of_document[of_size] = seconds[of_size]
    of_bin = np.bincount(bin_of, of_document, len(bins.ranks)) + units.fixed
    step = _step_in_step(of_bin, bins, grid) if grid.in_step else _step(of_bin, bins)
    return Draft(bin_of, bins, of_bin, step)


def _step(seconds: np.ndarray, bins: Bins) -> float:
    """Sub-groups of one size run through their micro-batches, and wait before the next size."""
    total = np.zeros(bins.ranks.max() + 1)
    for cp in np.unique(bins.cps):
        lanes = np.zeros((len(total), bins.at.max() + 1))
        of_size = bins.cps == cp
        np.add.at(lanes, (bins.ranks[of_size], bins.at[of_size]), seconds[of_size])
        total += lanes.max(axis=1)
    return float(total.max())


def _step_in_step(seconds: np.ndarray, bins: Bins, grid: BatchGrid) -> float:
    """Ranks wait for each other in every micro-batch; the pipeline fills and empties at the pace
    of the slowest: sum + (PP - 1) x largest, as in a flow shop whose stages are alike."""
    times = np.zeros(grid.slots)
    np.maximum.at(times, bins.slots(grid), seconds)
    together = max(1, grid.ep // grid.cp)  # data-parallel ranks that share experts
    by_rank = times.reshape(-1, together, grid.micro_batches).max(axis=1)
    return float((by_rank.sum(axis=1) + (grid.pp - 1) * by_rank.max(axis=1)).max())
