"""Pretrain a GPT under a mask of slices: a prefix, frames, images in a text, chunks, or a tree.

    torchrun --nproc-per-node 4 -m megatron_burst examples/pretrain_masks.py --mask frames \
        --context-parallel-size 4 --context-parallel-impl burst ...

The mask goes to the model where Megatron passes `packed_seq_params`; everything else is
pretrain_gpt.py. Tokens that their predecessor sees are not predicted. A tree is a prompt with three
answers, of which the second has two ends; all of them begin at the position after their prompt.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from pretrain_gpt import Batch, add_arguments, losses_of, main, next_batch
from torch import Tensor

from megatron_burst import SlicedSeqParams, slices

MASKS = {  # of a sample of so many tokens
    "prefix": lambda tokens: slices.prefix_lm(tokens // 4, tokens),
    "frames": lambda tokens: slices.block_causal([tokens // 8] * 7 + [tokens - tokens // 8 * 7]),
    "images": lambda tokens: slices.causal_with_spans([(tokens // 4, tokens // 2)], tokens),
    "chunks": lambda tokens: slices.chunked(tokens, -(-tokens // 3)),
}
PARENTS = [-1, 0, 0, 2, 2, 0]  # of a tree's segments


def add_mask(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --mask to the flags of pretrain_gpt.py.

    Ranks predict different numbers of tokens: without the loss per token, which Megatron's FSDP2
    does not have, Megatron takes the mean of each rank's mean.
    """
    parser = add_arguments(parser)
    parser.set_defaults(calculate_per_token_loss="--use-torch-fsdp2" not in sys.argv)
    masks = [*MASKS, "tree"]
    parser.add_argument("--mask", choices=masks, default="prefix", help="what queries see")
    return parser


def params_of(name: str, tokens: int) -> SlicedSeqParams:
    """A mask for a sample of so many tokens, and their positions, if they are a tree's."""
    if name != "tree":
        return SlicedSeqParams.of(MASKS[name](tokens), tokens)
    each = tokens // len(PARENTS)
    lengths = [tokens - each * (len(PARENTS) - 1)] + [each] * (len(PARENTS) - 1)
    return SlicedSeqParams.of_tree(lengths, PARENTS)


def predicted(params: SlicedSeqParams, tokens: int) -> Tensor:
    """Which rows predict the next one's token, of what they do not see: bool [tokens]."""
    mask, positions = params.slices, params.positions
    place, sees = torch.arange(tokens), torch.zeros(tokens, dtype=torch.bool)
    for q_start, q_stop, k_start, k_stop, kind in mask.tolist():
        first = k_start + (place - q_start if kind & slices.INVERSE else 0)
        end = k_stop - (q_stop - 1 - place if kind & slices.CAUSAL else 0)
        inside = (place >= q_start) & (place < q_stop)
        sees |= inside & (first <= place + 1) & (place + 1 < end)
    if positions is not None:  # the next row may be another answer's
        sees[:-1] |= positions.diff() != 1
    return ~sees


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
    """Run the model on the next micro-batch, under the mask."""
    from megatron.training import get_args

    args, batch = get_args(), next_batch(data_iterator)
    params = params_of(args.mask, args.seq_length)
    told = predicted(params, args.seq_length).to(batch["loss_mask"].device)
    batch["loss_mask"] = batch["loss_mask"] * told[batch["position_ids"]]
    batch["packed_seq_params"] = params
    return losses_of(batch, model)


if __name__ == "__main__":
    main(add_mask, forward_step)
