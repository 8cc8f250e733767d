"""Coefficients of a micro-batch's seconds, fitted to micro-batches that the planner simulates."""

from dataclasses import replace

from megatron_burst.balance.costs import Costs, Measured, fit
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.step import stage_parts
from megatron_burst.tools.job.strategy import Job, Strategy, least_multiple
from megatron_burst.tools.simulate.sample import Packing, Sample

_DOCUMENTS = 1, 4, 16, 64  # of a micro-batch, all of one length
_PARTS = 1, 4  # of the job's tokens: whole micro-batches and small ones
_LEAST = 4  # times the shortest document that every rank has a part of


def micro_batch_seconds(job: Job, strategy: Strategy, lengths: tuple[int, ...]) -> float:
    """Seconds of a micro-batch of whole documents, each sharded individually (THD), on the slowest
    pipeline stage."""
    sample = Sample.of(lengths).padded(least_multiple(strategy))
    packed = replace(job, seq=sample.tokens, packing=Packing(Layout.DOCUMENTS, sample))
    parts, _ = stage_parts(packed, strategy)
    return sum(parts.values())


def costs_of(job: Job, strategy: Strategy) -> Costs | None:
    """Coefficients for a strategy and for sub-groups of its context-parallel ranks; None if
    sequences are too short to tell them apart.

    A rank has as many tokens at every size, up to the job's sequence over the strategy's CP.
    """
    if job.seq < _LEAST * least_multiple(strategy):
        return None
    measured = []
    sizes = [1 << n for n in range(strategy.cp.bit_length()) if strategy.cp % (1 << n) == 0]
    for size in sorted({*sizes, strategy.cp}):
        narrow = replace(strategy, cp=size)
        step = least_multiple(narrow)
        for part in _PARTS:
            for count in _DOCUMENTS:
                length = max(step, job.seq * size // strategy.cp // part // count // step * step)
                seconds = micro_batch_seconds(job, narrow, (length,) * count)
                area = count * length * (length + 1) // 2
                measured.append(Measured(count * length, area, size, seconds))
    return fit(measured)
