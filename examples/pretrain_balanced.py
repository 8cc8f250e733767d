"""Pretrain a GPT on whole documents, shared out so that all ranks end together.

    python examples/data.py demo/documents
    torchrun --nproc-per-node 4 -m megatron_burst examples/pretrain_balanced.py \
        --data-path demo/documents --context-parallel-size 2 --context-parallel-impl burst \
        --global-batch-size 32 --micro-batch-size 4 --seq-length 8192 --cp-sizes 1 2 ...

--seq-length is what a micro-batch holds on all ranks of the context-parallel group; longer
documents are cut to it. --global-batch-size counts documents, and --micro-batch-size is their mean
in a micro-batch. Costs come from --burst-plan, else from a count of operations. Everything else is
pretrain_gpt.py.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from pretrain_gpt import Batch, add_arguments, losses_of, train

from megatron_burst import BalancedBatches, balance
from megatron_burst.mcore import patches


class Cut(Sequence):
    """Documents of a data set, cut to a length."""

    def __init__(self, documents: Sequence, longest: int) -> None:
        self._documents, self._longest = documents, longest
        self.lengths = np.minimum(documents.sequence_lengths, longest)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._documents[index][: self._longest]


def add_balance(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's flags to those of pretrain_gpt.py, and what its batches need."""
    parser = add_arguments(parser)
    parser.add_argument(
        "--cp-sizes", type=int, nargs="+", metavar="N",
        help="context-parallel sizes of micro-batches; default: that of the group",
    )  # fmt: skip
    parser.add_argument(
        "--equal-tokens", action="store_true",
        help="for comparison: micro-batches of equally many tokens, whatever their attention",
    )  # fmt: skip
    parser.set_defaults(
        calculate_per_token_loss="--use-torch-fsdp2" not in sys.argv,  # which is refused
        dataloader_type="external",
        moe_token_dispatcher_type="alltoall",
    )
    return parser


def costs_of(args: argparse.Namespace) -> balance.Costs:
    """Seconds of a micro-batch: a plan's, or those of its operations at 10 GFLOP/s."""
    if args.burst_plan:
        return balance.Costs.from_plan(args.burst_plan)
    hidden, layers, width = args.hidden_size, args.num_layers, args.ffn_hidden_size
    products = layers * (4 * hidden**2 + 2 * hidden * width) + hidden * args.padded_vocab_size
    rate = 1e10 * args.pipeline_model_parallel_size
    pair = 0.0 if args.equal_tokens else 12 * layers * hidden / rate  # forward and backward
    transfers = {size: 0.05 * 6 * products / rate for size in args.cp_sizes or () if size > 1}
    return balance.Costs(6 * products / rate, pair, 0.0, transfers)


def batches(num_samples: list[int], vp_stage: int | None = None, *, config) -> tuple:
    """Build the data loader of the training set; every rank builds it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    documents = Cut(IndexedDataset(args.data_path[0]), args.seq_length)
    limit = args.seq_length // args.context_parallel_size
    sampler = balance.Sampler(
        documents.lengths,
        BalancedBatches.grid(config, get_num_microbatches(), limit),
        costs_of(args),
        args.global_batch_size,
        cp_sizes=args.cp_sizes,
        seed=args.seed if args.data_seed is None else args.data_seed,
        consumed=args.consumed_train_samples,
    )
    return BalancedBatches(documents, sampler, config), None, None


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
    """Run the model on the next micro-batch, which is this rank's already."""
    return losses_of(next(data_iterator), model)


def main() -> None:
    """Parse Megatron's flags and train."""
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    patches.apply("helpers")
    args = parse_and_validate_args(add_balance)
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1  # stages send what comes
    model = gpt_config_from_args(args)
    train(args, model, partial(batches, config=model.transformer), forward_step)


if __name__ == "__main__":
    main()
