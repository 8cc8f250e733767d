"""FlashAttention-4's forward with the largest score of each row (not on the reading path).

The kernel for Hopper keeps the largest score of each row for its softmax, and forgets it. A
subclass stores it where the log-sum-exp would be of as many more heads.
"""

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import interface
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.pack_gqa import PackGQA
from quack import layout_utils
from torch import Tensor


class ForwardWithLargest(FlashAttentionForwardSm90):
    """`mLSE` has memory for twice the heads: log-sum-exps, then largest products of q and k."""

    def first_half_block_overlap(self, *args: Any, softmax: Any, **options: Any) -> Any:
        self._largest = softmax.row_max  # registers of the tile, which its epilogue reads
        return super().first_half_block_overlap(*args, softmax=softmax, **options)

    def mma_one_n_block(self, *args: Any, softmax: Any, **options: Any) -> Any:
        self._largest = softmax.row_max
        return super().mma_one_n_block(*args, softmax=softmax, **options)

    def epilogue(
        self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx,
        m_block, head_idx, batch_idx,
    ):  # fmt: skip
        place = seqlen, tiled_mma, tidx, m_block, head_idx, batch_idx
        self._store_largest(mLSE, self._largest, *place)
        super().epilogue(
            acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx,
            m_block, head_idx, batch_idx,
        )  # fmt: skip

    @cute.jit
    def _store_largest(
        self, mLSE: cute.Tensor, largest: cute.Tensor, seqlen, tiled_mma: cute.TiledMma,
        tidx: cutlass.Int32, m_block: cutlass.Int32, head_idx: cutlass.Int32,
        batch_idx: cutlass.Int32,
    ):  # fmt: skip
        """Store a tile's values as the kernel stores its log-sum-exps, further by all heads."""
        rows = seqlen.offset_batch_Q(mLSE, batch_idx, dim=2)[None, head_idx + mLSE.shape[1]]
        if cutlass.const_expr(self.pack_gqa):
            packed = PackGQA(
                self.tile_m, self.tile_hdimv, self.check_hdim_v_oob, self.qhead_per_kvhead
            )
            packed.store_LSE(rows, largest, tiled_mma, tidx, m_block, seqlen.seqlen_q)
        else:
            tile = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
            places = layout_utils.reshape_acc_to_mn(tiled_mma.get_slice(tidx).partition_C(tile))
            if places[0][1] == 0:  # one thread of each row
                for m in cutlass.range_constexpr(cute.size(largest)):
                    row = m_block * self.tile_m + places[m, 0][0]
                    if row < seqlen.seqlen_q:
                        rows[row] = largest[m]


def empty_lse(q: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Memory for lse, [b, h, n] or packed [h, n], and behind it for the largest product of each row
    [b, h, n], -inf where the kernel writes none."""
    batch, rows, heads = q.shape[:3]
    memory = q.new_full((batch, 2 * heads, rows), -torch.inf, dtype=torch.float32)
    lse, largest = memory.split(heads, dim=1)
    return (lse[0] if packed else lse), largest


@cache  # of this process
def forward_with_largest() -> Callable[..., Any]:
    """`flash_attn.cute.interface._flash_attn_fwd`, compiling the kernel above into a cache of its
    own; its `lse` must be the first half of memory for twice the heads."""
    plain = interface._flash_attn_fwd
    scope = {**vars(interface), FlashAttentionForwardSm90.__name__: ForwardWithLargest}
    function = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__)
    function.__kwdefaults__ = plain.__kwdefaults__
    scope[plain.__name__] = function  # which looks up its cache under this name
    # which names what flash_attn's own sources say, but not this file
    digest = blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()
    function.compile_cache = get_jit_cache(f"fwd_with_largest_{digest}")
    return function
