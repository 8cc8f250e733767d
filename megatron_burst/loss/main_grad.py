"""Accumulates the weight's gradient in float32, directly in Megatron's `main_grad` if it exists.

Megatron's contract (core/tensor_parallel/layers.py:690, core/distributed/
distributed_data_parallel.py:485): code that adds to `weight.main_grad` sets
`grad_added_to_main_grad`; then the weight's hook adds `weight.grad` only if `zero_out_wgrad`.
"""

import torch
from torch import Tensor

from megatron_burst.loss.statistics import sum_dtype


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a @ b, where total is in float32 or wider and the GEMM accumulates in it.

    `first`: total's previous content is ignored and overwritten.
    """
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:  # one cuBLAS call: 16-bit inputs, float32 sums read and written
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def held_bytes(weight: Tensor) -> int:
    """Bytes of a gradient sum of the weight if Megatron already has one; else 0."""
    return 0 if main_grad_of(weight) is None else weight.numel() * sum_dtype(weight.dtype).itemsize


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 gradient buffer of this weight, if we may add to it directly.

    Not with Megatron-FSDP, which allocates it on the fly, nor in 16 bits, too coarse for sums.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "__fsdp_param__"):
        return None
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    fits = main_grad.dtype == sum_dtype(weight.dtype) and main_grad.shape == weight.shape
    return main_grad if fits and main_grad.is_contiguous() else None


def announce_main_grad(weight: Tensor) -> Tensor | None:
    """Tell Megatron that `main_grad` has this call's gradient; returns what autograd gets for it.

    Megatron's hook requires a gradient. It gets a single zero, expanded; only a weight with other
    gradients too (`zero_out_wgrad`, `shared_embedding`) gets real zeros, to which those can be
    added.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False):
        return torch.zeros_like(weight)
    if weight.grad is None:
        weight.grad = weight.new_zeros(1).expand_as(weight)
    return None


def common_factor(grad: Tensor, row_weight: Tensor) -> Tensor:
    """c such that grad = c * row_weight, as a scalar tensor; NaN if there is none."""
    if grad.numel() == 0:
        return grad.new_ones(())
    grad, row_weight = grad.flatten(), row_weight.flatten()
    largest = row_weight.abs().argmax()  # exact if grad is a multiple of row_weight
    weight = row_weight[largest]
    factor = torch.where(weight != 0, grad[largest] / weight, 0)
    off = (grad - factor * row_weight).abs() > 1e-3 * (factor * weight).abs()
    return torch.where(off.any(), torch.nan, factor)
