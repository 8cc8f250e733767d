"""The documents of a packed sample on the device, in the form that kernels and programs need."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron_burst.comm.store import BoundedDict
from megatron_burst.comm.transport import Placement
from megatron_burst.errors import require
from megatron_burst.kernels.interface import Backend
from megatron_burst.kernels.masks.parts import on_device
from megatron_burst.kernels.visible import Segments, Visible
from megatron_burst.masks import sample as samples
from megatron_burst.masks.sample import Sample, in_rows
from megatron_burst.schedule import layout as layouts
from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.layout import Chunks, ChunkSegments, Layout
from megatron_burst.schedule.mask import Band, Positions, TilePositions

type Pair = tuple[Tensor, Tensor]


def documents_of(
    cache: BoundedDict, sample: Sample, sizes: tuple[int, int], layout: str, like: Tensor
) -> "Documents":
    """The documents of a sample, built once for all layers, which pass the same boundaries, on the
    device of a tensor and its current stream; other arguments and errors as of `Documents`."""
    # by stream too: tensors are ready, and their memory safe to use, on the stream that made them
    key = *map(samples.identity, sample), sizes, layout, Placement.of(like)
    documents = cache.recent(key)
    if documents is None:
        for before in cache.values():
            before.checked_text()
        documents = cache[key] = Documents(sample, sizes, Layout(layout), like.device)
    return documents


class Documents:
    """Where the documents of one sample begin, and everything derived from that, once per sample.

    Computed on the device without synchronizing the host.

    Args:
        sample: from the caller; copied, because the caller may write the next sample's boundaries
            into the same tensors; kept alive, so that tensors on a GPU are recognized again.
        sizes: tokens on a rank, and ranks.
        layout: how tokens are sharded.
        device: where kernels run.
        who: subject of error messages.

    Attributes:
        text: what ranks compare, if the boundaries came on the CPU.
        parents: of the documents, if they are segments of a tree, as `slices_of` makes slices; -1
            for none.

    Raises:
        BurstError: if boundaries that are on the CPU are invalid.
    """

    def __init__(self, sample: Sample, sizes: tuple[int, int], layout: Layout, device: torch.device,
                 who: str = "burst attention") -> None:  # fmt: skip
        require(who, chain(samples.of_tensors(sample, device), samples.of_parents(sample)))
        self.parents = None if sample.parents is None else samples.listed_of(sample.parents)
        self._who, self._sample, self._layout = who, sample, layout
        (rows, self._cp_size), self._terms = sizes, None
        self._tokens = rows * self._cp_size
        self._segments: dict[tuple[Positions, Positions, int] | ChunkSegments, Segments] = {}
        self._arranged: dict[tuple, Tensor] = {}
        self._restored: dict[tuple, Tensor] = {}
        bounds = sample.cu_seqlens, sample.padded
        self._take_boundaries(bounds, device)
        longest = sample.longest if self.text is None else None
        self._longest = longest or self._find_longest()
        self._tail_segments = -(-self._tokens // longest) if longest else 1
        to_device = dict(device=device, dtype=torch.int32, non_blocking=True, copy=True)
        pairs = zip(bounds, self._host, strict=True)
        sources = (x if x is None or x.is_cuda else copy for x, copy in pairs)
        real_starts, padded_starts = (x if x is None else x.to(**to_device) for x in sources)
        self._row_starts = real_starts if padded_starts is None else padded_starts
        self._lengths = None if padded_starts is None else real_starts.diff()

    def _take_boundaries(self, bounds: Sequence[Tensor | None], device: torch.device) -> None:
        """Copy boundaries to the host, from a GPU without waiting; check those on the host."""
        on_cpu = all(x is None or x.device.type == "cpu" for x in bounds)
        self._host = [x if x is None else _to_host(x, device) for x in bounds]
        self._copied = None if on_cpu else torch.cuda.current_stream().record_event()
        self.text = self.checked_text() if on_cpu else None

    def _find_longest(self) -> int:
        """Rows of the longest document; rows after the last one count as a document."""
        self.checked_text()
        starts = next(x for x in reversed(self._host) if x is not None)
        return max(int(starts.diff().max()), self._tokens - int(starts[-1]))

    def checked_text(self) -> Mapping[str, str]:
        """What ranks compare.

        Raises:
            BurstError: if the boundaries are invalid.
        """
        if self._terms is None:
            if self._copied:
                self._copied.synchronize()
            starts, padded = self._host
            sizes = self._tokens, self._cp_size, self._sample.longest
            require(self._who, samples.of_values(starts, padded, self._layout, sizes))
            text = f"{starts.tolist()} {padded.tolist() if padded is not None else ''}"
            self._terms = {"cu_seqlens": abbreviated(text, len(starts) - 1)}
            if self.parents is not None:
                self._terms["prefix_tree"] = abbreviated(f"{self.parents}", len(starts) - 1)
        return self._terms

    def is_seen(self, between: NeededBy) -> bool:
        """Whether some queries see some keys: not known, as boundaries may be on a GPU."""
        return True

    def visible(self, band: Band, places: TilePositions, unit: int, run: Backend) -> Visible:
        """What a kernel call sees with queries and keys at these positions, in units of rows, or in
        these chunks of every document."""
        if isinstance(places, ChunkSegments):
            return Visible(band.left, band.right, self.segments_of(places))
        return Visible(band.left, band.right, self.segments(*places, unit))

    def segments(self, q: Positions, keys: Positions, unit: int = 1) -> Segments:
        """Segments of a kernel call with queries and keys at these positions, in units of rows.

        A document's segment has the rows of the call that lie in the document. It begins behind as
        many rows of the call as lie before the document, and may be empty.
        """
        call = q, keys, unit
        if call not in self._segments:
            (of_q, of_keys), q, keys = self._edges, in_rows(q, unit), in_rows(keys, unit)
            most = (min(self._longest, sum(map(len, side))) for side in (q, keys))
            self._segments[call] = Segments(rows_before(of_q, q), rows_before(of_keys, keys), *most)
        return self._segments[call]

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor]:
        """Boundaries of the segments of queries, and of keys.

        Padding is not a document: its queries form a segment without keys, its keys one without
        queries. So do rows after the last document, in segments no longer than a document, because
        kernels are launched for that many rows per segment.
        """
        starts, rows = self._row_starts, self._tokens - self._row_starts[-1:]
        before = torch.arange(self._tail_segments, device=starts.device) * self._longest
        full = (rows - before).clamp_(0, self._longest)
        real, begins = torch.zeros_like(full), starts
        if self._lengths is not None:
            full, real = torch.cat((starts.diff(), full)), torch.cat((self._lengths, real))
            begins = starts[:1]
        edges = _with_padding((full, real), (full, real))
        return tuple(torch.cat((begins[:-1], begins[-1:] + edge)) for edge in edges)

    def segments_of(self, runs: ChunkSegments) -> Segments:
        """Segments of a kernel call over chunks of every document."""
        if runs not in self._segments:
            sides = tuple(zip(*runs.pairs, strict=True))
            of_q, of_keys = (self._lengths_of(side) for side in sides)
            if self._lengths is None:
                edges = [_running(full) for full, _ in (of_q, of_keys)]
            else:
                edges = _with_padding(of_q, of_keys)
            longest_chunk = -(-self._longest // (2 * self._cp_size))
            most = [longest_chunk * max(map(len, side)) for side in sides]
            self._segments[runs] = Segments(*(edge.int() for edge in edges), *most)
        return self._segments[runs]

    def _lengths_of(self, segments: Sequence[Chunks]) -> tuple[Tensor, Tensor | None]:
        """Rows of each segment, with padding and without: [segments]."""
        chunk = self._chunk_starts.diff()
        full = torch.stack([chunk * len(numbers) for numbers in segments], 1).flatten()
        if self._lengths is None:
            return full, None
        every = self._table([number for numbers in segments for number in numbers])
        remaining = self._lengths.long().unsqueeze(1) - chunk.unsqueeze(1) * every
        real = torch.minimum(remaining.clamp_(min=0), chunk.unsqueeze(1))
        parts = real.split([len(numbers) for numbers in segments], 1)
        return full, torch.stack([part.sum(1) for part in parts], 1).flatten()

    def arrange_index(self, src_blocks: tuple[Chunks, ...], dst_chunks: Chunks) -> Tensor:
        """Row indices that arrange chunks of every document: int64 [rows].

        Args:
            src_blocks: the chunks present, by block.
            dst_chunks: the chunks wanted.
        """
        if (src_blocks, dst_chunks) not in self._arranged:
            where, first = {}, 0
            for block in src_blocks:
                where |= {n: (first, len(block), place) for place, n in enumerate(block)}
                first += len(block) * self._chunk_rows
            table = self._table([where[number] for number in dst_chunks])
            begin, entry, chunk, row = self._rows_of(len(dst_chunks))
            begins, counts, places = table[entry].unbind(1)
            rows = begins + begin * counts + places * chunk + row
            self._arranged[src_blocks, dst_chunks] = rows.clamp_(0, first - 1)
        return self._arranged[src_blocks, dst_chunks]

    def restore_index(self, src_blocks: tuple[Chunks, ...], dst_chunks: Chunks) -> Tensor:
        """For each source row, the arranged rows that copy it: int64 [copies, rows]; -1: none."""
        if (src_blocks, dst_chunks) not in self._restored:
            most, count, rows = max(map(dst_chunks.count, dst_chunks)), len(dst_chunks), []
            for block in src_blocks:
                copies = [[i for i, n in enumerate(dst_chunks) if n == chunk] for chunk in block]
                table = self._table([(*at, *[-1] * (most - len(at))) for at in copies])
                begin, entry, length, row = self._rows_of(len(block))
                at = table[entry].T
                rows.append(torch.where(at < 0, -1, begin * count + at * length + row))
            last = count * self._chunk_rows - 1
            self._restored[src_blocks, dst_chunks] = torch.cat(rows, 1).clamp_(-1, last)
        return self._restored[src_blocks, dst_chunks]

    def places_of(self, chunks: Chunks) -> Positions:
        """The positions of the rows of some chunks; waits for boundaries that are on a GPU."""
        return layouts.positions_of_chunks(self.starts, chunks, self._cp_size)

    @property
    def starts(self) -> list[int]:
        """Where documents begin and the last one ends, padding included; waits like `places_of`."""
        self.checked_text()
        return next(x for x in reversed(self._host) if x is not None).tolist()

    @property
    def extents(self) -> tuple[list[int], list[int]]:
        """Where documents begin, and where they end without padding; waits like `places_of`."""
        starts, (lengths, _) = self.starts[:-1], self._host
        own = lengths.diff().tolist()
        return starts, [start + length for start, length in zip(starts, own, strict=True)]

    def _rows_of(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each row of `count` chunks of every document: the rows that one chunk of each earlier
        document has, the index of its chunk, that chunk's length, and its row in the chunk."""
        starts = self._chunk_starts
        row = torch.arange(self._chunk_rows * count, device=starts.device)
        document = torch.searchsorted(starts * count, row, right=True).sub_(1)
        document.clamp_(0, len(starts) - 2)
        begin, chunk = starts[document], starts.diff()[document].clamp_(min=1)
        offset = row - begin * count
        return begin, (offset // chunk).clamp_(0, count - 1), chunk, offset % chunk

    @property
    def _chunk_rows(self) -> int:
        """Rows of one chunk of every document."""
        return self._tokens // (2 * self._cp_size)

    @cached_property
    def _chunk_starts(self) -> Tensor:
        """Where documents would begin if each were one chunk."""
        return self._row_starts.long() // (2 * self._cp_size)

    @cached_property
    def followed(self) -> Tensor:
        """By position, whether the next position is in the same document and not padding: bool."""
        starts = self._row_starts.long()
        places = torch.arange(self._tokens, device=starts.device)
        document = torch.searchsorted(starts, places, right=True).sub_(1).clamp_(0, len(starts) - 2)
        lengths = starts.diff() if self._lengths is None else self._lengths
        return places - starts[document] + 1 < lengths[document]

    @property
    def rank_order(self) -> Tensor:
        """The position of each row of all ranks' shards, rank by rank: int64 [tokens]."""
        src_blocks = tuple(layouts.chunks_of(rank, self._cp_size) for rank in range(self._cp_size))
        return self.restore_index(src_blocks, tuple(range(2 * self._cp_size)))[0]

    def _table(self, values: Sequence) -> Tensor:
        """The values on the device, copied asynchronously."""
        return on_device(np.array(values), self._row_starts.device)


def abbreviated(text: str, count: int) -> str:
    """A list of numbers, shortened, with a digest that tells it from others."""
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text if count < 10 else f'{text[:40]} ... of {count} documents'} ({digest})"


def rows_before(edges: Tensor, places: Positions) -> Tensor:
    """How many of the rows at these ascending positions are before each edge: int32."""
    if len(places) == 1 and places[0].start == 0:
        return edges.clamp(max=len(places[0])).int()
    before = torch.stack([(edges - at.start).clamp(0, len(at)) for at in places])
    return before.sum(0, dtype=torch.int32)


def _to_host(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the host, which can be copied to the device asynchronously; from a GPU the copy
    itself is asynchronous too."""
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=device.type == "cuda")
    return copy.copy_(x, non_blocking=True)


def _with_padding(of_q: Pair, of_keys: Pair) -> Pair:
    """Edges of segments; after each come its padding's queries, which see no key, and keys, which
    no query sees. Arguments are rows of each segment, with padding and without: [segments]."""
    (rows, real), (keys, real_keys) = of_q, of_keys
    none = torch.zeros_like(rows)
    parts = (real, rows - real, none), (real_keys, none, keys - real_keys)
    return tuple(_running(torch.stack(columns, 1).flatten()) for columns in parts)


def _running(lengths: Tensor) -> Tensor:
    """Where each segment begins, and where the last one ends."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
