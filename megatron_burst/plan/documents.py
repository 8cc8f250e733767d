"""Usual packed documents, for choices that are made before any sample is seen.

Figures are of lengths drawn from MagiAttention's published distribution (`benchmarks.documents`).
"""

from math import log2

SHARE = 0.1  # pairs of query and key, of a causal sample's: 0.12 of 32K tokens, 0.1 of 128K


def slowest_share(cp_size: int) -> float:
    """Work of the slowest rank over the mean, where documents begin anywhere and shards stay where
    they are: 1.3 of 2 ranks, 1.7 of 4, 2 of 8."""
    return 1 + log2(cp_size) / 3
