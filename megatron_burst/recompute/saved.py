"""References to tensors that a graph saves, and how tensors lie in memory."""

import torch
from torch import Tensor

from megatron_burst.recompute.keeping import Tensors


class Saved:
    """What stands for a tensor that the graph saves: where its data will be, and its geometry.

    Attributes:
        tensor: the data, until it refers to something.
        role: "inputs", "outs" or "extras".
        index: which of these.
        needs: how much of the base's geometry it relies on: 1 its shape, 2 also its strides, 3 also
            its place in memory, as it reaches beyond it (q, k and v in one buffer).
    """

    __slots__ = ("tensor", "role", "index", "needs", "_view")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()

    def refer(self, role: str, index: int, base: Tensor) -> None:
        """Stand for a view of `base`, which is to be found as `role` number `index`."""
        self.role, self.index = role, index
        shape, stride, offset = geometry(self.tensor)
        same = shape == tuple(base.shape) and stride == base.stride()
        first = offset - base.storage_offset()
        inside = 0 <= first and first + extent(self.tensor) <= extent(base)
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
    """A number that another bit anywhere, or another order of rows, changes.

    Sums of the bits as integers, modulo 2**64, rows weighted by their place.
    """
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    rows = tensor.detach().contiguous().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    sums = rows.view(bits).sum(-1, dtype=torch.int64)
    return int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())


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
