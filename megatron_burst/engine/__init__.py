"""Runs programs: one loop, one function per operation, and what forward saves for backward.

`setup` resolves how a call runs; `documents` derives everything that depends on the document
boundaries of a packed sample. Nothing here knows about autograd or Megatron.
"""
