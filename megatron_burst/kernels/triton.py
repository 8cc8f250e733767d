"""Our own FlashAttention in Triton, for any strides (not on the reading path)."""

from importlib.util import find_spec

import torch

from megatron_burst.kernels.interface import Backend, Capability, QuerySide
from megatron_burst.kernels.partial import empty_results, row_delta
from megatron_burst.schedule.mask import DOCUMENTS, SLICES, WINDOWS


class Triton(Backend):
    """Kernels of `triton_forward` and `triton_backward`, for GPUs since Ampere.

    Head dimensions that are not a power of two are padded in registers, never in memory. float32 is
    multiplied as three TF32 products.
    """

    capability = Capability(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        max_dim=256,
        min_dim=16,  # at 8 to 10, out was wrong on an H200 if keys also had padded columns
        dim_multiple=1,
        takes_delta=True,
        rectangular_causal=True,
        masks=frozenset({WINDOWS, DOCUMENTS, SLICES}),
        wide_grads=True,
        sinks=True,
        archs=frozenset({8, 9, 10, 11, 12}),
        speed="our own Triton kernels, for any GPU since Ampere",
    )

    def missing(self) -> str | None:
        return None if find_spec("triton") else "Triton is not installed"

    def forward(self, q, k, v, scale, visible, into=None, sink=None):
        from megatron_burst.kernels.triton_forward import launch_forward

        into = into or empty_results(q, v)
        launch_forward(q, k, v, scale, visible, *into, sink)
        return into

    def backward(self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False):
        from megatron_burst.kernels.triton_backward import launch_backward

        delta = row_delta(side.dout, side.out) if side.delta is None else side.delta
        if into is None:
            into = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (side.q, k, v))
        launch_backward((side.q, side.dout, side.lse, delta), k, v, scale, visible, into)
        return into
