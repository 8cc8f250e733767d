"""What a graph holds on to until backward, and need not."""

import torch
from torch import Tensor


def lean(x: Tensor, *others: Tensor) -> Tensor:
    """A copy of x if it is at most a quarter of memory that only x holds on to, else x.

    Values are a slice of the fused QKV projection, which position embeddings take queries and keys
    out of: saved as they are, they keep all of it until backward.
    """
    held = x.untyped_storage()
    shared = any(held.data_ptr() == other.untyped_storage().data_ptr() for other in others)
    if shared or 4 * x.nbytes > held.nbytes():
        return x
    return x.detach().clone(memory_format=torch.contiguous_format)
