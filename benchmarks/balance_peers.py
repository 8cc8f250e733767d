"""Other rules for which document goes where, and the time of a step of any: for comparison only.

A rule says, by data-parallel rank and micro-batch, which documents run at which context-parallel
size on which of its ranks.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_burst.balance import BatchGrid, Costs, pairs_of

# documents of each micro-batch, in the order of the micro-batches
Packs = list[list[int]]


def sequential(lengths: Sequence[int], limit: int) -> Packs:
    """Documents as they come, until the next one does not fit: what packed datasets do."""
    packs: Packs = [[]]
    room = limit
    for document, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = limit
        packs[-1].append(document)
        room -= length
    return packs


def best_fit(lengths: Sequence[int], limit: int, seed: int) -> Packs:
    """Best-fit decreasing (Ding et al., 2404.10830): the longest first, each where it leaves the
    least room. The packs are shuffled, as packed datasets are."""
    packs: Packs = []
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    for document in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        at = bisect_left(rooms, (lengths[document], -1))
        if at == len(rooms):
            packs.append([])
            room, pack = limit, len(packs) - 1
        else:
            room, pack = rooms.pop(at)
        packs[pack].append(document)
        insort(rooms, (room - lengths[document], pack))
    np.random.default_rng(seed).shuffle(packs)
    return packs


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


def packs_seconds(
    packs: Packs, lengths: Sequence[int], grid: BatchGrid, costs: Costs
) -> list[list[float]]:
    """Seconds by rank and micro-batch, at the full context-parallel size; Megatron's sampler gives
    micro-batches to the data-parallel ranks in turn."""
    times: list[list[float]] = [[] for _ in range(grid.dp)]
    for number, pack in enumerate(packs):
        some = np.array([lengths[document] for document in pack])
        seconds = costs.seconds(int(some.sum()), int(pairs_of(some).sum()), grid.cp)
        times[number % grid.dp].append(seconds)
    return times


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


def one_f_one_b(times: Sequence[float], pp: int) -> float:
    """Seconds of a rank's pipeline (1F1B, not interleaved), with a third of a micro-batch's time in
    forward; stages are alike and transfers take no time."""
    count, done = len(times), {}
    orders = []
    for stage in range(pp):
        ahead = min(pp - stage - 1, count)
        order = [("f", m) for m in range(ahead)]
        for m in range(count - ahead):
            order += [("f", ahead + m), ("b", m)]
        orders.append(order + [("b", m) for m in range(count - ahead, count)])
    clocks, at = [0.0] * pp, [0] * pp
    while any(at[stage] < 2 * count for stage in range(pp)):
        for stage in range(pp):
            while at[stage] < 2 * count:
                kind, m = orders[stage][at[stage]]
                edge = stage == (0 if kind == "f" else pp - 1)
                before = ("f", m, stage - 1) if kind == "f" else ("b", m, stage + 1)
                if not edge and before not in done:
                    break
                ready = 0.0 if edge else done[before]
                seconds = times[m] * (1 if kind == "f" else 2) / 3
                clocks[stage] = done[kind, m, stage] = max(clocks[stage], ready) + seconds
                at[stage] += 1
    return max(clocks)


def step_seconds(times: Sequence[Sequence[float]], grid: BatchGrid) -> float:
    """Seconds of a step: the slowest rank's. Ranks that share experts wait for each other in every
    micro-batch."""
    together = max(1, grid.ep // grid.cp)
    most = max(map(len, times))
    table = np.array([[*one, *[0.0] * (most - len(one))] for one in times])
    table = table.reshape(-1, together, most).max(axis=1)
    return max(one_f_one_b(one, grid.pp) for one in table.tolist())


def fills(lengths: Sequence[int], limit: int, packs: int) -> int:
    """How many documents, from the first on, fill so many packs in sequence."""
    found = sequential(lengths, limit)
    return list(accumulate(map(len, found)))[packs - 1]
