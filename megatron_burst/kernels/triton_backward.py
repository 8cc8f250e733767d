"""Attention backward in Triton from lse and delta: no atomics, so it is bitwise reproducible.

In one kernel a program loops over the query rows that see its block of keys and accumulates dk and
dv; in the other it loops over the keys of its block of query rows and accumulates dq. Both compute
scores, so there are 7 products instead of 5, but nothing is accumulated in memory.
"""

import torch
from torch import Tensor
from triton.runtime import JITFunction

from megatron_burst.kernels.triton_bands import bounds_of, num_blocks, table_of
from megatron_burst.kernels.triton_blocks import Chooser, Pass, blocks_for
from megatron_burst.kernels.triton_key_grads import key_grads_kernel
from megatron_burst.kernels.triton_query_grads import query_grads_kernel
from megatron_burst.kernels.triton_statistics import ready_statistics
from megatron_burst.kernels.triton_tiles import (
    box,
    heads_together,
    operand,
    padded,
    statistics_box,
    widths,
)
from megatron_burst.kernels.visible import Visible


def launch_backward(
    query_side: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor, scale: float,
    visible: Visible, grads: tuple[Tensor, Tensor, Tensor], choose: Chooser | None = None,
) -> None:  # fmt: skip
    """Write (dq, dk, dv), computed from (q, dout, lse, delta); see `Backend.backward`.

    `choose` replaces the table of block sizes.
    """
    q, dout, lse, delta = query_side
    batch, n_q, heads, dim_qk = q.shape
    n_k, heads_kv, dim_v = v.shape[1:]
    group, segments = heads // heads_kv, visible.segments
    ready = ready_statistics(lse, delta, segments is not None)
    values, bounded = bounds_of(visible, n_q, n_k)
    width, rest = widths(dim_qk)
    constants = dict(DIM_QK=dim_qk, DIM_V=dim_v, WIDTH=width, REST=rest, WIDTH_V=padded(dim_v))

    def launch(kernel: JITFunction, which: Pass, outputs: tuple[Tensor, ...], together: int):
        blocks = (choose or blocks_for)(which, q, dim_qk, dim_v)
        of_keys = which is Pass.KEY_GRADS
        own, size = (n_k, blocks.keys) if of_keys else (n_q, blocks.rows)
        count, table = num_blocks(own, size, segments), None
        if segments is not None:
            starts = segments.cu_q, segments.cu_k
            table = table_of(*(reversed(starts) if of_keys else starts), size, count)
        all_heads = batch * (heads_kv if of_keys else heads)
        sizes = blocks.rows, blocks.keys, blocks.keys, blocks.rows
        read = q, k, v, dout
        kernel[(count * all_heads,)](
            *map(operand, outputs), *map(operand, read), *ready,
            *(box(x, n, blocks.tma) for x, n in zip(read, sizes, strict=True)),
            *(statistics_box(x, blocks.rows, blocks.tma and table is None) for x in ready), table,
            ready.shape[-1], scale, n_q, n_k, *values.values(), count, heads_kv, group, all_heads,
            together, **bounded, **constants, **blocks.options(),
        )  # fmt: skip

    longest = (n_q, n_k) if segments is None else (segments.max_q, segments.max_k)
    row_bytes = (dim_qk + dim_v) * k.itemsize
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        if grads[1].shape[1]:
            together = heads_together(q, longest[0] * row_bytes)
            launch(key_grads_kernel, Pass.KEY_GRADS, grads[1:], together)
        if grads[0].shape[1]:
            together = group * heads_together(k, longest[1] * row_bytes)
            launch(query_grads_kernel, Pass.QUERY_GRADS, grads[:1], together)
