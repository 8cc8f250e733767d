"""Other projects' rules for which document goes where: for comparison only."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_burst.balance import BatchGrid, Costs, pairs_of
from megatron_burst.balance.packing import Packs, sequential


def wlb(lengths: Sequence[int], grid: BatchGrid, costs: Costs) -> Packs:
    """WLB-LLM's packing of variable length (2503.17924, algorithm 1): the longest first to the
    micro-batch with the least work, or, if it does not fit there, with the fewest tokens.

    Its queue, which delays long documents to later steps, is left out: the batch stays whole.
    """
    packs: Packs = [[] for _ in range(grid.slots)]
    work, tokens = np.zeros(grid.slots), np.zeros(grid.slots, dtype=np.int64)
    limit = grid.token_limit * grid.cp
    for document in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[document]
        pack = int(work.argmin())
        if tokens[pack] + length > limit:
            pack = int(tokens.argmin())
        if tokens[pack] + length > limit:
            return []
        packs[pack].append(document)
        tokens[pack] += length
        area = int(pairs_of(np.int64(length)))
        work[pack] += costs.seconds(length, area, grid.cp) - costs.fixed
    return packs


def dynamic_cp(lengths: Sequence[int], grid: BatchGrid, costs: Costs) -> float:
    """Seconds of a step with Megatron-Core's own scheduler of `--hybrid-context-parallel`.

    It has groups of samples, after each of which all ranks of DP x CP wait for each other. Samples
    of a rank run one after the other; a group's fixed time counts once, as if they were packed.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        def size(self) -> int:
            return grid.dp * grid.cp

    scheduler = BalancedCPScheduler(grid.token_limit, Ranks())
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    seen: list[int] = []
    step = 0.0
    for group in groups:
        ranks_of: dict[int, int] = {}
        for documents in group:
            for document in documents:
                ranks_of[document] = ranks_of.get(document, 0) + 1
        seen += ranks_of
        slowest = 0.0
        for documents in group:
            seconds = sum(
                costs.seconds(lengths[d], int(pairs_of(np.int64(lengths[d]))), ranks_of[d])
                - costs.fixed
                for d in documents
            )
            slowest = max(slowest, costs.fixed + seconds)
        step += slowest
    assert sorted(seen) == list(range(len(lengths)))
    return step


def fills(lengths: Sequence[int], limit: int, packs: int) -> int:
    """How many documents, from the first on, fill so many packs in sequence."""
    found = sequential(lengths, limit)
    return list(accumulate(map(len, found)))[packs - 1]
