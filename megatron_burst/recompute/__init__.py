"""Keeps attention's results across activation recomputation, so that replays need not compute them.

`frames` pairs the first pass of a checkpointed function with its replay; `recording` is one kept
call of an attention function; `keep` joins the two; `half` keeps the later rows only; `host` is the
memory that kept tensors may wait in.
"""
