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

    It is called for each element: indices are those of tensors with one axis, because with more the
    strides are 64 bits wide, for which registers do not suffice. `aux_tensors` are
    `BlockSparse.places` and `.bits`.
    """
    places, bits = aux_tensors
    at, of = row[0], key[0]
    place = places[(at >> 7) * places[0] + (of >> 7) + 1]  # blocks of 128
    word = bits[place + ((at & 127) << 2) + ((of >> 5) & 3)]
    bit = utils.scalar_to_ssa((word >> (of & 31)) & 1, cutlass.Int32)
    return bit != utils.scalar_to_ssa(0, cutlass.Int32)
