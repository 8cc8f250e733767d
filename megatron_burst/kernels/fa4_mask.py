"""What FlashAttention-4 compiles into its kernels for blocks that are seen in part."""

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def is_seen(
    batch: cute.TensorSSA,
    head: cute.TensorSSA,
    row: cute.TensorSSA,
    key: cute.TensorSSA,
    seqlen_info,
    aux_tensors,
) -> cute.TensorSSA:
    """Whether a row sees a key: a bit of `BlockSparse.bits`. All heads and samples are alike.

    Args:
        batch, head, row, key: int32 of one element.
        seqlen_info: lengths, not needed.
        aux_tensors: `BlockSparse.slots` and `.bits`.
    """
    slots, bits = aux_tensors
    at, of = row[0], key[0]
    word = bits[slots[at // 128, of // 128], at % 128, of % 128 // 32]
    bit = utils.scalar_to_ssa((word >> (of % 32)) & 1, cutlass.Int32)
    return bit != utils.scalar_to_ssa(0, cutlass.Int32)
