"""The documents of a packed sample, and how many of a tile's (query, key) pairs they leave.

Figures of typical documents, for choices made before any sample is seen, are for lengths drawn from
MagiAttention's published distribution (`benchmarks.documents`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, pairwise
from math import log2
from pathlib import Path

from megatron_burst.errors import BurstError
from megatron_burst.files import Reader
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Positions, Tile, tile_between

_MOST = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """Consecutive causal documents."""

    edges: tuple[int, ...]  # where they begin, where the last one ends; from 0, not decreasing

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Sample":
        """From boundaries, if they begin with 0 and do not decrease, else from lengths.

        Raises:
            BurstError: if there are no documents, or a length is negative.
        """
        boundaries = list(numbers[:1]) == [0] and list(numbers) == sorted(numbers)
        edges = tuple(numbers) if boundaries else tuple(accumulate(numbers, initial=0))
        if min(numbers, default=-1) < 0 or edges[-1] == 0:
            raise BurstError(
                "plan: --cu-seqlens must have boundaries from 0 on that do not decrease, or "
                "lengths, because documents follow each other; got "
                f"{str(list(numbers[:8]))[1:-1] or 'no number'}; write for example 0, 4096, 6144"
            )
        return cls(edges)

    @property
    def tokens(self) -> int:
        return self.edges[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of documents that have tokens."""
        return tuple(stop - start for start, stop in pairwise(self.edges) if stop > start)

    @property
    def share(self) -> float:
        """Share of the pairs of one causal document as long as the sample."""
        return sum(n * (n + 1) for n in self.lengths) / (self.tokens * (self.tokens + 1))

    def filling(self, tokens: int) -> "Sample":
        """Repeat the documents up to `tokens` tokens, cutting the last one.

        Raises:
            BurstError: if there already are more.
        """
        if self.tokens > tokens:
            raise BurstError(
                "plan: --cu-seqlens must fit into --seq-length, because documents are packed into "
                f"samples of that length; got {self.tokens} tokens of documents and {tokens} of a "
                "sample; raise --seq-length, or leave it out for attention of this sample alone"
            )
        lengths = self.lengths * -(-tokens // self.tokens)
        edges = [edge for edge in accumulate(lengths, initial=0) if edge < tokens]
        return Sample((*edges, tokens))

    def padded(self, each: int) -> "Sample":
        """With every document padded to a multiple."""
        return Sample((0, *accumulate(-(-length // each) * each for length in self.lengths)))

    def ended(self, multiple: int) -> "Sample":
        """With the sample padded to a multiple by a document of its own."""
        more = -self.tokens % multiple
        return Sample((*self.edges, self.tokens + more)) if more else self

    def within(self, places: Positions) -> Iterator[tuple[int, range]]:
        """Ranges of positions split at documents, each with its document's index."""
        for some in places:
            at = some.start
            while at < some.stop:
                document = bisect_right(self.edges, at) - 1
                stop = min(some.stop, self.edges[document + 1])
                yield document, range(at, stop)
                at = stop

    def pairs(self, tile: Tile) -> float:
        """Pairs of queries and keys that a tile computes.

        If ranks have chunks of every document, all are split alike: each document has the square of
        its share of the sample in a tile.
        """
        if not isinstance(tile.positions, tuple):
            squares = sum(length * length for length in self.lengths)
            return tile.pairs * squares / self.tokens**2
        return _pairs(self, *tile.positions)


@lru_cache(maxsize=1 << 16)
def _pairs(sample: Sample, queries: Positions, keys: Positions) -> int:
    """Pairs of queries and keys at or before their positions, in the same document."""
    by_document: dict[int, list[range]] = {}
    for document, some in sample.within(keys):
        by_document.setdefault(document, []).append(some)
    tiles = (
        tile_between(rows, some, Mask.CAUSAL)
        for document, rows in sample.within(queries)
        for some in by_document.get(document, ())
    )
    return sum(tile.pairs for tile in tiles if tile)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a job's samples are packed."""

    layout: Layout  # DOCUMENTS: each sharded individually (THD); ZIGZAG: they start at any token
    sample: Sample | None = None  # the documents of every sample; None: unknown, assumed typical

    def share(self, tokens: int) -> float:
        """Share of the pairs of a causal sequence of so many tokens that the documents have."""
        return self.sample.share if self.sample else typical_share(tokens)

    def sharded(self, cp_size: int) -> Sample | None:
        """The sample with the padding that `cp_size` ranks need."""
        if not self.sample:
            return None
        chunks = 2 * cp_size
        by_document = self.layout is Layout.DOCUMENTS
        return self.sample.padded(chunks) if by_document else self.sample.ended(chunks)


def numbers_in(path: Path) -> list[int]:
    """The whole numbers in a file: text with commas or blanks between them, .npy or .pt.

    Raises:
        BurstError: if it cannot be read, or has something else.
    """
    reader = Reader(
        "plan: --cu-seqlens", str(path), "they are document boundaries or lengths",
        "write for example 0, 4096, 6144", most=64 << 20,
    )  # fmt: skip
    data = reader.data()
    must = "be a file of whole numbers up to 1024G (text, .csv, .npy or .pt)"
    try:
        if path.suffix == ".npy":
            from numpy import load

            values = load(BytesIO(data), allow_pickle=False).ravel().tolist()
        elif path.suffix == ".pt":
            import torch

            values = torch.as_tensor(torch.load(BytesIO(data), weights_only=True)).ravel().tolist()
        else:
            values = data.decode().replace(",", " ").split()
        numbers = [int(number) for number in values]
        if not all(
            float(number) == float(one) for number, one in zip(values, numbers, strict=True)
        ):
            raise ValueError("a fraction")
    except Exception as error:  # what files and their readers raise has no common type
        raise reader.refusal(must, str(error) or repr(error)) from None
    if max(map(abs, numbers), default=0) > _MOST:
        raise reader.refusal(must, max(numbers, key=abs))
    return numbers


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
