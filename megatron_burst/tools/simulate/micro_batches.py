"""When each rank runs which micro-batch of a packed job; transfers between stages take no time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_burst.balance import BatchGrid, Costs, MicroBatch, pairs_of
from megatron_burst.balance.packing import Packs

# by data-parallel rank, then in order: the sub-groups of the context-parallel group
MicroBatches = Sequence[Sequence[Sequence[MicroBatch]]]
Pass = Literal["forward", "backward", "both"]
_FORWARD = 1 / 3  # of a micro-batch's seconds


@dataclass(frozen=True, slots=True)
class Ran:
    """A micro-batch, or one pass of it, on the ranks of a stage."""

    dp_rank: int
    stage: int  # of the pipeline
    ranks: range  # of the context-parallel group
    number: int  # of the micro-batch on its data-parallel rank
    what: Pass
    start: float  # seconds
    stop: float


@dataclass(frozen=True, slots=True)
class Step:
    """All micro-batches of a step, without gradients and optimizer."""

    ran: tuple[Ran, ...]
    waiting: float  # share of all ranks' time in which they run none

    @property
    def seconds(self) -> float:
        """When the last one ends."""
        return max(one.stop for one in self.ran)


def step_of(micro_batches: MicroBatches, grid: BatchGrid) -> Step:
    """Simulate a step: 1F1B, not interleaved, if there is a pipeline; else sub-groups run through
    their micro-batches, and wait for each other before the context-parallel size changes.

    Data-parallel ranks that share experts wait for each other in every micro-batch.
    """
    together = max(1, grid.ep // grid.cp)
    runs: list[Ran] = []
    for first in range(0, grid.dp, together):
        some = dict(enumerate(micro_batches[first : first + together], first))
        runs += _in_pipeline(some, grid) if grid.pp > 1 else _in_lanes(some, grid)
    every = [one for rank in micro_batches for slot in rank for one in slot]
    busy = sum(one.seconds * one.cp for one in every)
    end = max(one.stop for one in runs)
    return Step(tuple(runs), max(0.0, 1 - busy / (grid.dp * grid.cp * end)))


def in_turn(
    packs: Packs, lengths: Sequence[int] | np.ndarray, grid: BatchGrid, costs: Costs
) -> MicroBatches:
    """Micro-batches of all CP ranks, each to the next DP rank, as Megatron's sampler does."""
    tokens_of = np.asarray(lengths)
    micro_batches: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(grid.dp)]
    for number, pack in enumerate(packs):
        one = micro_batch_of(pack, range(grid.cp), tokens_of, costs)
        micro_batches[number % grid.dp].append((one,))
    return micro_batches


def micro_batch_of(pack: list[int], ranks: range, lengths: np.ndarray, costs: Costs) -> MicroBatch:
    """The documents that these ranks share, and what they take."""
    some = lengths[pack]
    tokens, area = int(some.sum()), int(pairs_of(some).sum())
    return MicroBatch(tuple(pack), ranks, tokens, area, costs.seconds(tokens, area, len(ranks)))


def _in_lanes(some: dict[int, Sequence[Sequence[MicroBatch]]], grid: BatchGrid) -> Iterator[Ran]:
    """Data-parallel ranks that wait for each other, without a pipeline."""
    clocks = {rank: np.zeros(grid.cp) for rank in some}
    size = grid.cp
    for number in range(max(map(len, some.values()))):
        slots = {rank: slots[number] for rank, slots in some.items() if number < len(slots)}
        cp = max(one.cp for slot in slots.values() for one in slot)
        if grid.ep > 1 or cp != size:
            last = max(float(clock.max()) for clock in clocks.values())
            clocks = {rank: np.full(grid.cp, last) for rank in some}
        size = cp
        for rank, slot in slots.items():
            for one in slot:
                start = float(clocks[rank][one.ranks.start])
                stop = start + one.seconds
                clocks[rank][one.ranks.start : one.ranks.stop] = stop
                yield Ran(rank, 0, one.ranks, number, "both", start, stop)


def _in_pipeline(some: dict[int, Sequence[Sequence[MicroBatch]]], grid: BatchGrid) -> Iterator[Ran]:
    """Data-parallel ranks that wait for each other, all their stages."""
    most = max(map(len, some.values()))
    times = [
        max(one.seconds for slots in some.values() if number < len(slots) for one in slots[number])
        for number in range(most)
    ]
    for stage, number, what, start, stop in one_f_one_b(times, grid.pp):
        share = (stop - start) / times[number]
        for rank, slots in some.items():
            for one in slots[number] if number < len(slots) else ():
                end = start + share * one.seconds
                yield Ran(rank, stage, one.ranks, number, what, start, end)


def one_f_one_b(times: Sequence[float], pp: int) -> list[tuple[int, int, Pass, float, float]]:
    """Stage, micro-batch, pass, start and stop of all that a pipeline runs; `times`: seconds of
    each micro-batch on a stage."""
    orders = [list(_order(stage, len(times), pp)) for stage in range(pp)]
    ends: dict[tuple[Pass, int, int], float] = {}
    clocks, at, runs = [0.0] * pp, [0] * pp, []
    while any(at[stage] < 2 * len(times) for stage in range(pp)):
        for stage in range(pp):
            while at[stage] < 2 * len(times):
                what, number = orders[stage][at[stage]]
                edge = stage == (0 if what == "forward" else pp - 1)
                before = (what, number, stage - 1 if what == "forward" else stage + 1)
                if not edge and before not in ends:
                    break
                start = max(clocks[stage], 0.0 if edge else ends[before])
                share = _FORWARD if what == "forward" else 1 - _FORWARD
                stop = start + times[number] * share
                clocks[stage] = ends[what, number, stage] = stop
                runs.append((stage, number, what, start, stop))
                at[stage] += 1
    return runs


def _order(stage: int, count: int, pp: int) -> Iterable[tuple[Pass, int]]:
    """Passes of a stage: forwards that fill the pipeline, then one of each, then the rest."""
    ahead = min(pp - stage - 1, count)
    yield from (("forward", number) for number in range(ahead))
    for number in range(count - ahead):
        yield "forward", ahead + number
        yield "backward", number
    yield from (("backward", number) for number in range(count - ahead, count))
