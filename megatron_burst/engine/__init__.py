"""Runs programs: one loop, one function per operation, and what forward saves for backward.

`passes` has both passes of a call as autograd sees them; `executor` is the loop, `operations` has
the function of each operation. Nothing here knows about Megatron.
"""
