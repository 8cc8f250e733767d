"""The most likely class of each token, without all logits."""

import torch
from torch import Tensor

from megatron_burst.loss.parallel import TensorParallel, sizes_of
from megatron_burst.loss.rows import Rows
from megatron_burst.loss.tiles import choose_tiles


@torch.no_grad()
def largest_class(
    hidden: Tensor, weight: Tensor, tp: TensorParallel, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Largest logit and its class among this rank's part of the vocabulary.

    Args:
        hidden: [s, b, h], or with sequence parallelism this rank's part of s.
        weight: [vocab / tp, h].
        tp: ranks that share the vocabulary.
        scale: positive factor of the logits.

    Returns:
        ([s, b] logits in the model's dtype, [s, b] int64 classes, counted from 0 on each rank).
    """
    tokens = hidden.shape[:-1].numel()
    tiles = choose_tiles(sizes_of(tokens * tp.blocks, hidden, weight, tp), whole=True)
    labels = torch.zeros(tp.blocks, tokens, dtype=torch.long, device=hidden.device)
    rows = Rows(labels, labels == 0, tp.rank if tp.blocks > 1 else 0, None, tokens)
    values, classes = hidden.new_empty(tp.blocks, tokens), torch.empty_like(labels)
    for piece, x in tp.chunks(hidden, rows, tiles.rows):
        found = torch.mm(x, weight.t()).max(dim=1)
        values[:, piece] = found.values.view(tp.blocks, -1)
        classes[:, piece] = found.indices.view(tp.blocks, -1)
    full = hidden.shape[0] * tp.blocks, *hidden.shape[1:-1]
    return values.view(full) * scale, classes.view(full)
