"""Exchanging heads: each rank computes whole sequences of some heads.

A round is a group of key heads with the query heads that use them, dealt out over the ranks. Their
queries, keys and values travel to the rank that computes them, and results travel back. While a
round is computed, the next one's tensors come and the last one's results leave. Every pair of
ranks exchanges 1/P of a shard, so fewer bytes travel than with gathered keys unless heads are
grouped; kernels have the longest calls that there are, and no gradient is a sum over ranks.

Source: Ulysses (arXiv 2309.14509), here in rounds.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.errors import BurstError
from megatron_burst.plan.gather import Piece, pieces_of
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask, Span
from megatron_burst.plan.schedule import Direction


@dataclass(frozen=True, slots=True)
class A2ASchedule:
    """What one rank does in one forward or backward pass that exchanges heads.

    Attributes:
        cp_rank: whose schedule it is.
        cp_size: number of ranks.
        direction: forward or backward.
        mask: which keys a query may see.
        pieces: all ranks' pieces, in the order of the whole sequence.
        rounds: key heads of all ranks together in each round; rank r computes the r-th part.
    """

    cp_rank: int
    cp_size: int
    direction: Direction
    mask: Mask
    pieces: tuple[Piece, ...]
    rounds: tuple[Span, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the whole sequence."""
        return self.pieces[-1].whole.stop

    @property
    def tokens(self) -> int:
        """Rows of a rank's shard."""
        return self.num_rows // self.cp_size


@lru_cache(maxsize=1024)
def a2a_schedule(
    cp_rank: int,
    cp_size: int,
    *,
    layout: Layout,
    mask: Mask,
    tokens: int,
    heads_kv: int,
    heads_per_round: int,
    direction: Direction,
) -> A2ASchedule:
    """The schedule of one rank that exchanges heads with all ranks of its group.

    Args:
        cp_rank: rank in the context-parallel group.
        cp_size: size of that group; divides heads_kv.
        layout: how tokens are dealt out; not striped, whose rows interleave.
        mask: which keys a query may see.
        tokens: rows on each rank.
        heads_kv: key heads.
        heads_per_round: key heads that a rank computes in a round; the last may have fewer.
        direction: forward or backward.

    Raises:
        BurstError: if the heads cannot be dealt out evenly, or the layout is striped.
    """
    if heads_kv % cp_size:
        raise BurstError(
            "burst attention: to exchange heads, the ranks must divide the key heads, because "
            f"each computes equally many; got {heads_kv} key heads on {cp_size} ranks; pass "
            "--burst-intra gather (intra='gather') or auto"
        )
    step, rounds = heads_per_round * cp_size, []
    for start in range(0, heads_kv, step):
        rounds.append(Span(start, min(start + step, heads_kv)))
    pieces = pieces_of(layout, cp_size, tokens)
    return A2ASchedule(cp_rank, cp_size, direction, mask, pieces, tuple(rounds))
