"""Block sizes of the Triton attention kernels: a table, so that all ranks agree.

Timing candidates at the first call, as `triton.autotune` does, may choose differently on each
rank, and then gradients differ in their last bits. `benchmarks/kernels.py --sweep` finds entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Pass(Enum):
    """Which kernel."""

    FORWARD = "forward"
    KEY_GRADS = "key grads"
    QUERY_GRADS = "query grads"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a kernel's blocks.

    Attributes:
        rows: query rows of a block.
        keys: keys of a block.
        warps: warps of a program.
        stages: blocks in flight or in use at a time.
        tma: whether blocks are loaded by TMA (Hopper and later).
    """

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False

    def options(self) -> dict[str, int]:
        """As launch options."""
        return {
            "ROWS": self.rows, "KEYS": self.keys,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


# For 16-bit inputs: largest head dimension -> forward, key grads, query grads.
_Row = dict[Pass, Blocks]


def _row(forward: Blocks, key_grads: Blocks, query_grads: Blocks) -> _Row:
    return {
        Pass.FORWARD: forward, Pass.KEY_GRADS: key_grads, Pass.QUERY_GRADS: query_grads
    }  # fmt: skip


_HOPPER = {
    64: _row(Blocks(64, 128, 4, 2, True), Blocks(64, 64, 4, 3, True), Blocks(64, 128, 4, 3, True)),
    128: _row(Blocks(64, 64, 4, 3, True), Blocks(64, 64, 4, 2, True), Blocks(128, 64, 8, 3, True)),
    256: _row(Blocks(128, 64, 8, 2, True), Blocks(32, 64, 8, 2, True), Blocks(128, 32, 8, 2, True)),
}
_AMPERE = {
    64: _row(Blocks(128, 64, 4, 3), Blocks(32, 128, 4, 3), Blocks(128, 32, 4, 3)),
    128: _row(Blocks(128, 64, 8, 2), Blocks(32, 128, 8, 2), Blocks(128, 32, 8, 2)),
    256: _row(Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)),
}
_SMALL = {  # 99 KB of shared memory
    64: _row(Blocks(128, 64, 4, 2), Blocks(32, 64, 4, 2), Blocks(64, 32, 4, 2)),
    128: _row(Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 1), Blocks(64, 32, 4, 1)),
    256: _row(Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1)),
}
_BY_ARCH = {(8, 0): _AMPERE, (9, 0): _HOPPER, (10, 0): _HOPPER, (10, 3): _HOPPER}
_WIDE = {  # float32, three products for one
    64: _row(Blocks(64, 32, 4, 1), Blocks(32, 64, 8, 1), Blocks(64, 32, 4, 1)),
    128: _row(Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1)),
    256: _row(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
}


Chooser = Callable[[Pass, Tensor, int, int], Blocks]


def blocks_for(which: Pass, q: Tensor, dim_qk: int, dim_v: int) -> Blocks:
    """The table's entry for a kernel, the GPU of q, its dtype and the larger head dimension."""
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    return blocks_of(which, arch, q.itemsize, max(dim_qk, dim_v))


def blocks_of(which: Pass, arch: tuple[int, int], itemsize: int, dim: int) -> Blocks:
    """The table's entry for a compute capability, by default one that fits any GPU."""
    table = _WIDE if itemsize > 2 else _BY_ARCH.get(arch, _SMALL)
    return next(table[size][which] for size in sorted(table) if dim <= size)
