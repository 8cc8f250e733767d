"""Megatron-Bridge: micro-batches that end together, from the balance of megatron_burst.

    from balance_bridge import BalancedDocuments, Resume, forward_step

    cfg.model.cp_comm_type, cfg.model.calculate_per_token_loss = "burst", True
    cfg.train.global_batch_size, cfg.train.micro_batch_size = 256, 4    # documents; their mean
    cfg.dataset = BalancedDocuments(path="documents", costs="plan.json", token_limit=16384)
    pretrain(cfg, forward_step, callbacks=[Resume()])

With a pipeline, also `cfg.model.variable_seq_lengths = True`, and for any model then
`cfg.model.moe_token_dispatcher_type = "alltoall"`. There are no validation or test sets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.losses import masked_next_token_loss
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config

from megatron_burst import BalancedBatches, balance


@dataclass
class BalancedDocuments(DatasetProvider):
    """Documents of one of Megatron's data sets, as this rank's micro-batches."""

    path: str = ""  # of the data set, without .bin
    costs: str = ""  # a plan
    token_limit: int = 0  # tokens of a micro-batch that a GPU has memory for
    cp_sizes: tuple[int, ...] = ()  # context-parallel sizes of micro-batches; (): the group's
    seed: int = 1234
    seq_length: int = 0  # for Bridge's logs of throughput: tokens of a step / its documents
    dataloader_type: str = "external"

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, None, None]:
        """A data loader for each model chunk; `Resume` says of which model and from where on."""
        loaders = [self._loader() for _ in range(self.job[0])]
        return loaders if len(loaders) > 1 else loaders[0], None, None

    def _loader(self) -> BalancedBatches:
        _, config, step, consumed = self.job
        documents = IndexedDataset(self.path)
        sampler = balance.Sampler(
            documents.sequence_lengths,
            BalancedBatches.grid(config, get_num_microbatches(), self.token_limit),
            balance.Costs.from_plan(self.costs),
            step,
            cp_sizes=self.cp_sizes or None,
            seed=self.seed,
            consumed=consumed,
        )
        return BalancedBatches(documents, sampler, config)


class Resume(Callback):
    """Tells the data set of the job, once a checkpoint is loaded."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Called by Bridge before data sets are built."""
        state = context.state
        step, consumed = state.cfg.train.global_batch_size, state.train_state.consumed_train_samples
        config = get_model_config(context.model[0])
        state.cfg.dataset.job = len(context.model), config, step, consumed


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, partial]:
    """Run the model on the next micro-batch, which is this rank's already."""
    batch = next(data_iterator)
    losses = model(
        batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )  # fmt: skip
    return losses, partial(masked_next_token_loss, batch["loss_mask"])
