"""All-to-all: each rank of a node computes all rows of the node for some heads.

A round is a group of KV heads with the query heads that use them, sharded over the ranks. Their Q,
K and V go to the rank that computes them, and results come back. While a round is computed, the
next one's tensors arrive and the last one's results leave. Every pair of ranks trades 1/L of a
shard, so fewer bytes are sent than with gathered keys unless heads are grouped; kernel calls are as
long as possible, and no gradient is a sum over ranks.

If the ranks do not divide the KV heads, for example if there are fewer heads than ranks, each KV
head goes to several ranks, which share its query heads; the rank that holds the rows sums their
gradients of it. Rounds count heads with these copies.

On several nodes, what was received circulates between nodes (`inter_node`): K and V of a rank's
heads, or in backward its queries. In a flat topology all ranks take part in one all-to-all and
nothing circulates.

Source: Ulysses (arXiv 2309.14509), here in rounds.
"""

from collections.abc import Sequence

from megatron_burst.errors import BurstError
from megatron_burst.schedule.call import Cargo, Circulate
from megatron_burst.schedule.chunks import Meeting, by_rank, in_order, meeting, restored, seen
from megatron_burst.schedule.emitter import Emitter, Gradients, Outputs, sums_of
from megatron_burst.schedule.inter_node import Circulating, heads_in_rounds, steps, sums, whole
from megatron_burst.schedule.layout import Layout, Numbers
from megatron_burst.schedule.mask import Span, Tile, check_mask, cut
from megatron_burst.schedule.operations import (
    Arrange,
    AttendBackward,
    Copy,
    FromRanks,
    Give,
    Ref,
    Restore,
    Stream,
    Take,
    ToRanks,
)
from megatron_burst.schedule.pieces import Visit, node_visits, runs, sides, tiles_between
from megatron_burst.schedule.program import (
    Dtype,
    Field,
    Home,
    Program,
    dkv_fields,
    dq_fields,
    kv_fields,
    out_fields,
    q_fields,
    travelling_side_fields,
)
from megatron_burst.schedule.spec import Spec


