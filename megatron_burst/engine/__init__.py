"""Runs programs: one loop, a function an operation, and what forward leaves for backward.

`setup` resolves how a call runs; `documents` has what follows from where the documents of a packed
sample begin. Nothing here knows of autograd or Megatron.
"""
