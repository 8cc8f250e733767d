"""How much is computed at once: tiles of logits that fit a fixed amount of memory.

A GEMM that adds [classes, h] float32 sums reads and writes 8 bytes for 2 rows operations, so tiles
have many rows; one that adds [rows, h] sums likewise wants many classes.
"""

from dataclasses import dataclass
from math import ceil

SCRATCH_BYTES = 896 << 20  # of the 1 GiB that is promised; the rest is for statistics of all rows
_MOST_ROWS = 8192  # at 700 TFLOP/s and 4 TB/s adding weight gradients is then 9 % of their GEMM
_LEAST_CLASSES = 4096
_UNIT = 256  # rows and classes come in multiples: whole tiles for the GEMMs


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of a tile of logits.

    Attributes:
        rows: tokens, of all blocks together; a multiple of their number.
        classes: of the local vocabulary.
    """

    rows: int
    classes: int


def choose_tiles(
    shape: tuple[int, int, int], itemsize: int, blocks: int, whole: bool, chunk_tokens: int | None
) -> Tiles:
    """The largest tiles that fit.

    Args:
        shape: rows of all blocks, classes of the local vocabulary, width of the hidden states.
        itemsize: bytes of an element of the model.
        blocks: in which rows come.
        whole: whether a tile must have all classes, for its gradient in forward.
        chunk_tokens: rows, if they are not to be chosen.
    """
    rows, classes, width = shape
    # input, the next one on its way, gradient and its sums, the last one on its way
    a_row = width * (4 * itemsize + max(4, itemsize))
    if whole:
        a_row += classes * itemsize
    share = SCRATCH_BYTES if whole else SCRATCH_BYTES // 2
    most = share // a_row
    if not whole:  # leave room for a tile that is not too narrow
        most = min(most, (SCRATCH_BYTES - share) // (min(classes, _LEAST_CLASSES) * itemsize))
    fitting = chunk_tokens or min(_MOST_ROWS, max(most // _UNIT, 1) * _UNIT)
    per_block = max(fitting // blocks, 1)
    if not chunk_tokens:
        per_block = _even(rows // blocks, per_block)
    chunk = per_block * blocks
    if whole:
        return Tiles(chunk, classes)
    room = (SCRATCH_BYTES - min(share, chunk * a_row)) // (chunk * itemsize)
    return Tiles(chunk, _even(classes, max(room // _UNIT, 1) * _UNIT))


def _even(total: int, most: int) -> int:
    """At most `most`, so that pieces of a total are about equal: no short one at the end."""
    if total <= most:
        return max(total, 1)
    pieces = ceil(total / most)
    return min(ceil(total / pieces / 128) * 128, most)
