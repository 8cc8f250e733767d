"""Packed samples and their sharding, by definition, in plain Python; and the loss of one."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.schedule.layout import Layout

IGNORED = -100


@dataclass(frozen=True)
class Packed:
    """Documents of one sample.

    Attributes:
        ids: of the sample.
        spans: (begin, end without padding, end with it) of each document; none: no packing.
        layout: how it is sharded.
        size: over how many ranks.
    """

    ids: Tensor  # [t] or [s, b]
    spans: tuple[tuple[int, int, int], ...]
    layout: str
    size: int

    @property
    def boundaries(self) -> dict[str, Tensor]:
        """The arguments that tell `next_tokens` about the documents."""
        if not self.spans:
            return {}
        lengths = torch.tensor([0] + [stop - start for start, stop, _ in self.spans])
        lies = torch.tensor([0] + [end for _, _, end in self.spans], dtype=torch.int32)
        told = {"cu_seqlens": lengths.cumsum(0).to(torch.int32)}
        if not torch.equal(told["cu_seqlens"], lies):
            told["cu_seqlens_padded"] = lies
        return told

    def labels(self) -> Tensor:
        """Labels by position."""
        labels = torch.full_like(self.ids, IGNORED)
        for start, stop, _ in self.spans or ((0, len(self.ids), 0),):
            for place in range(start, stop - 1):
                labels[place] = self.ids[place + 1]
        return labels

    def places(self, rank: int) -> list[int]:
        """Positions of a rank's rows."""
        if self.layout == Layout.DOCUMENTS:
            return [p for start, _, end in self.spans for p in zigzag(start, end, rank, self.size)]
        tokens = len(self.ids)
        if self.layout == Layout.ZIGZAG:
            return zigzag(0, tokens, rank, self.size)
        if self.layout == Layout.STRIPED:
            return list(range(rank, tokens, self.size))
        return list(range(rank * tokens // self.size, (rank + 1) * tokens // self.size))


def zigzag(start: int, end: int, rank: int, size: int) -> list[int]:
    """Chunks r and 2P-1-r of 2P; everything for a single rank."""
    if size == 1:
        return list(range(start, end))
    chunk = (end - start) // (2 * size)
    first, second = (start + n * chunk for n in (rank, 2 * size - 1 - rank))
    return [*range(first, first + chunk), *range(second, second + chunk)]


def random_packed(seed: int, size: int, layout: str, vocab: int = 40) -> Packed:
    """Documents of 0 tokens up to a few chunks, some padded; or a batch without documents."""
    draw = random.Random(seed)
    grain = 1 if size == 1 else 2 * size
    if layout != Layout.DOCUMENTS and draw.random() < 0.25:
        shape, spans = (grain * draw.randint(1, 4), draw.randint(1, 3)), []
        return Packed(torch.randint(vocab, shape, generator=_torch(seed)), (), layout, size)
    spans, begin = [], 0
    padded = draw.random() < 0.7
    for _ in range(draw.randint(1, 6)):
        if layout == Layout.DOCUMENTS:
            room = grain * draw.choice((0, 1, 1, 2, 5))
        else:
            room = draw.choice((0, 1, 2, 3, 7, 13))
        length = room - draw.randint(0, min(room, grain)) if padded else room
        spans.append((begin, begin + length, begin + room))
        begin += room
    tokens = begin
    if layout != Layout.DOCUMENTS or tokens == 0:  # a tail outside all documents
        if begin == 0:
            spans.append((0, 1, 1))
            begin = 1
        tokens = -(-begin // grain) * grain
        longer = tokens + grain * draw.randint(0, 1)
        if begin * size > longer or size == 1:  # else it must be told as padding
            tokens = longer
    if layout == Layout.DOCUMENTS and tokens > begin:
        spans[-1] = (spans[-1][0], spans[-1][0] + 1, tokens)
    ids = torch.randint(vocab, (tokens,), generator=_torch(seed))
    return Packed(ids, tuple(spans), layout, size)


def _torch(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
