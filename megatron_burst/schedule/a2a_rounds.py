"""The rounds of an all-to-all: whose heads a rank computes in each, and buffers of a round."""

from collections.abc import Iterable, Iterator, Sequence

from megatron_burst.schedule.chunks import chunk_pairs, chunks_by_rank, chunks_in_order
from megatron_burst.schedule.emitter import Emitter
from megatron_burst.schedule.inter_node import heads_in_rounds
from megatron_burst.schedule.layout import Chunks, Layout
from megatron_burst.schedule.mask import Span, Tile
from megatron_burst.schedule.node_shards import ShardChunk, adjacent_runs, node_shards
from megatron_burst.schedule.program import Field, Ref, Space
from megatron_burst.schedule.spec import Cargo, Spec


class AllToAllEmitter(Emitter):
    """Emits a pass in which a rank computes all rows of the sequence for some heads at a time."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        topology, tokens = spec.topology, spec.shape.tokens
        (self.ranks,) = topology.grid
        heads_kv = spec.shape.replicated(len(self.ranks)).heads_kv
        self.copies = heads_kv // spec.shape.heads_kv  # ranks that have the same KV heads
        per_round = (spec.heads_per_round or heads_kv) * len(self.ranks)
        self.rounds = heads_in_rounds(heads_kv, per_round)  # of KV heads, copies included
        # received rows must be put in order, if each rank has two chunks of each document
        self.reorders = spec.layout is Layout.DOCUMENTS
        received = Layout.CONTIGUOUS if self.reorders else spec.layout
        self.chunks = node_shards(topology, 0, received, tokens, spec.mask.positional)[0].chunks
        self.rows = self.chunks[-1].node_rows.stop  # of the whole sequence
        if self.reorders:
            chunks = chunks_in_order(self.ranks, topology.cp_size)
            self.tile = chunk_pairs(chunks, (chunks,), spec.mask, tokens // 2).tile
        else:
            sequence = tuple(run for run, _ in adjacent_runs(self.chunks))
            positions = (sequence, sequence) if spec.mask.documents else None
            self.tile = Tile(Span(0, self.rows), Span(0, self.rows), spec.mask, positions)

    @property
    def orders(self) -> tuple[tuple[Chunks, ...], Chunks]:
        """Chunk orders: as received from the ranks, and as the kernel needs them."""
        ranks, size = sorted(self.ranks), self.spec.topology.cp_size
        return chunks_by_rank(ranks, size), chunks_in_order(ranks, size)

    def heads_of(self, round_: int) -> tuple[int, int]:
        """Query heads and KV heads that a rank computes in a round."""
        heads_kv = len(self.rounds[round_]) // len(self.ranks)
        return heads_kv * self.spec.q_heads_per_kv // self.copies, heads_kv

    def own_heads(self, round_: int) -> tuple[int, ...]:
        """The query heads that this rank computes in a round, as the call counts them."""
        column, heads_kv = self.ranks.index(self.spec.cp_rank), self.heads_of(round_)[1]
        first = self.rounds[round_].start // self.copies + column // self.copies * heads_kv
        count = self.spec.q_heads_per_kv // self.copies  # of each KV head's query heads
        offset = column % self.copies * count
        starts = (kv * self.spec.q_heads_per_kv + offset for kv in range(first, first + heads_kv))
        return tuple(head for start in starts for head in range(start, start + count))

    def refs(self, round_: int, names: Iterable[str]) -> tuple[Ref, ...]:
        """A round's heads in buffers of the call."""
        with_copies = self.rounds[round_]
        kv = Span(with_copies.start // self.copies, with_copies.stop // self.copies)
        return tuple(
            Ref(name, heads=kv if name in ("kv", "dkv") else self.q_heads(kv)) for name in names
        )

    def lse(self, round_: int) -> Ref:
        """lse of a round's heads, dense, as kernels need it."""
        space = Space.SAVED if self.spec.saves_remote else Space.TEMP
        fields = self.fields("lse", self.heads_of(round_)[0])
        return self.buffer(f"lse {round_}", space, self.rows, fields)

    def saved(self, round_: int) -> Ref:
        """q, k and v of a round's heads that forward saves."""
        fields = self.qkv_fields(round_)
        return self.buffer(f"saved {round_}", Space.SAVED, self.rows, fields, interleaved=True)

    def staging(
        self, name: str, round_: int, use: str, fields: Sequence[Field], count: int = 1,
        number: int = 0,
    ) -> Ref:  # fmt: skip
        """A round's buffer on this rank with all rows; `count` rounds take turns in its memory."""
        name = f"{name} {round_}"
        return self.buffer(name, Space.STAGING, self.rows, fields, use, number, count)

    def slots(self, cargo: Cargo, fields: Sequence[Field]) -> int:
        """How many slots the transfers of all rounds cycle through."""
        return self.slot_count(cargo, len(self.rounds), self.rows, fields)

    def slot(
        self, name: str, round_: int, cargo: Cargo, fields: Sequence[Field], count: int
    ) -> Ref:
        """A round's slot, of which ranks exchange rows."""
        name = f"{name} {round_}"
        return self.buffer(name, Space.SLOT, self.rows, fields, cargo, round_, count)

    def qkv_fields(self, round_: int) -> tuple[Field, ...]:
        heads_q, heads_kv = self.heads_of(round_)
        return *self.fields("q", heads_q), *self.fields("k v", heads_kv)

    def by_rank(self, ref: Ref) -> Iterator[tuple[int, ShardChunk, Ref]]:
        """(rank, chunk, rows) of a buffer that has this rank's rows once for each rank."""
        for column, rank in enumerate(self.ranks):
            for chunk in self.chunks:
                if chunk.cp_rank == self.spec.cp_rank:
                    rows = chunk.rows.shifted(column * self.spec.shape.tokens)
                    yield rank, chunk, ref.at(rows)
