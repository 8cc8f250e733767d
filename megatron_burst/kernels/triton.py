"""Our own FlashAttention in Triton, for any strides (not on the reading path)."""

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_burst.kernels.interface import Backend, Capability, QuerySide
from megatron_burst.kernels.partial import empty_results, raise_to, row_delta
from megatron_burst.kernels.visible import Visible
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
        softcap=True,
        archs=frozenset({8, 9, 10, 11, 12}),
        speed="our own Triton kernels, for any GPU since Ampere",
    )

    def missing(self) -> str | None:
        return None if find_spec("triton") else "Triton is not installed"

    def finds_largest(self, device: torch.device) -> bool:
        return True

    def forward(
        self, q, k, v, scale, visible, into=None, sink=None, softcap=0.0, largest=None
    ):  # fmt: skip
        from megatron_burst.kernels.triton_forward import empty_largest, launch_forward

        into, rows = into or empty_results(q, v), None if largest is None else empty_largest(q)
        launch_forward(q, k, v, scale, visible, *into, sink, softcap=softcap, largest=rows)
        if largest is not None:
            raise_to(largest, rows)
        return into

    def largest_of_rows(self, q: Tensor, k: Tensor, scale: float, visible: Visible) -> Tensor:
        """The largest score of each row [b, h, n] in float32, -inf without a key."""
        from megatron_burst.kernels.triton_forward import empty_largest, launch_forward

        rows = empty_largest(q)
        launch_forward(q, k, None, scale, visible, None, None, largest=rows)
        return rows

    def backward(
        self, side: QuerySide, k, v, scale, visible, into=None, deterministic=False, softcap=0.0
    ):
        from megatron_burst.kernels.triton_backward import launch_backward

        delta = row_delta(side.dout, side.out) if side.delta is None else side.delta
        if into is None:
            into = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (side.q, k, v))
        tensors = (side.q, side.dout, side.lse, delta), k, v
        launch_backward(*tensors, scale, visible, into, softcap=softcap)
        return into
