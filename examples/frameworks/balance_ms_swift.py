"""ms-swift: micro-batches that end together, from the balance of megatron_burst.

    export BALANCE_COSTS=plan.json BALANCE_TOKENS=16384    # that a GPU has memory for
    megatron sft --external_plugins burst.py examples/frameworks/balance_ms_swift.py \
        --padding_free true --packing false --micro_batch_size 4 --global_batch_size 256 ...

Packs documents themselves, instead of packs of equal tokens: --micro_batch_size is the mean number
of documents in a micro-batch, --global_batch_size that of a step.
"""

import os
from collections.abc import Iterator
from typing import Any

from swift.megatron.trainers import base

from megatron_burst import balance

COSTS = balance.Costs.from_plan(os.environ["BALANCE_COSTS"])
TOKENS = int(os.environ["BALANCE_TOKENS"])


class BalancedSampler:
    """This data-parallel rank's micro-batches of an epoch, as lists of documents."""

    def __init__(
        self, dataset: Any, args: Any, given: base.MegatronPretrainingRandomSampler
    ) -> None:
        """`given`: ms-swift's sampler, with ranks, seed and what was consumed."""
        step = args.global_batch_size
        grid = balance.BatchGrid(
            given.data_parallel_size, args.context_parallel_size, args.num_microbatches, TOKENS,
            args.pipeline_model_parallel_size, args.expert_model_parallel_size,
        )  # fmt: skip
        lengths = [max(one) if isinstance(one, list) else one for one in dataset["lengths"]]
        self._rank, self._steps = given.data_parallel_rank, len(lengths) // step
        self._sampler = balance.Sampler(
            lengths, grid, COSTS, step,
            seed=given.seed if given.shuffle else None, consumed=given.consumed_samples,
        )  # fmt: skip

    def __iter__(self) -> Iterator[list[int]]:
        done = self._sampler.consumed // self._sampler.documents % self._steps
        for _ in range(self._steps - done):
            for one in next(self._sampler).of_rank(self._rank, 0):
                yield list(one.documents)


def create_dataloader(trainer: base.BaseMegatronTrainer, dataset: Any, sampler: Any) -> Any:
    """ms-swift's data loader, with this sampler for training."""
    if isinstance(sampler, base.MegatronPretrainingRandomSampler):
        sampler = BalancedSampler(dataset, trainer.args, sampler)
    return _create_dataloader(trainer, dataset, sampler)


_create_dataloader = base.BaseMegatronTrainer._create_dataloader
base.BaseMegatronTrainer._create_dataloader = create_dataloader
