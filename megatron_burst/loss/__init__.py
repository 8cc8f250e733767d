"""The LM head and its loss in one: logits exist a tile at a time, whatever the number of tokens.

`linear` has the public functions, `autograd` their autograd functions; `rows` says which tokens
count and what travels between tensor-parallel ranks, `tiles` how much is computed at once, `passes`
is the computation, `statistics` and `fused` its two kernels in torch and in Triton, `main_grad`
where the weight's gradient goes, `checks` what is refused. `next_tokens` makes labels of tokens
that are sharded.
"""
