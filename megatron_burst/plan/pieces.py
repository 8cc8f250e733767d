"""Pieces of shards in the order of the sequence, and the tiles between two sets of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.plan.layout import Layout, positions
from megatron_burst.plan.mask import Mask, Span, Tile
from megatron_burst.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one rank's shard that are neighbours in the whole sequence.

    Attributes:
        holder: cp rank that has them while they are worked on.
        rows: in the shard.
        whole: among all rows of the shards of a host, in the order of the sequence.
        position: of the first one in the whole sequence.
    """

    holder: int
    rows: Span
    whole: Span
    position: int


def pieces_of(
    layout: Layout, cp_size: int, tokens: int, owners: Sequence[int], holders: Sequence[int]
) -> tuple[Piece, ...]:
    """The pieces of some ranks' shards in the order of the sequence.

    Args:
        layout: how tokens are dealt out.
        cp_size: size of the context-parallel group.
        tokens: rows on each rank.
        owners: whose shards.
        holders: who has them; one for each.

    Raises:
        BurstError: if the layout is striped or cannot hold that many rows.
    """
    if layout is Layout.STRIPED:
        raise BurstError(
            "burst attention: gathered keys must lie in the order of the sequence, because a "
            "query then sees one range of them; got layout striped; pass intra='ring' "
            "(--burst-intra ring), or deal tokens out in zigzag"
        )
    found = []
    for owner, holder in zip(owners, holders, strict=True):
        start = 0
        for span in positions(layout, owner, cp_size, tokens):
            found.append((span.start, holder, Span(start, start + len(span))))
            start += len(span)
    pieces, start = [], 0
    for position, holder, rows in sorted(found, key=lambda entry: entry[0]):
        pieces.append(Piece(holder, rows, Span(start, start + len(rows)), position))
        start += len(rows)
    return tuple(pieces)


def host_pieces(
    topology: Topology, row: int, layout: Layout, tokens: int
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces that the ranks of a host work with, by how many hosts they have come."""
    hosts = range(topology.inter_size)
    return tuple(
        pieces_of(
            layout,
            topology.cp_size,
            tokens,
            topology.grid[(row - away) % topology.inter_size],
            topology.grid[row],
        )
        for away in hosts
    )


def tiles_between(
    queries: Sequence[tuple[Span, int]], keys: Sequence[Piece], mask: Mask
) -> tuple[Tile, ...]:
    """Tiles of query rows over the keys of another host: each sees the keys before it, a prefix.

    Args:
        queries: rows of the query tensor, and the position of the first one, in order.
        keys: of the other host; no query lies among the rows of a piece.
        mask: which keys a query may see.
    """
    found: list[tuple[Span, int]] = []
    for rows, position in queries:
        seen = [k.whole.stop for k in keys if mask is Mask.FULL or k.position < position]
        stop = seen[-1] if seen else 0
        if found and found[-1][1] == stop and found[-1][0].stop == rows.start:
            found[-1] = Span(found[-1][0].start, rows.stop), stop
        else:
            found.append((rows, stop))
    return tuple(Tile(rows, Span(0, stop), Mask.FULL) for rows, stop in found if stop)
