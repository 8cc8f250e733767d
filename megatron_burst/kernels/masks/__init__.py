"""Kernels' masks that are neither a band nor documents: parts of a tile.

`parts` says what a tile's part is. `block_lists` lists the blocks that our Triton kernels compute,
`block_sparse` those of FlashAttention-4, `fa4_mask` is the mask inside of its blocks.
"""
