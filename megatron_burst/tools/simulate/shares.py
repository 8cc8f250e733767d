"""Typical packed documents, for choices made before any sample is seen.

Figures are for lengths drawn from MagiAttention's published distribution (`benchmarks.documents`).
"""

from math import log2


def typical_share(tokens: int) -> float:
    """Query-key pairs of a packed sample of `tokens` tokens, as a share of a causal sequence's.

    Documents end, so queries of longer samples hardly see more keys. Drawn samples of 32K, 64K ...
    4M tokens have 0.122, 0.111, 0.097, 0.076, 0.044, 0.026, 0.018, 0.009.
    """
    return 1 / (8 + tokens / 40_000)


def slowest_share(cp_size: int) -> float:
    """Work of the slowest rank over the mean, for documents that start at any token and shards that
    stay in place: 1.3 for 2 ranks, 1.7 for 4, 2 for 8."""
    return 1 + log2(cp_size) / 3
