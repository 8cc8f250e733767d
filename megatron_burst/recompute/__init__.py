"""Keeps attention's results so that activation recomputation skips attention.

`keeping` pairs the first pass of a checkpointed function with its recomputation and decides how
much is kept and where; `recording` is one kept call of an attention function; `keep` joins the two;
`later` keeps only the later half of the rows; `inputs` puts inputs of checkpoints on the host;
`offload` manages host memory.
"""
