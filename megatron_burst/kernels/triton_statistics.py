"""Lse and delta in the form that the Triton backward kernels read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.kernels.triton_tiles import LOG2_E, operand, statistics

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
            _statistics_kernel[grid](
                operand(lse), operand(delta), ready[0], ready[1], rows, heads, ROWS=_LARGEST_BLOCK
            )
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
