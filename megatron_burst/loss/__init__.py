"""The LM head fused with its loss: only one tile of logits exists at a time.

`linear` and `distillation` have the public functions, `autograd` their autograd functions;
`supervised` counts tokens, `rows` selects them, `tensor_parallel` communicates, `tiles` sizes the
tiles, `passes` computes, with kernels in torch (`statistics`) and in Triton (`fused`), `classes`
and `top_k` where each token has several classes, `checks` refuses bad calls. `next_tokens` makes
labels from sharded tokens.
"""
