"""The nested ring: N rows of L ranks (`Topology.grid`), rings inside rows and between them.

    in step round * L + place, rank (n, l) works with the shard of rank (n - round, l - place)

Inputs go around the intra ring within a round; at the start of a round the next round's shard is
sent on the inter ring and has the whole round to arrive.

The gradient of a circulating shard follows one step later along the intra ring, summed on the way
in the accumulation dtype. Each row's sum ends one place before the owner's column. There the sum of
the owner's row waits. The sums of other rows are rounded once and go straight to that place. There
each is added to the sum that waits, a round after it was sent; only the last one, which on two
nodes is the only one, has no round to arrive in. The total takes one intra hop to the owner, whose
own contribution never leaves it. So N(L-1) intra and N-1 inter hops, as for the inputs.

Source: BurstEngine (arXiv 2509.19836) for the double ring; the return transfer is our own.
"""

from megatron_burst.schedule import program as ops
from megatron_burst.schedule.chunks import ChunkPairs, NeededBy, chunk_pairs
from megatron_burst.schedule.emitter import Emitter, Sinks
from megatron_burst.schedule.layout import Layout, chunks_of
from megatron_burst.schedule.mask import Span, Tile, check_mask, tiles
from megatron_burst.schedule.program import Program, Ref, Space
from megatron_burst.schedule.spec import Cargo, Dtype, Spec
from megatron_burst.schedule.topology import Link


