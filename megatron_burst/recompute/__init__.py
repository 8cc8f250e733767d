"""Keeps attention's results across activation recomputation, which then need not compute them.

`keeping` pairs the first pass of a checkpointed function with its recomputation and says how much
is kept and where; `recording` is one kept call of an attention function; `keep` joins the two;
`half` keeps the later rows only; `offload` is host memory.
"""
