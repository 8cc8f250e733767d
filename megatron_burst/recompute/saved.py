"""References to tensors that a graph saves, and how tensors lie in memory."""

import torch
from torch import Tensor

from megatron_burst.recompute.keeping import Tensors

_PIECE = 1 << 22  # elements
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's, signed


class Saved:
    """What stands for a tensor that the graph saves: where its data will be, and its geometry.

    Attributes:
        tensor: the data, until it refers to something.
        role: "inputs", "outs" or "extras".
        index: which of these.
        needs: how much of the base's geometry it relies on: 1 its shape, 2 also its strides, 3 also
            its place in memory, as it reaches beyond it (q, k and v in one buffer).
    """

    __slots__ = ("_view", "index", "needs", "role", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()

    def refer(self, role: str, index: int, base: Tensor) -> None:
        """Stand for a view of `base`, which is to be found as `role` number `index`."""
        self.role, self.index = role, index
        shape, stride, offset = geometry(self.tensor)
        same = shape == tuple(base.shape) and stride == base.stride()
        first = offset - base.storage_offset()
        inside = first >= 0 and first + extent(self.tensor) <= extent(base)
        self.needs = 1 if same and not first else 2 if inside else 3
        self._view = None if self.needs == 1 else (shape, stride, first)
        self.tensor = None

    def find(self, bound: dict[str, Tensors]) -> Tensor:
        """The tensor, from what the backward pass has at hand."""
        base = bound[self.role][self.index].detach()
        if self._view is None:
            return base
        shape, stride, offset = self._view
        return base.as_strided(shape, stride, base.storage_offset() + offset)


def checksum(tensor: Tensor) -> int:
    """A number that other bits anywhere, or another order, change.

    Sum over all elements of their bits, mixed with their place as splitmix64 does, modulo 2**64: a
    plain sum does not see signs that change in pairs. A piece at a time, to take little memory.
    """
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    flat = tensor.detach().contiguous().reshape(-1).view(bits)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _PIECE):
        mixed = torch.arange(first, min(first + _PIECE, flat.numel()), device=flat.device)
        mixed.mul_(_ODD[0]).bitwise_xor_(flat[first : first + _PIECE])
        for factor in _ODD[1:]:
            mixed.bitwise_xor_(mixed >> 29).mul_(factor)
        total += mixed.sum()
    return int(total)


def geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a tensor in its storage, in elements."""
    return tuple(x.shape), x.stride(), x.storage_offset()


def extent(x: Tensor) -> int:
    """Elements of memory from the first to the last of a tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def home(x: Tensor) -> tuple:
    """The memory that a tensor is a view of."""
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes(), x.dtype


def place(x: Tensor) -> tuple:
    """Where in that memory it begins."""
    return *home(x), x.storage_offset()


def num_bytes(tensors: Tensors) -> int:
    """Bytes of the memory that the tensors are views of."""
    return sum({home(x)[:2]: x.untyped_storage().nbytes() for x in tensors}.values())
