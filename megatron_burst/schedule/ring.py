"""The nested ring: N rows of L ranks (`Topology.grid`), rings inside rows and between them.

In step `round * L + place` the rank at (n, l) works with the shard of the rank at (n - round,
l - place). Inputs go around the intra ring within a round; at the start of a round the next round's
shard is sent on the inter ring and has the whole round to arrive.

The gradient of a circulating shard follows one step later along the intra ring, summed on the way
in the accumulation dtype. Each row's sum ends one place before the owner's column. The own row's
waits there; those of other rows are rounded once, go straight to that place with a whole round to
arrive, and are added to what waits. The total takes one intra hop to the owner, whose own
contribution never leaves it. So N(L-1) intra and N-1 inter hops, as for the inputs.

Source: BurstEngine (arXiv 2509.19836) for the double ring; the return transfer is our own.
"""

from megatron_burst.schedule.chunks import ChunkPairs, NeededBy, chunk_pairs
from megatron_burst.schedule.emitter import Emitter, Sinks
from megatron_burst.schedule.layout import Layout, chunks_of
from megatron_burst.schedule.mask import Span, Tile, check_mask, tiles
from megatron_burst.schedule.program import (
    Add,
    Arrange,
    Attend,
    AttendBackward,
    Copy,
    Fill,
    Merge,
    Program,
    Ref,
    Restore,
    Space,
    circulating_side_fields,
    dkv_fields,
    dq_fields,
    kv_fields,
    out_fields,
)
from megatron_burst.schedule.spec import Cargo, Dtype, Spec
from megatron_burst.schedule.topology import Link


