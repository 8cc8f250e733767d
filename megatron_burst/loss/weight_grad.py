"""Where the weight's gradient goes: sums in float32, straight into Megatron's buffer if it has one.

Megatron's contract (core/tensor_parallel/layers.py:690, core/distributed/
distributed_data_parallel.py:485): whoever adds to `weight.main_grad` says so in
`grad_added_to_main_grad`; then the hook of the weight adds `weight.grad` only if `zero_out_wgrad`.
"""

import torch
from torch import Tensor

from megatron_burst.loss.statistics import sum_dtype


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a @ b, where total is in float32 or wider and the GEMM adds up in it.

    `first`: whatever total had is neither read nor kept.
    """
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:  # one cuBLAS call: 16-bit inputs, float32 sums read and written
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def new_sums(weight: Tensor) -> Tensor:
    """A buffer [vocab_local, h] of zeros to add the gradient up in."""
    return torch.zeros_like(weight, dtype=sum_dtype(weight.dtype))


def unwritten_sums(weight: Tensor) -> Tensor:
    """Such a buffer before the first product is put into it."""
    return torch.empty_like(weight, dtype=sum_dtype(weight.dtype))


def held_bytes(weight: Tensor) -> int:
    """What such a buffer adds where Megatron has one already; 0 where it is the only one."""
    return 0 if main_grad_of(weight) is None else weight.numel() * sum_dtype(weight.dtype).itemsize


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Megatron's float32 buffer of this weight's gradient, if it may be added to directly.

    Not where Megatron-FSDP makes it as it goes, nor in 16 bit, in which nothing is added up.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "__fsdp_param__"):
        return None
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    fits = main_grad.dtype == sum_dtype(weight.dtype) and main_grad.shape == weight.shape
    return main_grad if fits and main_grad.is_contiguous() else None


def announce_main_grad(weight: Tensor) -> Tensor | None:
    """Say that `main_grad` has this call's gradient; return what autograd shall get for it.

    Megatron's hook wants to find a gradient. It gets one of a single zero, expanded; only a weight
    that others give gradients to as well (`zero_out_wgrad`, `shared_embedding`) gets real zeros,
    which theirs can be added to.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False):
        return torch.zeros_like(weight)
    if weight.grad is None:
        weight.grad = weight.new_zeros(1).expand_as(weight)
    return None
