"""The LM head fused with its loss: only one tile of logits exists at a time.

`linear` has the public functions, `autograd` their autograd functions; `rows` selects tokens and
communicates between tensor-parallel ranks, `tiles` sizes the tiles, `passes` computes, with two
kernels in torch (`statistics`) and in Triton (`fused`), `checks` refuses bad calls. `next_tokens`
makes labels from sharded tokens.
"""
