"""Rows that hold several tensors side by side, each with a dtype of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes that the GPU's tensor copies want rows and fields to begin at


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor's part of a row: so many heads of so many elements."""

    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.heads * self.dim * self.dtype.itemsize


def row_bytes(fields: Sequence[Field]) -> int:
    """Bytes of a row; each field begins aligned."""
    return sum(_aligned(field.num_bytes) for field in fields)


def field_views(rows: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """The fields of rows [..., row_bytes] of bytes: [..., heads, dim] each."""
    views, offset = [], 0
    for field in fields:
        part = rows[..., offset : offset + field.num_bytes].view(field.dtype)
        views.append(part.unflatten(-1, (field.heads, field.dim)))
        offset += _aligned(field.num_bytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
