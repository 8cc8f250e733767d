"""The LM head and its loss in one: logits exist a tile at a time, whatever the number of tokens.

`linear` has the public functions and the autograd function; `rows` says which tokens count, `tiles`
how much is computed at once, `parallel` what travels between tensor-parallel ranks, `passes` is the
computation, `statistics` and `fused` its two kernels in torch and in Triton, `weight_grad` where
the weight's gradient goes, `checks` what is refused.
"""
