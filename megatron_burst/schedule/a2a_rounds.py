"""The rounds of an all-to-all: whose heads a rank computes in each, and over which tiles."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.schedule.chunks import Meeting, by_rank, in_order, meeting
from megatron_burst.schedule.emitter import Emitter
from megatron_burst.schedule.inter_node import heads_in_rounds, steps
from megatron_burst.schedule.layout import Layout, Numbers
from megatron_burst.schedule.mask import Span, Tile
from megatron_burst.schedule.pieces import Piece, Visit, node_visits, runs, sides, tiles_between
from megatron_burst.schedule.program import Field, Home, Ref, kv_fields, q_fields
from megatron_burst.schedule.spec import Circulate, Dtype, Spec


@dataclass(frozen=True, slots=True)
class Load:
    """Tensors of which a rank has equally many rows, so that their rows are sent side by side.

    Attributes:
        name: in names of buffers.
        of: whose tensors: of queries, of keys, or of both.
        tokens: rows on a rank.
        pieces: of the node's shards, in the order in which they are received.
    """

    name: str
    of: tuple[str, ...]
    tokens: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """Of the node's shards."""
        return self.pieces[-1].whole.stop

    def has(self, name: str) -> bool:
        """Whether a field or a buffer of the call belongs to it."""
        return ("keys" if name in ("k", "v", "dk", "dv", "kv", "dkv") else "queries") in self.of

    def some(self, fields: Iterable[Field]) -> tuple[Field, ...]:
        """Those of these fields that belong to it."""
        return tuple(field for field in fields if self.has(field.name))


