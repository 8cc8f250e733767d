"""Partials, sums of gradients and delta, each one Triton launch (not on the reading path).

`partial` documents each and has it in plain torch; sums are in float32 here. Tensors may have any
strides. A program works on a block of tokens of one head.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of each tensor in a program: 8 KB in bf16, 32 sums in a thread's registers


def merge_parts(
    out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor | None = None
) -> None:
    """`partial.merge_parts`: out [b, n, h, dv] up to float32, lse [b, h, n] in float32."""
    outs, lses = zip(*parts, strict=True)
    (to, *of_parts), unit = _operands(out, *outs)
    (lse, *lses), _ = _operands(lse, *lses, most=1)
    operands = to, lse, tuple(of_parts), tuple(lses), sink
    _launch(_merge_kernel, out, *operands, COUNT=len(parts), UNIT=unit)


def sum_parts(target: Tensor, parts: Sequence[Tensor]) -> None:
    """`partial.sum_parts`: [b, n, h, d] up to float32."""
    (to, *of_parts), unit = _operands(target, *parts)
    _launch(_sum_kernel, target, to, tuple(of_parts), COUNT=len(parts), UNIT=unit)


def sum_rows(target: Tensor, source: Tensor, rows: Tensor) -> None:
    """See `partial.sum_rows`."""
    operands, unit = _operands(target, source)
    operands.append((rows, *rows.stride()))
    _launch(_sum_rows_kernel, target, *operands, COUNT=len(rows), UNIT=unit)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """`partial.row_delta`: of [b, n, h, dv] up to float32, [b, h, n] in float32."""
    batch, tokens, heads, _ = out.shape
    delta = out.new_empty(batch, heads, tokens, dtype=torch.float32)
    operands, unit = _operands(dout, out)
    (to,), _ = _operands(delta, most=1)
    _launch(_delta_kernel, out, *operands, to, UNIT=unit)
    return delta


def surrogate_out(dout: Tensor, delta: Tensor, nonzeros: int = 3) -> Tensor:
    """`partial.surrogate_out`: dout [b, n, h, dv] up to float32, delta [b, h, n] in float32."""
    stand_in = torch.empty_like(dout, memory_format=torch.contiguous_format)
    (of_dout, to), unit = _operands(dout, stand_in)
    (of_delta,), _ = _operands(delta, most=1)
    _launch(
        _stand_in_kernel, dout, of_dout, of_delta, to,
        NONZEROS=min(nonzeros, dout.shape[-1]), LARGEST=torch.finfo(dout.dtype).max, UNIT=unit,
    )  # fmt: skip
    return stand_in


def _operands(*tensors: Tensor, most: int = 8) -> tuple[list[tuple], int]:
    """Tensors as a kernel takes them, (x, *strides), and the unit of all strides but the last:
    `most` elements if all are multiples of it, else 1.

    Triton itself detects multiples of 16 elements, but 8 of bf16 make the 16 bytes that a thread
    can load at once: with head dimensions such as 40 or 72 this doubles the speed.
    """
    strides, unit = _strides(tuple((x.shape, x.stride()) for x in tensors), most)
    return [(x, *some) for x, some in zip(tensors, strides, strict=True)], unit


@lru_cache(maxsize=4096)
def _strides(
    lie: tuple[tuple[torch.Size, tuple[int, ...]], ...], most: int
) -> tuple[list[tuple[int, ...]], int]:
    """The part that depends only on (shape, stride). The stride of an axis of size 1 is set to 0:
    its arbitrary value would recompile kernels."""
    every = [
        [0 if size == 1 else step for size, step in zip(shape, stride, strict=True)]
        for shape, stride in lie
    ]
    unit = 1 if any(step % most for steps in every for step in steps[:-1]) else most
    return [(*(step // unit for step in steps[:-1]), steps[-1]) for steps in every], unit


def _launch(kernel: triton.JITFunction, rows_of: Tensor, *operands: tuple, **constants) -> None:
    """Run a kernel over all rows of a tensor [b, n, h, d]."""
    if rows_of.numel() == 0:
        return
    batch, tokens, heads, dim = rows_of.shape
    columns = 1 << (dim - 1).bit_length()
    rows = max(1, _BLOCK // columns)
    launch = kernel[batch * heads * -(-tokens // rows),]
    constants |= {"DIM": dim, "ROWS": rows, "COLUMNS": columns, "num_warps": 4}
    device = rows_of.get_device()
    if device < 0 or device == torch.cuda.current_device():
        return launch(*operands, tokens, heads, **constants)
    with torch.cuda.device(device):  # Triton launches on the current one, wherever the tensors are
        launch(*operands, tokens, heads, **constants)


@triton.jit
def _place(tokens, heads, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(batch, head, tokens, columns) of this program, then which tokens and which elements exist;
    in int64, as tensors may have more than 2^31 elements.

    Heads run fastest, so that concurrent programs touch adjacent memory.
    """
    blocks = tl.cdiv(tokens, ROWS)
    block = tl.program_id(0) // heads
    rows = (block % blocks) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) % heads
    batch, head, rows = (block // blocks).to(tl.int64), head.to(tl.int64), rows.to(tl.int64)
    columns, inside = tl.arange(0, COLUMNS), rows < tokens
    return batch, head, rows, columns, inside, inside[:, None] & (columns < DIM)[None, :]


@triton.jit
def _entries(x, batch, head, rows, columns, UNIT: tl.constexpr):
    """Pointers to one column of each row of an operand [b, n, h, d]."""
    return x[0] + (batch * x[1] + head * x[3]) * UNIT + rows * x[2] * UNIT + columns * x[4]


@triton.jit
def _elements(x, batch, head, rows, columns, UNIT: tl.constexpr):
    """Pointers [rows, columns] into an operand [b, n, h, d]."""
    return _entries(x, batch, head, rows[:, None], columns[None, :], UNIT)


@triton.jit
def _statistics(x, batch, head, rows):
    """Pointers [rows] into an operand [b, h, n]."""
    return x[0] + batch * x[1] + head * x[2] + rows * x[3]


@triton.jit(do_not_specialize=["tokens", "heads"])
def _merge_kernel(
    out, lse, outs, lses, sink, tokens, heads,
    COUNT: tl.constexpr, UNIT: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, head, rows, columns, inside, valid = _place(tokens, heads, DIM, ROWS, COLUMNS)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    if sink is not None:
        largest = tl.maximum(largest, tl.load(sink + head).to(tl.float32))
    for i in tl.static_range(COUNT):
        pointers = _statistics(lses[i], batch, head, rows)
        largest = tl.maximum(largest, tl.load(pointers, mask=inside, other=-float("inf")))
    # -inf - -inf is NaN: in a row that no part has seen, all weights are exp(-inf - 0) = 0
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.zeros([ROWS], tl.float32)
    if sink is not None:
        total += tl.exp(tl.load(sink + head).to(tl.float32) - largest)
    merged = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(COUNT):
        pointers = _statistics(lses[i], batch, head, rows)
        part_lse = tl.load(pointers, mask=inside, other=-float("inf"))  # from the cache
        weight = tl.exp(part_lse - largest)
        total += weight
        part = tl.load(_elements(outs[i], batch, head, rows, columns, UNIT), mask=valid, other=0.0)
        merged += weight[:, None] * part.to(tl.float32)
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    # in place: several threads load the lse of a row; all have, before one overwrites it
    tl.debug_barrier()
    tl.store(_elements(out, batch, head, rows, columns, UNIT), merged, mask=valid)
    tl.store(_statistics(lse, batch, head, rows), largest + tl.log(total), mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _sum_kernel(
    target, parts, tokens, heads,
    COUNT: tl.constexpr, UNIT: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, head, rows, columns, _, valid = _place(tokens, heads, DIM, ROWS, COLUMNS)
    first = tl.load(_elements(parts[0], batch, head, rows, columns, UNIT), mask=valid)
    total = first.to(tl.float32)
    for i in tl.static_range(1, COUNT):
        part = tl.load(_elements(parts[i], batch, head, rows, columns, UNIT), mask=valid)
        total += part.to(tl.float32)
    tl.store(_elements(target, batch, head, rows, columns, UNIT), total, mask=valid)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _sum_rows_kernel(
    target, source, picked, tokens, heads, COUNT: tl.constexpr, UNIT: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, head, rows, columns, inside, valid = _place(tokens, heads, DIM, ROWS, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(COUNT):
        row = tl.load(picked[0] + i * picked[1] + rows, mask=inside, other=-1)
        there = (row >= 0)[:, None] & valid
        pointers = _elements(source, batch, head, tl.maximum(row, 0), columns, UNIT)
        total += tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    tl.store(_elements(target, batch, head, rows, columns, UNIT), total, mask=valid)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _delta_kernel(
    dout, out, delta, tokens, heads,
    UNIT: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, head, rows, columns, inside, valid = _place(tokens, heads, DIM, ROWS, COLUMNS)
    left = tl.load(_elements(dout, batch, head, rows, columns, UNIT), mask=valid, other=0.0)
    right = tl.load(_elements(out, batch, head, rows, columns, UNIT), mask=valid, other=0.0)
    sums = tl.sum(left.to(tl.float32) * right.to(tl.float32), axis=1)
    tl.store(_statistics(delta, batch, head, rows), sums, mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _stand_in_kernel(
    dout, delta, stand_in, tokens, heads, NONZEROS: tl.constexpr, LARGEST: tl.constexpr,
    UNIT: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, head, rows, columns, inside, valid = _place(tokens, heads, DIM, ROWS, COLUMNS)
    x = tl.load(_elements(dout, batch, head, rows, columns, UNIT), mask=valid, other=0.0)
    left = tl.load(_statistics(delta, batch, head, rows), mask=inside, other=0.0)
    zeros = tl.zeros([ROWS, COLUMNS], x.dtype)
    tl.store(_elements(stand_in, batch, head, rows, columns, UNIT), zeros, mask=valid)
    tl.debug_barrier()  # other threads overwrite zeros with shares
    # A key sorts by |x| and has the column in its last bits: one max finds both. These bits of |x|
    # are 0 in 16-bit dtypes; in float32 they only affect the order.
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    keys = (bits & (0x7FFFFFFF - (COLUMNS - 1))) | columns[None, :]
    for _ in tl.static_range(NONZEROS):
        key = tl.max(keys, axis=1)
        keys = tl.where(keys == key[:, None], -1, keys)
        column = key & (COLUMNS - 1)
        there = inside & (column < DIM)
        pointers = _entries(dout, batch, head, rows, column, UNIT)  # this load hits the cache
        factor = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
        share = tl.where(factor == 0.0, 0.0, left / tl.where(factor == 0.0, 1.0, factor))
        share = tl.clamp(share, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(x.dtype)
        tl.store(_entries(stand_in, batch, head, rows, column, UNIT), share, mask=there)
        left -= share.to(tl.float32) * factor
