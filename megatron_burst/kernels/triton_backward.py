"""Launches of our Triton kernels for backward (not on the reading path).

Also the statistics that they read. In one kernel a program loops over the query rows that see its
block of keys and accumulates dk and dv; in the other it loops over the keys of its block of query
rows and accumulates dq. Both compute scores, so there are 7 products instead of 5, but nothing is
accumulated in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from megatron_burst.kernels.triton_grads import key_grads_kernel, query_grads_kernel
from megatron_burst.kernels.triton_tiles import (
    LOG2_E,
    Chooser,
    KernelPass,
    blocks_for,
    bounds_of,
    box,
    columns_of,
    heads_together,
    operand,
    places_of,
    statistics,
    statistics_box,
)
from megatron_burst.kernels.visible import Visible

_LARGEST_BLOCK = 128  # query rows


def ready_statistics(lse: Tensor, delta: Tensor, packed: bool) -> Tensor:
    """(lse in base 2, delta) as the kernels read them: [2, b * h, n] without gaps.

    n is rounded up to whole blocks, and rows that do not exist, or that see no key, have weight 0:
    kernels need no masks, and addresses known at compile time take no registers. With packed rows a
    block may begin at the last row, so there is one more block.
    """
    batch, heads, rows = lse.shape
    whole = (triton.cdiv(rows, _LARGEST_BLOCK) + packed) * _LARGEST_BLOCK
    ready = lse.new_empty(2, batch * heads, whole, dtype=torch.float32)
    if ready.numel():
        grid = (whole // _LARGEST_BLOCK, batch * heads)
        with torch.cuda.device_of(lse):
            read = map(operand, (lse, delta))
            _statistics_kernel[grid](*read, *ready, rows, heads, ROWS=_LARGEST_BLOCK)
    return ready


@triton.jit(do_not_specialize=["rows", "heads"])
def _statistics_kernel(lse, delta, ready_lse, ready_delta, rows, heads, ROWS: tl.constexpr):
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    inside = first + tl.arange(0, ROWS) < rows
    read = statistics(lse, head // heads, head % heads, first, ROWS)
    row_lse = tl.load(read, mask=inside, other=-float("inf"))
    row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse) * LOG2_E
    read = statistics(delta, head // heads, head % heads, first, ROWS)
    row_delta = tl.load(read, mask=inside, other=0.0)
    at = tl.cast(head, tl.int64) * tl.num_programs(0) * ROWS + first + tl.arange(0, ROWS)
    tl.store(ready_lse + at, row_lse)
    tl.store(ready_delta + at, row_delta)


def launch_backward(
    query_side: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor, scale: float,
    visible: Visible, grads: tuple[Tensor, Tensor, Tensor], choose: Chooser | None = None,
    softcap: float = 0.0,
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
    columns = columns_of(dim_qk, dim_v)

    def launch(kernel: JITFunction, which: KernelPass, outputs: tuple[Tensor, ...], together: int):
        blocks = (choose or blocks_for)(which, q, dim_qk, dim_v)
        of_keys = which is KernelPass.KEY_GRADS
        own = n_k if of_keys else n_q
        count, table, lists = places_of(visible, blocks, own, q.device, of_keys)
        all_heads = batch * (heads_kv if of_keys else heads)
        sizes = blocks.rows, blocks.keys, blocks.keys, blocks.rows
        read = q, k, v, dout
        kernel[(count * all_heads,)](
            *map(operand, outputs), *map(operand, read), *ready,
            *(box(x, n, blocks.tma) for x, n in zip(read, sizes, strict=True)),
            *(statistics_box(x, blocks.rows, blocks.tma and table is None) for x in ready), table,
            lists, ready.shape[-1], scale, softcap or 1.0, n_q, n_k, *values.values(),
            count, heads_kv, group, all_heads, together, **bounded, CAPPED=softcap > 0, **columns,
            **blocks.options(),
        )  # fmt: skip

    longest = (n_q, n_k) if segments is None else (segments.max_q, segments.max_k)
    row_bytes = (dim_qk + dim_v) * k.itemsize
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        if grads[1].shape[1]:
            together = heads_together(q, longest[0] * row_bytes)
            launch(key_grads_kernel, KernelPass.KEY_GRADS, grads[1:], together)
        if grads[0].shape[1]:
            together = group * heads_together(k, longest[1] * row_bytes)
            launch(query_grads_kernel, KernelPass.QUERY_GRADS, grads[:1], together)