class AllToAllEmitter(Emitter):
    """Emits a pass that computes all rows of a node for some heads at a time.

    Attributes:
        ranks: of the node.
        alone: whether all ranks take part, so that nothing circulates.
        copies: how many ranks have the same KV heads.
        rounds: KV heads of each, copies included.
        order: steps of all rounds.
        loads: one; two in cross-attention, of queries and of keys.
        rows, rows_kv: of the node's shards: of queries, and of keys.
        reorders: whether what was received must be put in order: documents of which each rank has
            two chunks.
        met: how these chunks meet, by step.
        tiles: by step.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        topology, (row, _) = spec.topology, spec.topology.coord(spec.cp_rank)
        self.ranks, self.alone = topology.grid[row], topology.inter_size == 1
        _check_heads(spec.shape.heads_q, len(self.ranks))
        heads_kv = spec.shape.replicated(len(self.ranks)).heads_kv
        self.copies = heads_kv // spec.shape.heads_kv
        self.rounds = heads_in_rounds(
            heads_kv, (spec.heads_per_round or heads_kv) * len(self.ranks)
        )
        self.order = steps(topology.inter_size, len(self.rounds), spec.backward, here=False)
        self.reorders = spec.layout is Layout.DOCUMENTS
        lies = Layout.CONTIGUOUS if self.reorders else spec.layout
        shape = spec.shape
        terms = topology, row, lies, shape.tokens, spec.mask.placed, shape.tokens_kv
        visits = node_visits(*terms)
        self.loads = _loads(spec, visits[0])
        self.rows, self.rows_kv = self.loads[0].rows, self.loads[-1].rows
        if self.reorders:
            self.met = [_meeting(spec, row, step.distance) for step in self.order]
            self.tiles: list[tuple[Tile, ...]] = [(met.tile,) for met in self.met]
        else:
            alike = {visit: _tiles(visits[0], visit, spec) for visit in set(visits)}
            self.tiles = [alike[visits[step.distance]] for step in self.order]

    @property
    def orders(self) -> tuple[tuple[Numbers, ...], Numbers]:
        """Chunk orders: as received from the ranks of the node, and as computed with."""
        ranks, size = sorted(self.ranks), self.spec.topology.cp_size
        return by_rank(ranks, size), in_order(ranks, size)

    def tiles_of_round(self, round_: int) -> tuple[Tile, ...]:
        """All tiles of a round."""
        found = zip(self.tiles, self.order, strict=True)
        return tuple(tile for tiles, step in found if step.round == round_ for tile in tiles)

    def heads_of(self, round_: int) -> tuple[int, int]:
        """Query heads and KV heads that a rank computes in a round."""
        part = len(self.rounds[round_]) // len(self.ranks)
        return part * self.spec.group // self.copies, part

    def own_heads(self, round_: int) -> list[int]:
        """The query heads that this rank computes in a round, as the call counts them."""
        place, part = self.ranks.index(self.spec.cp_rank), self.heads_of(round_)[1]
        share, keys = place % self.copies, self.rounds[round_].start // self.copies
        first, each = keys + place // self.copies * part, self.spec.group // self.copies
        starts = (kv * self.spec.group + share * each for kv in range(first, first + part))
        return [head for start in starts for head in range(start, start + each)]

    def refs(self, round_: int, names: Iterable[str]) -> tuple[Ref, ...]:
        """A round's heads in buffers of the call."""
        every = self.rounds[round_]
        keys = Span(every.start // self.copies, every.stop // self.copies)
        return tuple(
            Ref(name, heads=keys if name in ("kv", "dkv") else self.queries(keys)) for name in names
        )

    def lse(self, round_: int) -> Ref:
        """lse of a round's heads, dense, as kernels need it."""
        home = Home.LEFT if self.spec.left else Home.PART
        fields = (Field("lse", self.heads_of(round_)[0], 0, Dtype.SUM),)
        return self.buffer(f"lse {round_}", home, self.rows, fields)

    def left(self, round_: int, load: Load) -> Ref:
        """q, k and v of a round's heads that forward saves."""
        name, fields = f"left{load.name} {round_}", load.some(self.qkv_fields(round_))
        return self.buffer(name, Home.LEFT, load.rows, fields, interleaved=True)

    def qkv_fields(self, round_: int) -> tuple[Field, ...]:
        shape, (heads_q, heads_kv) = self.spec.shape, self.heads_of(round_)
        return *q_fields(heads_q, shape), *kv_fields(heads_kv, shape)

    def by_rank(
        self, ref: Ref, load: Load
    ) -> tuple[list[tuple[int, Piece, Ref]], list[tuple[Piece, Ref]]]:
        """In a buffer that has this rank's rows once for each rank of the node: those for others,
        as (rank, piece, rows), and those for itself, as (piece, rows)."""
        mine = self.spec.cp_rank
        own = [piece for piece in load.pieces if piece.holder == mine]
        every = [(rank, piece, ref.at(piece.rows.moved(column * load.tokens)))
                 for column, rank in enumerate(self.ranks) for piece in own]  # fmt: skip
        others = [found for found in every if found[0] != mine]
        return others, [(piece, rows) for rank, piece, rows in every if rank == mine]


def _loads(spec: Spec, here: Visit) -> tuple[Load, ...]:
    """What is sent side by side."""
    shape = spec.shape
    if shape.keys == shape.tokens:
        return (Load("", ("queries", "keys"), shape.tokens, here.queries),)
    of_keys = Load(" of keys", ("keys",), shape.keys, here.keys)
    return Load("", ("queries",), shape.tokens, here.queries), of_keys


def _check_heads(heads_q: int, ranks: int) -> None:
    if heads_q % ranks:
        raise BurstError(
            "burst attention: for an all-to-all, the number of ranks must divide the number of "
            f"query heads, because each rank computes equally many; got {heads_q} query heads "
            f"on {ranks} ranks; pass --burst-intra gather (intra='gather') or auto, and no "
            "--burst-inter a2a or --burst-invariant"
        )


def _tiles(here: Visit, visit: Visit, spec: Spec) -> tuple[Tile, ...]:
    """Tiles between a node's rows and those of another node, or its own."""
    queries, keys = sides(here, visit, spec.circulate)
    of_q, of_k = (tuple(at for at, _ in runs(of)) for of in (here.queries, here.keys))
    if visit is here and (len(of_k) == 1 or not spec.mask.windowed):
        q, kv = (Span(0, of[-1].whole.stop) for of in (here.queries, here.keys))
        return (Tile(q, kv, spec.mask, (of_q, of_k) if spec.mask.documents else None),)
    rows = [(piece.whole, piece, before) for piece, before in queries]
    return tiles_between(rows, keys, spec.mask)


def _meeting(spec: Spec, row: int, away: int) -> Meeting:
    """How a node's chunks of documents meet those from `away` nodes away."""
    topology = spec.topology
    nodes = (topology.grid[(row - n) % topology.inter_size] for n in (0, away))
    here, there = (in_order(ranks, topology.cp_size) for ranks in nodes)
    queries, keys = (there, here) if spec.circulate is Circulate.Q else (here, there)
    return meeting(queries, (keys,), spec.mask, spec.shape.tokens // 2)