def ring(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the layout cannot hold that many rows.
    """
    if spec.topology.cp_size == 1:
        return _alone(spec)
    check_mask(spec.mask, spec.layout, "ring", one_call=False)
    emitter = _Ring(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _Ring(Emitter):
    """Emits one pass; `step` counts over rounds and places."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.row, self.column = spec.topology.coord(spec.cp_rank)
        self.nodes, self.places = spec.topology.inter_size, spec.topology.intra_size
        self.keys_travel = spec.kv_circulates

    @property
    def result_dtype(self) -> Dtype:
        return Dtype.SUM

    def forward(self) -> None:
        out, circulating = Ref("out"), self.own_circulating(("kv",))
        self.emit(Fill(out))
        for step in range(self.spec.topology.cp_size):
            circulating = self.read_hops(step, circulating)
            kv = self.seen(step, self.circulating(step))
            tiles_here = self.tiles_of(step)
            if step == 0:  # the rank's own keys, of which each row sees one at least
                sinks = Sinks(tiles_here, range(self.spec.shape.heads_q))
            for number, tile in enumerate(tiles_here):
                fields = out_fields(self.spec.shape.heads_q, self.spec.shape, Dtype.INPUT)
                part = self.part(f"part {step}.{number}", len(tile.q), fields)
                q, keys = Ref("q").at(tile.q), kv.at(tile.kv)
                self.emit(Attend(q, keys, tile.mask, (part,), tile.positions, sinks.join(tile)))
                self.emit(Merge((out.at(tile.q), part), (out.at(tile.q),)))

    def backward(self) -> None:
        sides = (Ref("side"),) if self.keys_travel else (Ref("side"), self.delta())
        own = ("kv",) if self.keys_travel else tuple(side.buffer for side in sides)
        circulating = self.own_circulating(own)
        self.emit(Fill(Ref("dq")), Fill(Ref("dkv")))
        home = GradRing(self)
        for step in range(self.spec.topology.cp_size):
            circulating = self.read_hops(step, circulating)
            home.hops(step)
            shares = self.compute(step, sides)
            home.add(step, shares)
        home.finish()

    def compute(self, step: int, sides: tuple[Ref, ...]) -> list[tuple[Span, Ref]]:
        """Compute a step's tiles: sum gradients that stay; return circulating ones, with rows."""
        spec, kv = self.spec, Ref("kv")
        tiles_here = self.tiles_of(step)
        if self.keys_travel:
            kv = self.circulating(step)
        elif step and tiles_here:
            sides = self.side_for_kernel(self.circulating(step))
        kv, shares, shape, dtype = self.seen(step, kv), [], spec.shape, spec.grad_dtype
        for number, tile in enumerate(tiles_here):
            name = f"{step}.{number}"
            dq = self.part(f"dq {name}", len(tile.q), dq_fields(shape.heads_q, shape, dtype))
            fields = dkv_fields(shape.heads_kv, shape, dtype)
            dkv = self.part(f"dkv {name}", len(tile.kv), fields)
            rows = tuple(side.at(tile.q) for side in sides)
            keys = kv.at(tile.kv)
            self.emit(AttendBackward(rows, keys, tile.mask, dq, dkv, tile.positions))
            both = [(tile.q, dq), self.as_held(step, tile, dkv)]
            (held, stays), share = both if self.keys_travel else reversed(both)
            total = Ref("dq" if self.keys_travel else "dkv").at(held)
            self.emit(Add((total, stays), total))
            shares.append(share)
        return shares

    def seen(self, step: int, keys: Ref) -> Ref:
        """Keys in the order that tiles need."""
        if self.spec.layout is not Layout.DOCUMENTS:
            return keys
        met = self.meeting(step)
        if met.is_identity:
            return keys
        fields = kv_fields(self.spec.shape.heads_kv, self.spec.shape)
        made = self.part(f"seen {step}", len(met.tile.kv), fields)
        self.emit(Arrange(keys, made, met.src_blocks, met.dst_chunks))
        return made

    def as_held(self, step: int, tile: Tile, dkv: Ref) -> tuple[Span, Ref]:
        """Gradients of a tile's keys, and the keys' rows in the shard that holds them."""
        if self.spec.layout is not Layout.DOCUMENTS:
            return tile.kv, dkv
        met, shape, rows = self.meeting(step), self.spec.shape, Span(0, self.spec.shape.tokens)
        if met.is_identity:
            return rows, dkv
        fields = dkv_fields(shape.heads_kv, shape, self.spec.grad_dtype)
        made = self.part(f"restored {step}", len(rows), fields)
        self.emit(Restore(dkv, made, met.src_blocks, met.dst_chunks))
        return rows, made

    def tiles_of(self, step: int) -> tuple[Tile, ...]:
        """The tiles between this rank and the owner of what circulates."""
        spec = self.spec
        if spec.layout is Layout.DOCUMENTS:
            return (self.meeting(step).tile,)
        sizes = spec.topology.cp_size, spec.shape.tokens, spec.shape.keys
        return tiles(spec.layout, spec.mask, *self.pair(step), *sizes)

    def pair(self, step: int) -> tuple[int, int]:
        """The ranks whose queries, and whose keys, meet in a step."""
        mine, owner = self.spec.cp_rank, self.owner(step)
        return (mine, owner) if self.keys_travel else (owner, mine)

    def owner(self, step: int) -> int:
        """The rank whose shard is here in a step."""
        round_, place = divmod(step, self.places)
        return self.spec.topology.rank_at(self.row - round_, self.column - place)

    def visits(self, step: int, begin: int, end: int) -> NeededBy | None:
        """What the owner of a step's shard has to do with the ranks where that shard is in the
        steps from `begin` to before `end`."""
        topology, owner = self.spec.topology, self.owner(step)
        row, column = topology.coord(owner)
        turns = (divmod(step, self.places) for step in range(begin, end))
        met = [topology.rank_at(row + round_, column + place) for round_, place in turns]
        return NeededBy.of_circulating(self.spec, (owner,), met)

    def meeting(self, step: int) -> ChunkPairs:
        """How their chunks of documents meet."""
        spec, size = self.spec, self.spec.topology.cp_size
        queries, keys = (chunks_of(rank, size) for rank in self.pair(step))
        return chunk_pairs(queries, (keys,), spec.mask, spec.shape.tokens // 2)

    def own_circulating(self, own: tuple[str, ...]) -> Ref:
        """The rank's own shard, packed for sending."""
        packed = self.hop_buffer(0)
        self.emit(Copy(tuple(map(Ref, own)), packed))
        return packed

    def hop_buffer(self, step: int) -> Ref:
        shape = self.spec.shape
        fields = (kv_fields(shape.heads_kv, shape) if self.keys_travel
                  else circulating_side_fields(shape.heads_q, shape))  # fmt: skip
        rows = shape.keys if self.keys_travel else shape.tokens
        return self.buffer(f"circulating {step}", Space.RING, rows, fields, Cargo.READ)

    def circulating(self, step: int) -> Ref:
        """What circulates in a step; the rank's own shard is read where it is."""
        if step == 0 and self.keys_travel:
            return Ref("kv")
        return Ref(f"circulating {step}")

    def read_hops(self, step: int, circulating: Ref) -> Ref:
        """Start the hops of a step; returns what circulates in the next one."""
        round_, place = divmod(step, self.places)
        ends = (round_ + 1) * self.places
        if place == 0:
            self.next_round = None
            if round_ < self.nodes - 1:
                self.next_round = self.hop_buffer(ends)
                readers = ends, self.spec.topology.cp_size
                both = self.visits(step, *readers), self.visits(ends, *readers)
                self.hop(Link.INTER, Cargo.READ, circulating, self.next_round, both)
        if place == self.places - 1:
            return self.next_round or circulating
        arriving = self.hop_buffer(step + 1)
        both = [self.visits(at, step + 1, ends) for at in (step, step + 1)]
        self.hop(Link.INTRA, Cargo.READ, circulating, arriving, both)
        return arriving


class GradRing:
    """Gradients of the circulating shards, one step behind them."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.own = Ref("dkv" if ring.keys_travel else "dq")
        self.total: Ref = self.own  # of the previous step
        self.waiting: Ref | None = None  # the own row's sum, of the next column
        self.arriving: Ref | None = None  # another row's sum, for the same owner

    def buffer(self, what: str, step: int, dtype: Dtype) -> Ref:
        """Where a gradient is in a step, or arrives by its end."""
        shape, keys = self.ring.spec.shape, self.ring.keys_travel
        fields = (dkv_fields(shape.heads_kv, shape, dtype) if keys
                  else dq_fields(shape.heads_q, shape, dtype))  # fmt: skip
        rows = shape.keys if keys else shape.tokens
        return self.ring.buffer(f"{what} {step}", Space.RING, rows, fields, Cargo.GRAD)

    def hops(self, step: int) -> None:
        """Before a step's tiles: send on the previous step's sum."""
        if step == 0:
            return
        self.fresh = step % self.ring.places == 0 or step == 1
        before, self.total = self.total, self.buffer("sum", step, self.ring.spec.ring_sum_dtype)
        if not self.fresh:
            begin = max(1, step - step % self.ring.places)  # the owner's own stays with it
            both = [self.ring.visits(at, begin, step) for at in (step - 1, step)]
            self.ring.hop(Link.INTRA, Cargo.GRAD, before, self.total, both)

    def add(self, step: int, shares: list[tuple[Span, Ref]]) -> None:
        """Add a step's shares to what has arrived; send a row's sum home at the end of a round."""
        ring, total = self.ring, self.total
        if step and self.fresh:
            ring.emit(Fill(total))
        for rows, share in shares:
            ring.emit(Add((total.at(rows), share), total.at(rows)))
        round_, place = divmod(step, ring.places)
        if place < ring.places - 1:
            return
        if round_ == 0:
            self.waiting = total if step else None
            return
        self.arrive()
        due = min(step + ring.places, ring.spec.topology.cp_size)
        leaves = self.buffer("leaves", step, Dtype.WIRE)
        self.arriving = self.buffer("arrives", due, Dtype.WIRE)
        ring.emit(Add((total,), leaves))
        # what arrives is for the rank for which `waiting` is
        row = step - ring.places + 1, step + 1
        both = ring.visits(step, *row), ring.visits(ring.places - 1, *row)
        ring.hop(Link.INTER, Cargo.GRAD, leaves, self.arriving, both, -round_)

    def arrive(self) -> None:
        """Add the sum that another row sent a round ago."""
        if self.arriving:
            total = self.waiting or self.own
            self.ring.emit(Add((total, self.arriving), total))

    def finish(self) -> None:
        """Add the last row's sum, and return the total to the owner."""
        ring = self.ring
        self.arrive()
        if self.waiting:
            last = ring.spec.topology.cp_size + (ring.nodes > 1)
            came = self.buffer("sum", last, ring.spec.ring_sum_dtype)
            every = 1, ring.spec.topology.cp_size
            both = [ring.visits(at, *every) for at in (ring.places - 1, 0)]
            ring.hop(Link.INTRA, Cargo.GRAD, self.waiting, came, both)
            ring.emit(Add((self.own, came), self.own))


def _alone(spec: Spec) -> Program:
    """The program of a rank that has the whole sequence: one kernel, and its results. To have the
    bits of an all-to-all it needs that one's delta, and rounds where that one does."""
    emitter = Emitter(spec)
    names = ("dq", "dkv") if spec.backward else ("out",)
    for name in () if spec.invariant else names:
        made = emitter.buffers[name]
        emitter.buffer(name, Space.TEMP, made.rows, made.fields)
    (tile,) = tiles(spec.layout, spec.mask, 0, 0, 1, spec.shape.tokens, spec.shape.keys)
    kv = Ref("kv")
    if spec.backward:
        side, dq, dkv = (Ref("side"),), Ref("dq"), Ref("dkv")
        if spec.invariant:
            side = emitter.side_for_kernel(*side, emitter.delta())
        emitter.emit(AttendBackward(side, kv, tile.mask, dq, dkv, tile.positions))
    else:
        heads = tuple(range(spec.shape.heads_q))
        emitter.emit(Attend(Ref("q"), kv, tile.mask, (Ref("out"),), tile.positions, heads))
    return emitter.program()