def a2a(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the heads cannot be sharded evenly, or the layout is striped.
    """
    check_mask(spec.mask, spec.layout, "a2a", spec.topology.inter_size == 1)
    emitter = _AllToAll(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


def _check_heads(heads_q: int, ranks: int) -> None:
    if heads_q % ranks:
        raise BurstError(
            "burst attention: for an all-to-all, the number of ranks must divide the number of "
            f"query heads, because each rank computes equally many; got {heads_q} query heads "
            f"on {ranks} ranks; pass --burst-intra gather (intra='gather') or auto, and no "
            "--burst-inter a2a"
        )


def _tiles(here: Visit, visit: Visit, spec: Spec) -> tuple[Tile, ...]:
    """Tiles between a node's rows and those of another node, or its own."""
    queries, keys = sides(here, visit, spec.circulate)
    places = tuple(at for at, _ in runs(keys))
    if visit is here and (len(places) == 1 or not spec.mask.windowed):
        every = Span(0, keys[-1].whole.stop)
        return (Tile(every, every, spec.mask, (places, places) if spec.mask.documents else None),)
    rows = [(piece.whole, piece, before) for piece, before in queries]
    return tiles_between(rows, keys, spec.mask)


def _meeting(spec: Spec, row: int, away: int) -> Meeting:
    """How a node's chunks of documents meet those from `away` nodes away."""
    topology = spec.topology
    nodes = (topology.grid[(row - n) % topology.inter_size] for n in (0, away))
    here, there = (in_order(ranks, topology.cp_size) for ranks in nodes)
    queries, keys = (there, here) if spec.circulate is Circulate.Q else (here, there)
    return meeting(queries, (keys,), spec.mask, spec.shape.tokens // 2)


class _AllToAll(Emitter):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        topology, tokens = spec.topology, spec.shape.tokens
        row, _ = topology.coord(spec.cp_rank)
        self.ranks = topology.grid[row]
        _check_heads(spec.shape.heads_q, len(self.ranks))
        heads_kv = spec.shape.replicated(len(self.ranks)).heads_kv
        self.copies = heads_kv // spec.shape.heads_kv
        self.rounds = heads_in_rounds(heads_kv, spec.heads_per_round * len(self.ranks))
        self.order = steps(topology.inter_size, len(self.rounds), spec.backward, here=False)
        placed = spec.mask.windowed or spec.mask.documents
        # documents sharded individually arrive rank by rank, and are put in order here
        self.reorders = spec.layout is Layout.DOCUMENTS
        lies = Layout.CONTIGUOUS if self.reorders else spec.layout
        visits = node_visits(topology, row, lies, tokens, placed)
        self.pieces, self.rows = visits[0].pieces, len(self.ranks) * tokens
        if self.reorders:
            self.met = [_meeting(spec, row, step.distance) for step in self.order]
            self.tiles: list[tuple[Tile, ...]] = [(met.tile,) for met in self.met]
        else:
            alike = {visit: _tiles(visits[0], visit, spec) for visit in set(visits)}
            self.tiles = [alike[visits[step.distance]] for step in self.order]
        self.alone = topology.inter_size == 1

    @property
    def orders(self) -> tuple[tuple[Numbers, ...], Numbers]:
        """Chunk orders: as received from the ranks of the node, and as computed with."""
        ranks, size = sorted(self.ranks), self.spec.topology.cp_size
        return by_rank(ranks, size), in_order(ranks, size)

    def tiles_of_round(self, round_: int) -> tuple[Tile, ...]:
        """All tiles of a round."""
        found = zip(self.tiles, self.order, strict=True)
        return tuple(tile for tiles, step in found if step.round == round_ for tile in tiles)

    def part_of(self, round_: int) -> int:
        """KV heads that a rank computes in a round."""
        return len(self.rounds[round_]) // len(self.ranks)

    def heads_of(self, round_: int) -> tuple[int, int]:
        """Query heads and KV heads that a rank computes in a round."""
        part = self.part_of(round_)
        return part * self.spec.group // self.copies, part

    def refs(self, round_: int, names: Sequence[str]) -> tuple[Ref, ...]:
        """A round's heads in buffers of the call."""
        every = self.rounds[round_]
        keys = Span(every.start // self.copies, every.stop // self.copies)
        return tuple(
            Ref(name, heads=keys if name in ("kv", "dkv") else self.queries(keys)) for name in names
        )

    def forward(self) -> None:
        there, back = Wholes(self), Results(self)
        keys = self.circulating_keys(there)
        for index, step in enumerate(self.order):
            if step.first:
                there.arrive(step.round)
                whole = there.of(step.round)
                there.post(step.round + 1)
                lse = self.lse(step.round)
                tiles = self.tiles_of_round(step.round)
                results = back.of(step.round)
                outputs = Outputs(self, f"round {step.round}", tiles, whole, lse, results)
            if keys:
                keys.set_out(index)
                keys.pass_on(index)
            kv = keys.piece(step.round, step.distance) if keys and step.distance else whole
            if self.reorders:
                kv = seen(self, f"{index}", kv, self.met[index], self.part_of(step.round))
            for tile in self.tiles[index]:
                outputs.compute(tile, kv)
            if step.last:
                outputs.merge()
                self.emit(Copy((lse,), results))
                back.collect()
                back.post(step.round)
        back.collect()

    def lse(self, round_: int) -> Ref:
        """lse of a round's heads, dense, as kernels need it."""
        home = Home.LEFT if self.spec.left else Home.PART
        fields = (Field("lse", self.heads_of(round_)[0], 0, Dtype.SUM),)
        return self.buffer(f"lse {round_}", home, self.rows, fields)

    def circulating_keys(self, there: "Wholes") -> Circulating | None:
        if self.alone or (self.spec.backward and self.spec.circulate is Circulate.Q):
            return None
        return Circulating(
            self, self.order, lambda round_: (there.keys(round_),),
            lambda round_: kv_fields(self.part_of(round_), self.spec.shape),
            whole(self, self.rows),
        )  # fmt: skip

    def circulating_queries(self, sides: "Sides") -> Circulating | None:
        if self.alone or self.spec.circulate is Circulate.KV:
            return None
        return Circulating(
            self, self.order, sides.bare,
            lambda round_: travelling_side_fields(self.heads_of(round_)[0], self.spec.shape),
            whole(self, self.rows),
        )  # fmt: skip

    def backward(self) -> None:
        there = Wholes(self)
        back, sides = Results(self), Sides(self, there)
        keys, queries = self.circulating_keys(there), self.circulating_queries(sides)
        of_queries, of_keys = self.sums_of_both(back)
        for index, step in enumerate(self.order):
            if step.first:
                there.arrive(step.round)
                there.post(step.round + 1)
            for circulating in (keys, queries):
                if circulating:
                    circulating.set_out(index)
                    circulating.pass_on(index)
            if self.alone:
                self.compute_alone(index, there, back, sides)
                continue
            visits = step.distance > 0
            side = sides.of(step.round)
            if visits and queries:
                side = self.side_for_kernel(queries.piece(step.round, step.distance))
            kv = there.keys(step.round)
            if visits and keys:
                kv = keys.piece(step.round, step.distance)
            both = self.compute(index, side, kv)
            travelling, local = (of_keys, of_queries) if keys else (of_queries, of_keys)
            of_both = reversed(both) if keys else both
            # gradients returned to this node go to their owners before the next round's results
            first, second = of_both
            travelling.add(index, first)
            self.send_home(travelling.come_home(index), back)
            local.add(index, second)
        if not self.alone:
            travelling = of_keys if keys else of_queries
            self.send_home(travelling.come_home(len(self.order)), back)
        back.collect()

    def sums_of_both(self, back: "Results") -> tuple:
        shape = self.spec.shape
        return (
            sums(self, self.order, False, back.of,
                 lambda r, dtype: dq_fields(self.heads_of(r)[0], shape, dtype), self.rows),
            sums(self, self.order, True, back.of,
                 lambda r, dtype: dkv_fields(self.heads_of(r)[1], shape, dtype), self.rows),
        )  # fmt: skip

    def compute_alone(self, index: int, there: "Wholes", back: "Results", sides: "Sides") -> None:
        """A round on one node: one tile, whose results are sent back at once."""
        round_ = self.order[index].round
        into = back.of(round_)
        side, kv = sides.of(round_), there.keys(round_)
        (tile,) = self.tiles[index]
        self.emit(AttendBackward(side, kv, tile.mask, into, into, tile.places))
        back.collect()
        back.post(round_)

    def compute(self, index: int, side: tuple[Ref, ...], kv: Ref) -> tuple[list, list]:
        """Compute a step's tiles; returns gradients to sum: of queries, and of keys."""
        tiles, heads = self.tiles[index], self.heads_of(self.order[index].round)
        grads = Gradients(self, f"{index}", tiles, side, None, heads, self.rows)
        if self.reorders:
            met, name = self.met[index], f"{index}"
            made = grads.compute(met.tile, seen(self, name, kv, met, heads[1]))
            return grads.sums(), [
                (Span(0, self.rows), (restored(self, name, made, met, heads[1]),))
            ]
        parts = [(tile.kv, grads.compute(tile, kv)) for tile in tiles]
        of_keys = sums_of(parts, cut((seen for seen, _ in parts), self.rows))
        return grads.sums(), of_keys

    def send_home(self, rounds: Sequence[int], back: "Results") -> None:
        for round_ in rounds:
            back.collect()
            back.post(round_)


class Wholes:
    """Tensors of this rank's heads over all rows of the node, a round at a time.

    A slot holds this rank's rows once for each rank, with that rank's heads. In backward, what
    forward saved is not sent again.
    """

    def __init__(self, emitter: _AllToAll) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._recalls = spec.left and spec.backward
        self._arrived: set[int] = set()
        self._sources: tuple[str, ...] = ("q", "kv")
        if spec.backward:
            delta = emitter.delta().buffer
            self._sources = ("side", delta) if self._recalls else ("side", "kv", delta)
        self._slots = emitter.slot_count(
            Cargo.READ, len(emitter.rounds), emitter.rows, self._fields(0)
        )
        self.post(0)

    def _fields(self, round_: int) -> tuple[Field, ...]:
        """Fields of a row that is sent."""
        shape, (heads_q, heads_kv) = self._emitter.spec.shape, self._emitter.heads_of(round_)
        qkv = (*q_fields(heads_q, shape), *kv_fields(heads_kv, shape))
        if not self._emitter.spec.backward:
            return qkv
        lse, delta = (Field(name, heads_q, 0, Dtype.SUM) for name in ("lse", "delta"))
        dout = Field("dout", heads_q, shape.dim_v)
        return (dout, delta) if self._recalls else (*qkv, dout, lse, delta)

    def post(self, round_: int) -> None:
        """Start the all-to-all of a round's heads, if there is such a round."""
        emitter = self._emitter
        ranks, cp_rank, tokens = emitter.ranks, emitter.spec.cp_rank, emitter.spec.shape.tokens
        if round_ >= len(emitter.rounds):
            return
        fields = self._fields(round_)
        slot = emitter.buffer(
            f"heads {round_}", Home.SLOT, emitter.rows, fields, Cargo.READ, round_, self._slots
        )
        sources, part = emitter.refs(round_, self._sources), emitter.part_of(round_)
        emitter.emit(ToRanks(sources, slot, len(ranks), part, emitter.copies))
        whole = self._came(round_, fields) if emitter.reorders else self._declare(round_, fields)
        mine, gives, takes = ranks.index(cp_rank), [], []
        for piece in emitter.pieces:
            rows = slot.at(piece.rows.moved(mine * tokens))
            if piece.holder == cp_rank:
                emitter.emit(Copy((rows,), whole.at(piece.whole)))
                gives += [
                    (column, Give(peer, slot.at(piece.rows.moved(column * tokens))))
                    for column, peer in enumerate(ranks)
                    if peer != cp_rank
                ]
            else:
                takes.append(Take(piece.holder, rows, whole.at(piece.whole)))
        gives.sort(key=lambda give: give[0])
        emitter.exchange(Cargo.READ, slot, [give for _, give in gives], takes)

    def _came(self, round_: int, fields: tuple[Field, ...]) -> Ref:
        """Where a round is received, rank by rank."""
        number = round_, min(2, len(self._emitter.rounds))
        name = f"came {round_}"
        return self._emitter.buffer(name, Home.STAGING, self._emitter.rows, fields, "came", *number)

    def arrive(self, round_: int) -> None:
        """Put a round's received rows in order, once; for other nodes, in parallel with kernels."""
        emitter = self._emitter
        if emitter.reorders and round_ not in self._arrived:
            self._arrived.add(round_)
            whole = self._declare(round_, self._fields(round_))
            stream = Stream.COMPUTE if emitter.alone else Stream.SIDE
            emitter.emit(Arrange(Ref(f"came {round_}"), whole, *emitter.orders, stream))

    def _declare(self, round_: int, fields: tuple[Field, ...]) -> Ref:
        """Where a round is assembled."""
        emitter, rounds = self._emitter, len(self._emitter.rounds)
        if emitter.spec.left and not emitter.spec.backward:
            return self.left(round_)
        number = round_, min(2, rounds)
        name = f"whole {round_}"
        return emitter.buffer(name, Home.STAGING, emitter.rows, fields, "heads", *number)

    def of(self, round_: int) -> Ref:
        """What was received; includes q, k and v unless backward has them from forward."""
        self.arrive(round_)
        leaves = self._emitter.spec.left and not self._emitter.spec.backward
        return self.left(round_) if leaves else Ref(f"whole {round_}")

    def keys(self, round_: int) -> Ref:
        """The buffer with k and v."""
        return self.left(round_) if self._recalls else self.of(round_)

    def left(self, round_: int) -> Ref:
        """q, k and v that forward saved."""
        emitter, shape = self._emitter, self._emitter.spec.shape
        heads_q, heads_kv = emitter.heads_of(round_)
        fields = (*q_fields(heads_q, shape), *kv_fields(heads_kv, shape))
        return emitter.buffer(f"left {round_}", Home.LEFT, emitter.rows, fields, interleaved=True)


class Sides:
    """The query side of this rank's heads for its node's rows, round by round.

    Delta is sent, whatever the kernel needs: it is 4 bytes where a bf16 output is 2 dv, and the
    stand-in made from it is closer to the true delta than a rounded output.
    """

    def __init__(self, emitter: _AllToAll, there: Wholes) -> None:
        self._emitter, self._there = emitter, there
        self._made: dict[int, tuple[Ref, ...]] = {}

    def bare(self, round_: int) -> tuple[Ref, ...]:
        """A round's side without an output, with dense statistics."""
        emitter, spec = self._emitter, self._emitter.spec
        name, heads = f"statistics {round_}", emitter.heads_of(round_)[0]
        lse, delta = (Field(field, heads, 0, Dtype.SUM) for field in ("lse", "delta"))
        left = (emitter.lse(round_),) if spec.left else ()
        if name not in emitter.buffers:
            # with other nodes it may have to be sent while kernels run
            home, stream = (Home.PART, Stream.COMPUTE) if emitter.alone else (Home.HOP, Stream.SIDE)
            fields = (delta,) if left else (lse, delta)
            made = emitter.buffer(name, home, emitter.rows, fields, "statistics")
            emitter.emit(Copy((self._there.of(round_),), made, stream))
        rest = (self._there.left(round_), *left) if left else ()
        return Ref(name), *rest, self._there.of(round_)

    def of(self, round_: int) -> tuple[Ref, ...]:
        """A round's query side for kernels; made once, whichever keys it meets."""
        if round_ not in self._made:
            self._made = {round_: self._emitter.side_for_kernel(*self.bare(round_))}
        return self._made[round_]


class Results:
    """Return transfer of a round's results to the ranks that hold the rows.

    A slot holds this rank's heads of all rows; a rank gets its own rows of them.
    """

    def __init__(self, emitter: _AllToAll) -> None:
        self._emitter = emitter
        self._targets = ("dq", "dkv") if emitter.spec.backward else ("out",)
        self._slots = emitter.slot_count(
            Cargo.GRAD, len(emitter.rounds), emitter.rows, self._fields(0)
        )
        self._under_way: int | None = None

    def _fields(self, round_: int) -> tuple[Field, ...]:
        spec, (heads_q, heads_kv) = self._emitter.spec, self._emitter.heads_of(round_)
        if not spec.backward:
            return out_fields(heads_q, spec.shape, Dtype.INPUT)
        dtype = spec.share_dtype
        return (*dq_fields(heads_q, spec.shape, dtype), *dkv_fields(heads_kv, spec.shape, dtype))

    def of(self, round_: int) -> Ref:
        """Where a round's results are written."""
        if not self._emitter.reorders:
            return self._slot(round_)
        fields = self._fields(round_)
        return self._emitter.buffer(
            f"made {round_}", Home.STAGING, self._emitter.rows, fields, "made"
        )

    def _slot(self, round_: int) -> Ref:
        return self._emitter.buffer(
            f"results {round_}", Home.SLOT, self._emitter.rows, self._fields(round_), Cargo.GRAD,
            round_, self._slots,
        )  # fmt: skip

    def post(self, round_: int) -> None:
        """Start a round's return transfer; the previous round's must be collected."""
        emitter, slot = self._emitter, self._slot(round_)
        if emitter.reorders:
            emitter.emit(Restore(Ref(f"made {round_}"), slot, *emitter.orders))
        cp_rank, tokens = emitter.spec.cp_rank, emitter.spec.shape.tokens
        fields = self._fields(round_)
        staged = emitter.buffer(f"home {round_}", Home.STAGING, emitter.rows, fields, "results")
        own = [piece for piece in emitter.pieces if piece.holder == cp_rank]
        gives = [
            Give(piece.holder, slot.at(piece.whole))
            for piece in emitter.pieces
            if piece.holder != cp_rank
        ]
        takes = []
        for column, peer in enumerate(emitter.ranks):
            for piece in own:
                rows = staged.at(piece.rows.moved(column * tokens))
                if peer == cp_rank:
                    emitter.emit(Copy((slot.at(piece.whole),), rows))
                else:
                    takes.append(Take(peer, slot.at(piece.whole), rows))
        emitter.exchange(Cargo.GRAD, slot, gives, takes)
        self._under_way = round_

    def collect(self) -> None:
        """Put the results of the return transfer in flight, if any, where they belong."""
        if self._under_way is None:
            return
        round_, self._under_way = self._under_way, None
        emitter = self._emitter
        targets, part = emitter.refs(round_, self._targets), emitter.part_of(round_)
        home, ranks = Ref(f"home {round_}"), len(emitter.ranks)
        emitter.emit(FromRanks(home, targets, ranks, part, emitter.copies))
