"""Which chunks of documents meet if each rank has two of every document (layout
"zigzag-documents").

All documents are split the same way, so all have the same answer to which of the 2P chunks a rank
has and which a query sees. Chunks before a query's own are seen whole. So one kernel call computes
all rows of two shards, with one segment for the queries of a document that see the same keys; key
chunks that several segments see are repeated. Against another rank's keys, every rank computes half
of the pairs: all queries see the first chunk of a lower rank; only the second chunk sees a higher
rank's, both of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_burst.schedule.layout import Chunks, ChunkSegments, chunks_held, chunks_of
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.spec import Spec


@dataclass(frozen=True)
class ChunkPairs:
    """Queries and keys of every document that meet in one kernel call.

    Attributes:
        lies: the key chunks present, by block.
        tile: all queries, and keys in the order that the queries need.
    """

    src_blocks: tuple[Chunks, ...]
    tile: Tile

    @cached_property
    def dst_chunks(self) -> Chunks:
        """The key chunks in the order that the queries need."""
        assert isinstance(self.tile.positions, ChunkSegments)
        return tuple(number for _, keys in self.tile.positions.pairs for number in keys)

    @property
    def is_identity(self) -> bool:
        """Whether the keys present are seen in their order, each once."""
        return self.src_blocks == (self.dst_chunks,)


@lru_cache(maxsize=1024)
def chunk_pairs(
    queries: Chunks, src_blocks: tuple[Chunks, ...], mask: Mask, size: int
) -> ChunkPairs:
    """How queries and keys meet.

    Args:
        queries: their chunks, ascending.
        src_blocks: key chunks, by block; ascending in each. They include all chunks of the queries
            or none.
        mask: of the sequence: causal, full, or a window if keys of all ranks are present.
        size: rows of one chunk of all documents together.
    """
    keys = tuple(sorted(number for block in src_blocks for number in block))
    alike = mask.full or queries == keys
    pairs = ((queries, keys),) if alike else tuple(_pairs(queries, keys))
    seen = mask if queries[0] in keys else Mask(documents=True)
    rows = sum(len(some) for _, some in pairs) * size
    return ChunkPairs(
        src_blocks, Tile(Span(0, len(queries) * size), Span(0, rows), seen, ChunkSegments(pairs))
    )


def _pairs(queries: Chunks, keys: Chunks) -> list[tuple[Chunks, Chunks]]:
    """Segments under a causal mask: queries that see the same keys, excluding their own."""
    found: list[tuple[Chunks, Chunks]] = []
    for number in queries:
        seen = tuple(key for key in keys if key <= number)
        if found and found[-1][1] == seen:
            found[-1] = (*found[-1][0], number), seen
        else:
            found.append(((number,), seen))
    return found


def chunks_in_order(ranks: Iterable[int], cp_size: int) -> Chunks:
    """Chunks of every document that these ranks hold together, ascending."""
    return tuple(sorted(number for rank in ranks for number in chunks_of(rank, cp_size)))


def chunks_by_rank(ranks: Sequence[int], cp_size: int) -> tuple[Chunks, ...]:
    """The same, rank by rank."""
    return tuple(chunks_of(rank, cp_size) for rank in ranks)


@dataclass(frozen=True, slots=True)
class NeededBy:
    """Queries and keys that some rows are sent for, in programs of documents, which slices run too.

    They are the same for all samples. If none of these queries sees any of these keys, nobody reads
    the rows, or they are gradients of zero. So a run whose ranks all know that leaves them out, and
    the receiver has zeros.

    Attributes:
        queries: their chunks, as of `chunks_held`.
        keys: their chunks.
    """

    queries: Chunks
    keys: Chunks

    @classmethod
    def of_ranks(cls, spec: Spec, queries: Iterable[int], keys: Iterable[int]) -> "NeededBy | None":
        """Those of some ranks; None if the program knows which keys are seen."""
        if not spec.mask.documents:
            return None
        size = spec.topology.cp_size
        sides = (
            tuple(sorted(n for rank in set(ranks) for n in chunks_held(spec.layout, rank, size)))
            for ranks in (queries, keys)
        )
        return cls(*sides)

    @classmethod
    def of_circulating(
        cls, spec: Spec, owners: Iterable[int], ranks: Iterable[int]
    ) -> "NeededBy | None":
        """Of what circulates and belongs to some ranks, and of the ranks that it visits."""
        return cls.of_ranks(spec, *((ranks, owners) if spec.kv_circulates else (owners, ranks)))

    @classmethod
    def of_nodes(cls, spec: Spec, away: int, distances: Iterable[int]) -> "NeededBy | None":
        """Of what comes from a rank of another node, and of the nodes that it visits.

        Args:
            spec: of the program.
            away: how many nodes away that node is.
            distances: how many nodes away from it are those that it visits.
        """
        topology = spec.topology
        row, column = topology.coord(spec.cp_rank)
        nodes = (topology.grid[(row - away + n) % topology.inter_size] for n in distances)
        owner = topology.rank_at(row - away, column)
        return cls.of_circulating(spec, (owner,), (rank for node in nodes for rank in node))
