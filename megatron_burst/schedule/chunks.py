"""Which query chunks see which key chunks in the layout "zigzag-documents", where rank r has chunks
r and 2P-1-r of every document.

All documents are split the same way, so one answer holds for all. A kernel call computes all rows
of two shards, with one segment for the queries of a document that see the same keys; key chunks
that several segments see are repeated. Under a causal mask, with P = 4:

    queries 1, 6 and keys 0, 7 (a lower rank's):   1, 6 see 0         one segment
    queries 1, 6 and keys 2, 5 (a higher rank's):  1 sees none; 6 sees 2, 5
    queries 1, 6 and keys 1, 6 (its own):          causal, one segment

So a rank computes half of the pairs against each other rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_burst.schedule.layout import Chunks, ChunkSegments, chunks_held, chunks_of
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.spec import Spec


@dataclass(frozen=True)
class ChunkPairs:
    """The query and key chunks of every document in one kernel call."""

    src_blocks: tuple[Chunks, ...]  # the key chunks in memory, by block
    tile: Tile  # all queries, and keys in the order of dst_chunks

    @cached_property
    def dst_chunks(self) -> Chunks:
        """The key chunks in the order that the queries need."""
        assert isinstance(self.tile.positions, ChunkSegments)
        return tuple(chunk for _, keys in self.tile.positions.pairs for chunk in keys)

    @property
    def is_identity(self) -> bool:
        """Whether the queries need the keys in memory order, each key once."""
        return self.src_blocks == (self.dst_chunks,)


@lru_cache(maxsize=1024)
def chunk_pairs(
    queries: Chunks, src_blocks: tuple[Chunks, ...], mask: Mask, size: int
) -> ChunkPairs:
    """The segments and the tile of these queries and keys.

    Args:
        queries: chunks, ascending.
        src_blocks: key chunks, by block; ascending in each. They include all chunks of the queries
            or none.
        mask: causal or full; a window only over the keys of all ranks, because it is counted in
            rows of the whole document.
        size: rows of one chunk of all documents together.
    """
    keys = tuple(sorted(chunk for block in src_blocks for chunk in block))
    segments: tuple[tuple[Chunks, Chunks], ...] = ((queries, keys),)
    if not mask.full and queries != keys:
        segments = tuple(_causal_segments(queries, keys))
    tile_mask = mask if queries[0] in keys else Mask(documents=True)
    q = Span(0, len(queries) * size)
    kv = Span(0, sum(len(visible) for _, visible in segments) * size)
    return ChunkPairs(src_blocks, Tile(q, kv, tile_mask, ChunkSegments(segments)))


def _causal_segments(queries: Chunks, keys: Chunks) -> list[tuple[Chunks, Chunks]]:
    """Query chunks that see the same of these keys, with those keys."""
    segments: list[tuple[Chunks, Chunks]] = []
    for query in queries:
        visible = tuple(key for key in keys if key <= query)
        if segments and segments[-1][1] == visible:
            segments[-1] = (*segments[-1][0], query), visible
        else:
            segments.append(((query,), visible))
    return segments


def chunks_in_order(ranks: Iterable[int], cp_size: int) -> Chunks:
    """Chunks of every document that these ranks hold together, ascending."""
    return tuple(sorted(chunk for rank in ranks for chunk in chunks_of(rank, cp_size)))


def chunks_by_rank(ranks: Sequence[int], cp_size: int) -> tuple[Chunks, ...]:
    """Chunks of every document that these ranks hold, rank by rank."""
    return tuple(chunks_of(rank, cp_size) for rank in ranks)


@dataclass(frozen=True, slots=True)
class NeededBy:
    """The chunks of queries and keys (`chunks_held`) that rows are sent for, in programs of
    documents and slices, where only a sample knows which query sees which key.

    If none of these queries sees any of these keys, nobody reads the rows, or they are gradients of
    zero. All ranks know the sample, so a run leaves such rows out, and the receiver has zeros.
    """

    queries: Chunks
    keys: Chunks

    @classmethod
    def of_ranks(cls, spec: Spec, queries: Iterable[int], keys: Iterable[int]) -> "NeededBy | None":
        """The chunks of these ranks' queries and keys; None if the program knows the mask."""
        if not spec.mask.documents:
            return None
        size = spec.topology.cp_size
        sides = (
            tuple(sorted(n for rank in set(ranks) for n in chunks_held(spec.layout, rank, size)))
            for ranks in (queries, keys)
        )
        return cls(*sides)

    @classmethod
    def of_circulating(cls, spec: Spec, owner: int, ranks: Iterable[int]) -> "NeededBy | None":
        """The owner's circulating shard, at these ranks."""
        owners = (owner,)
        return cls.of_ranks(spec, *((ranks, owners) if spec.queries_stay else (owners, ranks)))

    @classmethod
    def of_nodes(cls, spec: Spec, offset: int, hops: Iterable[int]) -> "NeededBy | None":
        """The piece from `offset` nodes away, at the nodes that it reaches after so many hops."""
        topology = spec.topology
        row, column = topology.coord(spec.cp_rank)
        nodes = (topology.grid[(row - offset + n) % topology.inter_size] for n in hops)
        owner = topology.rank_at(row - offset, column)
        return cls.of_circulating(spec, owner, (rank for node in nodes for rank in node))
