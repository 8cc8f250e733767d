"""The tensors of a program's buffers: a buffer is flat bytes, and its fields are views of them.

Interleaved, it is row 0 [k v], row 1 [k v], ..., so that any rows can be sent; else it is all rows
of k, then all rows of v, and is sent whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_burst.schedule.program import Buffer, Field
from megatron_burst.schedule.spec import Dtype

ALIGNMENT = 16  # bytes; alignment of rows and fields that the GPU's tensor copies need
Dtypes = Mapping[Dtype, torch.dtype]
Fields = dict[str, Tensor]  # [b, rows, heads, dim] each, or [b, heads, rows]


def row_bytes(buffer: Buffer, dtypes: Dtypes) -> list[int]:
    """Bytes of each field in a row of one sequence; aligned where dtypes in a row differ."""
    sizes = [field.elements * dtypes[field.dtype].itemsize for field in buffer.fields]
    if buffer.interleaved and len({dtypes[field.dtype] for field in buffer.fields}) > 1:
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    return sizes


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where a field is in its buffer, in elements of its dtype."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """The byte layout of a buffer; computed once, as it depends on shapes alone."""

    num_bytes: int
    rows: tuple[int, int, int]  # shape in which it is sent, if interleaved: [rows, b, bytes]
    fields: tuple[FieldLayout, ...]

    @staticmethod
    def of(buffer: Buffer, batch: int, dtypes: Dtypes) -> "ByteLayout":
        layouts_of = _interleaved if buffer.interleaved else _dense
        rows = buffer.rows, batch, sum(row_bytes(buffer, dtypes))
        return ByteLayout(prod(rows), rows, tuple(layouts_of(buffer, batch, dtypes)))


def fields_at(flat: Tensor, layouts: Sequence[FieldLayout]) -> Fields:
    """Views of a buffer's fields in its bytes."""
    fields = {}
    for layout in layouts:
        width = layout.dtype.itemsize
        typed = flat[: len(flat) // width * width].view(layout.dtype)
        start = typed.storage_offset() + layout.offset
        fields[layout.name] = typed.as_strided(layout.size, layout.stride, start)
    return fields


def _interleaved(buffer: Buffer, batch: int, dtypes: Dtypes) -> Iterator[FieldLayout]:
    sizes, offset = row_bytes(buffer, dtypes), 0
    for field, size in zip(buffer.fields, sizes, strict=True):
        dtype, width = dtypes[field.dtype], dtypes[field.dtype].itemsize
        in_row, begin = sum(sizes) // width, offset // width
        strides = in_row, batch * in_row, field.dim, 1
        if not field.dim:
            strides = in_row, 1, batch * in_row
        yield FieldLayout(field.name, dtype, shape_of(field, batch, buffer.rows), strides, begin)
        offset += size


def _dense(buffer: Buffer, batch: int, dtypes: Dtypes) -> list[FieldLayout]:
    """Fields in descending order of the power of two that divides their size. So each is aligned to
    its dtype, and fields whose head dimension is a multiple of 8 to the 16 bytes that kernels
    need."""
    shapes = {field: shape_of(field, batch, buffer.rows) for field in buffer.fields}
    sizes = {field: prod(shapes[field]) * dtypes[field.dtype].itemsize for field in shapes}
    layouts, offset = {}, 0
    for field in sorted(sizes, key=lambda field: -(sizes[field] & -sizes[field])):
        dtype, shape = dtypes[field.dtype], shapes[field]
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        begin = offset // dtype.itemsize
        layouts[field] = FieldLayout(field.name, dtype, shape, strides, begin)
        offset += sizes[field]
    return [layouts[field] for field in buffer.fields]


def shape_of(field: Field, batch: int, rows: int) -> tuple[int, ...]:
    """[b, rows, heads, dim], or [b, heads, rows] for statistics."""
    return (batch, rows, field.heads, field.dim) if field.dim else (batch, field.heads, rows)


def empty_like_rows(x: Tensor, rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[b, rows, heads, dim], with rows outermost in memory if they are in x [b, n, ...]."""
    batch = x.shape[0]
    if batch > 1 and x.stride(0) < x.stride(1):
        return x.new_empty(rows, batch, heads, dim, dtype=dtype).transpose(0, 1)
    return x.new_empty(batch, rows, heads, dim, dtype=dtype)
