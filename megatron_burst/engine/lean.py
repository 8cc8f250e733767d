"""Keeps the autograd graph from holding memory that backward does not need."""

import torch
from torch import Tensor


def lean(x: Tensor, *others: Tensor) -> Tensor:
    """A copy of x if x is at most a quarter of storage that only x keeps alive, else x.

    V is a slice of the fused QKV projection, while rotary embedding copies Q and K out of it:
    saving V as it is keeps the whole projection until backward.
    """
    held = x.untyped_storage()
    shared = any(held.data_ptr() == other.untyped_storage().data_ptr() for other in others)
    if shared or 4 * x.nbytes > held.nbytes():
        return x
    return x.detach().clone(memory_format=torch.contiguous_format)
