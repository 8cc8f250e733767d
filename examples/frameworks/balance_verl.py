"""verl: micro-batches that end together, from the balance of megatron_burst.

    export BALANCE_COSTS=plan.json PYTHONPATH=examples/frameworks
    export VERL_USE_EXTERNAL_MODULES=balance_verl    # which `import verl` imports everywhere

verl chooses twice. The driver gives all ranks equally many sequences (`trainer.balance_batch`), and
each rank packs its own (`use_dynamic_bsz`). Both compare seconds here.
"""

import os
from collections.abc import Sequence
from heapq import heappop, heappush
from unittest import mock

import torch
from tensordict import TensorDict
from verl.utils import seqlen_balancing

from megatron_burst import balance
from megatron_burst.errors import BurstError

COSTS = balance.Costs.from_plan(os.environ["BALANCE_COSTS"])
PP = int(os.environ.get("BALANCE_PP", "1"))
rearrange_micro_batches = seqlen_balancing.rearrange_micro_batches
partitions_of = seqlen_balancing.get_seqlen_balanced_partitions


def calculate_workload(lengths: torch.Tensor) -> torch.Tensor:
    """Nanoseconds of sequences [n] on one rank; int64 [n]."""
    lengths = lengths.long()
    pairs = lengths * (lengths + 1) // 2
    return (1e9 * (COSTS.token * lengths.double() + COSTS.pair * pairs.double())).long()


def partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Equally many sequences for each rank: the longest first, to the rank with the least work."""
    if not equal_size:
        return partitions_of(seqlen_list, k_partitions, equal_size)
    work = [float(one) for one in seqlen_list]
    ranks = [(0.0, rank) for rank in range(k_partitions)]
    found: list[list[int]] = [[] for _ in ranks]
    for at in sorted(range(len(work)), key=lambda at: -work[at]):
        load, rank = heappop(ranks)
        found[rank].append(at)
        if len(found[rank]) < len(work) // k_partitions:
            heappush(ranks, (load + work[at], rank))
    return [sorted(one) for one in found]


def rearranged(batch: TensorDict, max_token_len: int, *others, **options) -> tuple:
    """A rank's micro-batches. verl tries more of them until the tokens of each fit; until then,
    and for groups that must stay together, its own rule is in place."""
    ids = batch["input_ids"]
    rows = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = rows.tolist()

    def packed(workloads: list[int], count: int, equal_size: bool) -> list[list[int]]:
        try:
            grid = balance.BatchGrid(1, 1, count, max_token_len, PP)
            (slots,) = balance.assign(lengths, grid, COSTS).micro_batches
        except BurstError:
            return partitions_of(workloads, count, equal_size)
        return [sorted(one.documents) for (one,) in slots]

    if options.get("force_group_size", 1) > 1:
        return rearrange_micro_batches(batch, max_token_len, *others, **options)
    with mock.patch.object(seqlen_balancing, "get_seqlen_balanced_partitions", packed):
        return rearrange_micro_batches(batch, max_token_len, *others, **options)


seqlen_balancing.calculate_workload = calculate_workload
seqlen_balancing.get_seqlen_balanced_partitions = partitions
seqlen_balancing.rearrange_micro_batches = rearranged
