"""Tile sizes: tiles of logits that fit a fixed amount of memory.

A GEMM that adds to [classes, h] float32 sums reads and writes 8 bytes for 2 rows operations, so
tiles have many rows; one that adds [rows, h] sums likewise wants many classes. The hidden states'
gradient [rows, h] is the smallest product: if its blocks fill the GPU's multiprocessors 2.67 times,
they take as long as 3 full waves.
"""

from dataclasses import dataclass, replace
from math import ceil

SCRATCH_BYTES = 896 << 20  # of the promised 1 GiB; the rest is for statistics of all rows
_MOST_ROWS = 8192
_LEAST_CLASSES = 4096
_FIXED_ROWS = 1024
_UNIT = 128  # rows and classes are multiples: whole blocks for the GEMMs
_BLOCK = 128, 256  # rows, columns of a product that a multiprocessor computes at once (cuBLAS)
_SUM_ROWS = 750  # a GEMM of this many rows takes as long as adding to sums: 8 bytes at 4.2 TB/s
#                  against 2 rows operations at 750 TFLOP/s


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of a tile of logits."""

    rows: int  # tokens, of all blocks together; a multiple of their number
    classes: int  # of the local vocabulary
    fixed: bool = False  # whether all products have so many rows, the last one zeros too


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that tiles are chosen for."""

    rows: int  # of all blocks together
    classes: int  # of the local vocabulary
    width: int  # of the hidden states
    itemsize: int  # bytes of an element of the model
    ranks: int = 1  # that share the vocabulary
    blocks: int = 1  # of rows: as many as ranks with sequence parallelism, else 1
    processors: int = 1  # multiprocessors of the GPU; 1: ignore idle ones
    sum_bytes: int = 0  # bytes of this call's other sums

    def row_bytes(self, whole: bool) -> int:
        """Memory of a row besides its logits: its inputs, outputs and sums."""
        copies = 2 if whole else 1  # the input; its gradient, unless that is a sum
        if self.ranks > 1:
            copies = 4  # the input, the next one, the gradient and the last one, in flight
        sums = 0 if whole else max(4, self.itemsize)
        return self.width * (copies * self.itemsize + sums)


def choose_tiles(sizes: Sizes, whole: bool) -> Tiles:
    """The fastest tiles that fit. `whole`: with all classes, for gradients in forward."""
    # this call's other sums count, unless too little would be left
    free = SCRATCH_BYTES - sizes.sum_bytes
    scratch = free if free >= SCRATCH_BYTES * 3 // 8 else SCRATCH_BYTES
    blocks, a_row = sizes.blocks, sizes.row_bytes(whole)
    share = scratch if whole else scratch // 2
    most = share // (a_row + (sizes.classes * sizes.itemsize if whole else 0))
    if not whole:  # leave room for a wide enough tile
        narrow = min(sizes.classes, _LEAST_CLASSES) * sizes.itemsize
        most = min(most, (scratch - share) // narrow)
    fitting = min(_MOST_ROWS, max(most // _UNIT, 2) * _UNIT)
    chunk = _rows_of_a_block(sizes, max(fitting // blocks, 1)) * blocks
    if whole:
        return Tiles(chunk, sizes.classes)
    room = (scratch - min(share, chunk * a_row)) // (chunk * sizes.itemsize)
    return Tiles(chunk, _even(sizes.classes, max(room // _UNIT, 2) * _UNIT))


def fixed_tiles(sizes: Sizes, whole: bool) -> Tiles:
    """Tiles that depend on neither the number of rows nor the GPU, so that a row has the same bits
    in any call. Products are copied, which takes twice the memory."""
    rows, twice = _FIXED_ROWS * sizes.blocks, 2 * sizes.itemsize
    alike = replace(sizes, rows=rows, itemsize=twice, processors=1, sum_bytes=0)
    return replace(choose_tiles(alike, whole), fixed=True)


def _rows_of_a_block(sizes: Sizes, most: int) -> int:
    """At most `most` rows, such that all chunks take the least time; of equals the smallest."""
    total, unit = sizes.rows // sizes.blocks, max(_UNIT // sizes.blocks, 16)
    if total == 0:
        return 1

    def cost(rows: int) -> float:
        full, remainder = divmod(total, rows)
        return full * _chunk_cost(sizes, rows) + (_chunk_cost(sizes, remainder) if remainder else 0)

    candidates = [*range(unit, min(most, total) + 1, unit), min(most, total)]
    return min(candidates, key=lambda rows: (cost(rows), rows))


def _chunk_cost(sizes: Sizes, per_block: int) -> float:
    """Time of a chunk's accumulating GEMMs, in rows of a GEMM at full efficiency."""
    height, width = _BLOCK
    blocks = ceil(per_block * sizes.blocks / height) * ceil(sizes.width / width)
    waves = ceil(blocks / sizes.processors)
    return waves * sizes.processors * height * width / sizes.width + _SUM_ROWS


def _even(total: int, most: int) -> int:
    """At most `most`, such that pieces of a total are about equal: no short last one."""
    if total <= most:
        return max(total, 1)
    pieces = ceil(total / most)
    return min(ceil(total / pieces / _UNIT) * _UNIT, most)
