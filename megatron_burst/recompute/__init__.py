"""Keeps attention's results across activation recomputation, so that replays need not compute them.

`frames` pairs the first pass of a checkpointed function with its replay; `recording` is one kept
call of an attention function, made of the references in `saved`; `keep` joins the two. `keeping`
says how much is kept and where; `half` keeps the later rows only; `offload` is the host memory
that kept tensors may wait in.
"""
