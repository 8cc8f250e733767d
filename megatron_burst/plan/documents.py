"""Typical packed documents, for choices made before any sample is seen.

Figures are for lengths drawn from MagiAttention's published distribution (`benchmarks.documents`).
"""

from math import log2

SHARE = 0.1  # pairs of query and key, of a causal sample's: 0.12 of 32K tokens, 0.1 of 128K


def slowest_share(cp_size: int) -> float:
    """Work of the slowest rank over the mean, for documents that start at any token and shards that
    stay in place: 1.3 for 2 ranks, 1.7 for 4, 2 for 8."""
    return 1 + log2(cp_size) / 3