def ring(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the layout cannot hold that many rows.
    """
    if spec.topology.cp_size == 1:
        return _single_rank(spec)
    check_mask(spec.mask, spec.layout, "ring", one_call=False)
    emitter = _Ring(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _Ring(Emitter):
    """Emits one pass; `step` counts over rounds and places."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.row, self.column = spec.topology.coord(spec.cp_rank)
        self.inter_size, self.intra_size = spec.topology.inter_size, spec.topology.intra_size
        self.queries_stay = spec.queries_stay

    @property
    def result_dtype(self) -> Dtype:
        return Dtype.SUM

    def forward(self) -> None:
        shape, out, circulating = self.spec.shape, Ref("out"), self.pack_own(("kv",))
        fields = self.fields("out lse", shape.heads_q)
        self.emit(ops.Fill(out))
        for step in range(self.spec.topology.cp_size):
            circulating = self.send_inputs(step, circulating)
            kv = self.in_query_order(step, self.circulating(step))
            step_tiles = self.tiles_of(step)
            if step == 0:  # the rank's own keys, of which each row sees one at least
                sinks = Sinks(step_tiles, range(shape.heads_q))
            for number, tile in enumerate(step_tiles):
                part = self.temp(f"part {step}.{number}", len(tile.q), fields)
                q, keys, joins = Ref("q").at(tile.q), kv.at(tile.kv), sinks.join(tile)
                attend = ops.Attend(q, keys, tile.mask, (part,), tile.positions, sinks.heads, joins)
                self.emit(attend)
                self.emit(ops.Merge((out.at(tile.q), part), (out.at(tile.q),)))

    def backward(self) -> None:
        # One step s of round r, if K and V circulate; all rows of the picture overlap:
        #   kernels      dq, dkv of the tiles of s ----> dq += dq of s, then sum(s) += dkv of s
        #   intra, read  K, V of s+1 ------->
        #   intra, grad  sum(s-1) to the next rank --->  which adds to it only after its kernels
        #   inter, read  K, V of round r+1 ------------------------------------- (the whole round)
        #   inter, grad  the row's sum of round r-1, to the owner's row -------- (the whole round)
        # The last round's sum has no round to arrive in.
        # If Q, dO, lse and delta circulate, dq follows, and dkv stays.
        sides = (Ref("side"),) if self.queries_stay else (Ref("side"), self.delta())
        own = ("kv",) if self.queries_stay else tuple(side.buffer for side in sides)
        circulating = self.pack_own(own)
        self.emit(ops.Fill(Ref("dq")), ops.Fill(Ref("dkv")))
        grads = GradRing(self)
        for step in range(self.spec.topology.cp_size):
            circulating = self.send_inputs(step, circulating)
            grads.send_sum(step)
            grads.add(step, self.compute(step, sides))
        grads.finish()

    def compute(self, step: int, sides: tuple[Ref, ...]) -> list[tuple[Span, Ref]]:
        """Compute a step's tiles: add gradients that stay, return (rows, part) of the others."""
        kv, step_tiles = Ref("kv"), self.tiles_of(step)
        if self.queries_stay:
            kv = self.circulating(step)
        elif step and step_tiles:
            sides = self.side_for_kernel(self.circulating(step))
        kv, grads = self.in_query_order(step, kv), []
        shape, dtype = self.spec.shape, self.spec.grad_dtype
        for number, tile in enumerate(step_tiles):
            name = f"{step}.{number}"
            dq = self.temp(f"dq {name}", len(tile.q), self.fields("dq", shape.heads_q, dtype))
            dkv_fields = self.fields("dk dv", shape.heads_kv, dtype)
            dkv = self.temp(f"dkv {name}", len(tile.kv), dkv_fields)
            rows = tuple(side.at(tile.q) for side in sides)
            keys = kv.at(tile.kv)
            self.emit(ops.AttendBackward(rows, keys, tile.mask, dq, dkv, tile.positions))
            local, remote = (tile.q, dq), self.in_shard_order(step, tile, dkv)
            if not self.queries_stay:
                local, remote = remote, local
            total = Ref("dq" if self.queries_stay else "dkv").at(local[0])
            self.emit(ops.Add((total, local[1]), total))
            grads.append(remote)
        return grads

    def in_query_order(self, step: int, keys: Ref) -> Ref:
        """Keys in the order that the tiles of a step need."""
        pairs = self.chunk_pairs_of(step)
        if not pairs or pairs.is_identity:
            return keys
        fields = self.fields("k v", self.spec.shape.heads_kv)
        target = self.temp(f"rearranged {step}", len(pairs.tile.kv), fields)
        self.emit(ops.Arrange(keys, target, pairs.src_blocks, pairs.dst_chunks))
        return target

    def in_shard_order(self, step: int, tile: Tile, dkv: Ref) -> tuple[Span, Ref]:
        """Gradients of a tile's keys, and the keys' rows in the shard that has them."""
        pairs, shape = self.chunk_pairs_of(step), self.spec.shape
        if not pairs or pairs.is_identity:
            return tile.kv, dkv
        fields = self.fields("dk dv", shape.heads_kv, self.spec.grad_dtype)
        target = self.temp(f"restored {step}", shape.tokens, fields)
        self.emit(ops.Restore(dkv, target, pairs.src_blocks, pairs.dst_chunks))
        return Span(0, shape.tokens), target

    def tiles_of(self, step: int) -> tuple[Tile, ...]:
        """The tiles between this rank and the owner of what circulates."""
        spec = self.spec
        if pairs := self.chunk_pairs_of(step):
            return (pairs.tile,)
        sizes = spec.topology.cp_size, spec.shape.tokens, spec.shape.keys
        return tiles(spec.layout, spec.mask, *self.q_and_kv_owner(step), *sizes)

    def chunk_pairs_of(self, step: int) -> ChunkPairs | None:
        """The chunks of documents in a step's tile, if each rank has two chunks of each."""
        spec, size = self.spec, self.spec.topology.cp_size
        if spec.layout is not Layout.DOCUMENTS:
            return None
        queries, keys = (chunks_of(rank, size) for rank in self.q_and_kv_owner(step))
        return chunk_pairs(queries, (keys,), spec.mask, spec.shape.tokens // 2)

    def q_and_kv_owner(self, step: int) -> tuple[int, int]:
        """The ranks whose queries and whose keys are in a step's tiles."""
        this_rank, owner = self.spec.cp_rank, self.owner(step)
        return (this_rank, owner) if self.queries_stay else (owner, this_rank)

    def owner(self, step: int) -> int:
        """The rank whose shard circulates through this rank in a step."""
        round_, place = divmod(step, self.intra_size)
        return self.spec.topology.rank_at(self.row - round_, self.column - place)

    def needed_in(self, step: int, begin: int, end: int) -> NeededBy | None:
        """The condition of a transfer of a step's circulating shard, or of its gradients, for the
        ranks that have this shard in the steps from `begin` to before `end`."""
        topology, owner = self.spec.topology, self.owner(step)
        row, column = topology.coord(owner)
        coords = (divmod(later, self.intra_size) for later in range(begin, end))
        ranks = [topology.rank_at(row + round_, column + place) for round_, place in coords]
        return NeededBy.of_circulating(self.spec, owner, ranks)

    def pack_own(self, names: tuple[str, ...]) -> Ref:
        """The rank's own shard, packed for sending."""
        packed = self.ring_buffer(0)
        self.emit(ops.Copy(tuple(map(Ref, names)), packed))
        return packed

    def ring_buffer(self, step: int) -> Ref:
        shape = self.spec.shape
        if self.queries_stay:
            rows, fields = shape.keys, self.fields("k v", shape.heads_kv)
        else:
            rows, fields = shape.tokens, self.circulating_side(shape.heads_q)
        return self.buffer(f"circulating {step}", Space.POOL, rows, fields, Cargo.READ)

    def circulating(self, step: int) -> Ref:
        """What circulates in a step; the rank's own keys are read from the call's buffer."""
        return Ref(f"circulating {step}" if step or not self.queries_stay else "kv")

    def send_inputs(self, step: int, circulating: Ref) -> Ref:
        """Start the hops of a step; returns what circulates in the next one."""
        round_, place = divmod(step, self.intra_size)
        round_end = (round_ + 1) * self.intra_size
        if place == 0:
            self.next_round = None
            if round_ < self.inter_size - 1:
                self.next_round = self.ring_buffer(round_end)
                readers = round_end, self.spec.topology.cp_size
                needed = [self.needed_in(at, *readers) for at in (step, round_end)]
                self.hop(Link.INTER, Cargo.READ, circulating, self.next_round, needed)
        if place == self.intra_size - 1:
            return self.next_round or circulating
        target = self.ring_buffer(step + 1)
        needed = [self.needed_in(at, step + 1, round_end) for at in (step, step + 1)]
        self.hop(Link.INTRA, Cargo.READ, circulating, target, needed)
        return target


class GradRing:
    """Gradients of the circulating shards, one step behind them."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.own = Ref("dkv" if ring.queries_stay else "dq")
        self.total: Ref = self.own  # of the previous step
        self.row_sum: Ref | None = None  # the own row's sum, for the next column
        self.remote_sum: Ref | None = None  # another row's sum, for the same owner

    def buffer(self, name: str, step: int, dtype: Dtype) -> Ref:
        """Where a gradient is in a step, or arrives by its end."""
        shape = self.ring.spec.shape
        if self.ring.queries_stay:
            rows, fields = shape.keys, self.ring.fields("dk dv", shape.heads_kv, dtype)
        else:
            rows, fields = shape.tokens, self.ring.fields("dq", shape.heads_q, dtype)
        return self.ring.buffer(f"{name} {step}", Space.POOL, rows, fields, Cargo.GRAD)

    def send_sum(self, step: int) -> None:
        """Before a step's tiles: send on the previous step's sum."""
        if step == 0:
            return
        ring, size, previous = self.ring, self.ring.intra_size, self.total
        self.fresh = step % size == 0 or step == 1
        self.total = self.buffer("sum", step, ring.spec.ring_sum_dtype)
        if not self.fresh:
            begin = max(1, step - step % size)  # the owner's own contribution stays with it
            needed = [ring.needed_in(at, begin, step) for at in (step - 1, step)]
            ring.hop(Link.INTRA, Cargo.GRAD, previous, self.total, needed)

    def add(self, step: int, grads: list[tuple[Span, Ref]]) -> None:
        """Add a step's gradients to the sum that arrived; at the end of a round return the sum."""
        ring, total, size = self.ring, self.total, self.ring.intra_size
        if step and self.fresh:
            ring.emit(ops.Fill(total))
        for rows, grad in grads:
            ring.emit(ops.Add((total.at(rows), grad), total.at(rows)))
        round_, place = divmod(step, size)
        if place < size - 1:
            return
        if round_ == 0:
            self.row_sum = total if step else None
            return
        self.add_arrived()
        due = min(step + size, ring.spec.topology.cp_size)
        outgoing = self.buffer("outgoing sum", step, Dtype.WIRE)
        self.remote_sum = self.buffer("incoming sum", due, Dtype.WIRE)
        ring.emit(ops.Add((total,), outgoing))
        # `remote_sum` is for the same rank as `row_sum`
        needed = [ring.needed_in(at, step - size + 1, step + 1) for at in (step, size - 1)]
        ring.hop(Link.INTER, Cargo.GRAD, outgoing, self.remote_sum, needed, -round_)

    def add_arrived(self) -> None:
        """Add the sum that another row sent a round ago."""
        if self.remote_sum:
            total = self.row_sum or self.own
            self.ring.emit(ops.Add((total, self.remote_sum), total))

    def finish(self) -> None:
        """Add the last row's sum, and return the total to the owner."""
        ring, cp_size = self.ring, self.ring.spec.topology.cp_size
        self.add_arrived()
        if self.row_sum:
            received = self.buffer("sum", cp_size + (ring.inter_size > 1), ring.spec.ring_sum_dtype)
            needed = [ring.needed_in(at, 1, cp_size) for at in (ring.intra_size - 1, 0)]
            ring.hop(Link.INTRA, Cargo.GRAD, self.row_sum, received, needed)
            ring.emit(ops.Add((self.own, received), self.own))


def _single_rank(spec: Spec) -> Program:
    """The program of a rank that has the whole sequence: one kernel. To have the bits of an
    all-to-all it needs the same delta as there, and rounds where the all-to-all does."""
    emitter = Emitter(spec)
    if not spec.invariant:
        for name in ("dq", "dkv") if spec.backward else ("out",):
            result = emitter.buffers[name]
            emitter.buffer(name, Space.TEMP, result.rows, result.fields)
    (tile,) = tiles(spec.layout, spec.mask, 0, 0, 1, spec.shape.tokens, spec.shape.keys)
    kv = Ref("kv")
    if spec.backward:
        side, dq, dkv = (Ref("side"),), Ref("dq"), Ref("dkv")
        if spec.invariant:
            side = emitter.side_for_kernel(*side, emitter.delta())
        emitter.emit(ops.AttendBackward(side, kv, tile.mask, dq, dkv, tile.positions))
    else:
        into, heads = (Ref("out"),), tuple(range(spec.shape.heads_q))
        emitter.emit(ops.Attend(Ref("q"), kv, tile.mask, into, tile.positions, heads, True))
    return emitter.program()
