"""Which positions of the sequence a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from megatron_burst.errors import BurstError, nearest_multiples


class Layout(StrEnum):
    """How the tokens of a sequence are sharded over the ranks of a context-parallel group."""

    ZIGZAG = "zigzag"  # rank r holds chunks r and 2P-1-r of 2P: Megatron-Core's layout
    CONTIGUOUS = "contiguous"  # rank r holds chunk r of P
    STRIPED = "striped"  # rank r holds positions r, r+P, r+2P, ...
    DOCUMENTS = "zigzag-documents"  # rank r holds chunks r and 2P-1-r of each document


Chunks = tuple[int, ...]  # indices of chunks, of which every document has 2P; for DOCUMENTS


@dataclass(frozen=True, slots=True)
class ChunkSegments:
    """The segments of each document in a kernel call for DOCUMENTS."""

    pairs: tuple[tuple[Chunks, Chunks], ...]  # query chunks and key chunks, in memory order


def positions(layout: Layout, cp_rank: int, cp_size: int, tokens: int) -> tuple[range, ...]:
    """Positions in the whole sequence of a rank's rows, in the order of the rows.

    Raises:
        BurstError: if the layout cannot hold `tokens` rows on each rank.
        ValueError: for DOCUMENTS (see `positions_in_documents`).
    """
    check_tokens(layout, cp_size, tokens)
    if cp_size == 1:
        return (range(tokens),)
    match layout:
        case Layout.ZIGZAG:
            chunk = tokens // 2
            starts = (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk)
            return tuple(range(start, start + chunk) for start in starts)
        case Layout.CONTIGUOUS:
            return (range(cp_rank * tokens, (cp_rank + 1) * tokens),)
        case Layout.STRIPED:
            return (range(cp_rank, cp_size * tokens, cp_size),)
        case Layout.DOCUMENTS:
            raise ValueError("only a run knows where documents begin")


def chunks_of(cp_rank: int, cp_size: int) -> Chunks:
    """Chunks of every document that a rank holds for DOCUMENTS."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def chunks_held(layout: Layout, cp_rank: int, cp_size: int) -> Chunks:
    """Which chunks of the sample a rank holds, or of every document for DOCUMENTS, numbered in
    sequence order; not for STRIPED."""
    return (cp_rank,) if layout is Layout.CONTIGUOUS else chunks_of(cp_rank, cp_size)


def positions_of_chunks(
    boundaries: Sequence[int], chunks: Chunks, cp_size: int
) -> tuple[range, ...]:
    """Positions of these chunks of every document, document by document.

    Args:
        boundaries: where documents begin and where the last one ends; document lengths are
            multiples of 2 * cp_size.
    """
    ranges = []
    for start, stop in pairwise(boundaries):
        size = (stop - start) // (2 * cp_size)
        ranges += [range(start + n * size, start + (n + 1) * size) for n in chunks]
    return tuple(ranges)


def positions_in_documents(
    boundaries: Sequence[int], cp_rank: int, cp_size: int
) -> tuple[range, ...]:
    """`positions` for DOCUMENTS; arguments as for `positions_of_chunks`."""
    return positions_of_chunks(boundaries, chunks_of(cp_rank, cp_size), cp_size)


def check_tokens(layout: Layout, cp_size: int, tokens: int) -> None:
    """Refuse a number of rows per rank that the layout cannot hold.

    Raises:
        BurstError: if there are no rows, or an odd number of them on each of several ranks in
            zigzag.
    """
    if tokens < 1:
        raise BurstError(
            "burst attention: a rank must hold at least one token, because an empty shard has "
            f"nothing to attend to; got {tokens} tokens on a rank; pass a longer sequence"
        )
    if layout in (Layout.ZIGZAG, Layout.DOCUMENTS) and cp_size > 1 and tokens % 2:
        raise BurstError(
            "burst attention: the number of tokens on a rank must be a multiple of 2, because "
            f"zigzag gives each rank two chunks; got {tokens} tokens on a rank and context "
            f"parallel size {cp_size}; pad the sample to a "
            f"{nearest_multiples(tokens * cp_size, 2 * cp_size)} (in Megatron --seq-length)"
        )
