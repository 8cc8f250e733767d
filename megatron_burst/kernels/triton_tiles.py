"""What the Triton attention kernels share: which tile a program takes, loads, stores.

An operand is (tensor, stride of b, stride of n, stride of h), for a statistic [b, h, n]
(tensor, stride of b, stride of h, stride of n). Tensors may have more than 2^31 elements, so a
tile's start is in int64, offsets inside it in int32.

Head dimensions that are not a power of two are split into two parts of `WIDTH` and `REST` columns,
128 + 64 for 192, or padded with zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Sizes that vary between calls: kernels are not specialized on them (1, multiples of 16).
VARYING = [
    "n_q", "n_k", "left", "right", "count", "heads", "heads_kv", "group", "all_heads", "together",
]  # fmt: skip
_L2_SHARE = 0.5  # of the cache, for data that a section of heads rereads


def operand(x: Tensor) -> tuple:
    """A tensor [b, n, h, d] or a statistic [b, h, n] as kernels take it.

    The stride of an axis of size 1 is left out: its arbitrary value would recompile kernels.
    """
    steps = [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return x, *steps[:3]


def box(x: Tensor, rows: int, wanted: bool) -> TensorDescriptor | None:
    """TMA descriptor for blocks [rows, d] of a tensor [b, n, h, d]; None if TMA cannot load them.

    It describes a matrix whose rows hold all heads, and all sequences of a batch if these lie
    between rows, as in "sbhd". TMA fills rows after the last with zeros, but not columns after a
    head's last, so the head dimension must be a power of two. It reads units of 16 bytes.
    """
    _, *steps = operand(x)
    batch, num_rows, heads, dim = x.shape
    span = (batch - 1) * steps[0] + (heads - 1) * steps[2] + dim
    even = all(step * x.itemsize % 16 == 0 for step in steps) and x.data_ptr() % 16 == 0
    in_rows = num_rows == 1 or span <= steps[1]
    if not (wanted and even and in_rows and dim == padded(dim) and x.numel()):
        return None
    return TensorDescriptor(x, [num_rows, span], [steps[1] or span, 1], [rows, dim])


def statistics_box(x: Tensor, rows: int, wanted: bool) -> TensorDescriptor | None:
    """The same for blocks [1, rows] of statistics [b * h, n] without gaps.

    Blocks must begin at a multiple of 16 bytes, so packed rows cannot use it.
    """
    if not wanted or not x.numel():
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows])


def widths(dim: int) -> tuple[int, int]:
    """(WIDTH, REST) of a head dimension: powers of two of at least 16 whose sum covers it."""
    half = padded(dim) // 2
    if half < 16 or half + padded(dim - half) >= padded(dim):
        return padded(dim), 0
    return half, padded(dim - half)


def padded(dim: int) -> int:
    """The columns that a head dimension takes: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))


def heads_together(x: Tensor, num_bytes: int) -> int:
    """How many heads, of which kernels read `num_bytes` each, fit the L2 cache together."""
    if not x.is_cuda:
        return 1
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    return max(1, int(cache * _L2_SHARE) // max(1, num_bytes))


@triton.jit
def tile_of_program(blocks, heads, together, LAST_FIRST: tl.constexpr):
    """(block of rows, head): heads in sections that fit the L2 cache, longest causal blocks first.

    A section's heads all do one block before any does the next, so that the last programs are the
    shortest.
    """
    section = tl.program_id(0) // (together * blocks)
    within = tl.program_id(0) % (together * blocks)
    here = tl.minimum(together, heads - section * together)
    block = within // here
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, section * together + within % here


@triton.jit
def _elements(x, batch, head, first, AT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [ROWS, WIDTH] into an operand, starting at a row and a column."""
    start = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[3]
    start += tl.cast(first, tl.int64) * x[2]
    return start + tl.arange(0, ROWS)[:, None] * x[2] + (AT + tl.arange(0, WIDTH))[None, :]


@triton.jit
def load_rows(
    x, box, batch, head, first, length, AT: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] of an operand, zeros beyond its columns and, unless INSIDE, beyond its rows."""
    if box is not None:
        return box.load([first, batch * x[1] + head * x[3]])
    pointers = _elements(x, batch, head, first, AT, ROWS, WIDTH)
    columns = (AT + tl.arange(0, WIDTH) < DIM)[None, :]
    rows = (first + tl.arange(0, ROWS) < length)[:, None]
    if INSIDE and AT + WIDTH <= DIM:
        return tl.load(pointers)
    elif INSIDE:
        return tl.load(pointers, mask=columns, other=0.0)
    elif AT + WIDTH <= DIM:
        return tl.load(pointers, mask=rows, other=0.0)
    else:
        return tl.load(pointers, mask=rows & columns, other=0.0)


@triton.jit
def store_rows(
    x, values, batch, head, first, length, AT: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store [ROWS, WIDTH], rounded to the operand's dtype, within its rows and columns."""
    inside = (first + tl.arange(0, ROWS) < length)[:, None]
    inside = inside & (AT + tl.arange(0, WIDTH) < DIM)[None, :]
    pointers = _elements(x, batch, head, first, AT, ROWS, WIDTH)
    tl.store(pointers, values.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def statistics(x, batch, head, first, ROWS: tl.constexpr):
    """Pointers [ROWS] into a statistic."""
    start = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[2]
    start += tl.cast(first, tl.int64) * x[3]
    return start + tl.arange(0, ROWS) * x[3]
