"""Gathering: every rank of a node gets the keys of all, a few heads at a time.

A round is a group of KV heads. Its keys and values are in sequence order, so whatever a rank's
queries may see is one range of rows. While a step is computed, the next step's keys arrive, and the
previous step's key gradients go to the ranks that hold the keys. The first step has none before it
and, in backward, the last has none after it: there the rank's own diagonal tiles, which need no
other rank, hide the transfer. If gradients go on to other nodes, half of the last step's diagonal
tiles come first: they hide the last such sum.

On one node a round is one step. On several, the other nodes' shards circulate (`inter_node`): K and
V, gathered inside the node in each step; or in backward queries, which meet keys gathered once per
round.
"""

from megatron_burst.schedule.call import Cargo, Circulate
from megatron_burst.schedule.emitter import Gradients, Outputs, Sum, sums_of
from megatron_burst.schedule.gather_documents import Documents
from megatron_burst.schedule.gather_steps import gather_steps
from megatron_burst.schedule.inter_node import Circulating, InRounds, Sides, sums
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Span, Tile, check_mask, cut
from megatron_burst.schedule.operations import Copy, Give, Ref, Stream, Take
from megatron_burst.schedule.pieces import Halo, halo
from megatron_burst.schedule.program import Field, Home, Program, dkv_fields, kv_fields
from megatron_burst.schedule.spec import Spec


def gather(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the layout cannot be gathered or cannot hold that many rows.
    """
    check_mask(spec.mask, spec.layout, "gather", spec.topology.inter_size == 1)
    emitter = Documents(spec) if spec.layout is Layout.DOCUMENTS else _Gather(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _Gather(InRounds):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.plan = gather_steps(spec)
        self.rounds, self.order = self.plan.rounds, self.plan.order
        self.others = spec.topology.others(spec.cp_rank)
        self.halos = self._halos()
        self.keys = Keys(self)

    def _halos(self) -> tuple[Halo, ...]:
        """Rows of the circulating keys, by how many nodes away they are from."""
        spec, topology = self.spec, self.spec.topology
        row, column = topology.coord(spec.cp_rank)
        owners = (topology.rank_at(row - away, column) for away in range(topology.inter_size))
        terms = topology, spec.layout, spec.mask, spec.shape.tokens
        return tuple(halo(*terms, owner) for owner in owners)

    def forward(self) -> None:
        self.keys.prepare(0, late=False)
        self.keys.prepare(0, late=True)
        for index, step in enumerate(self.plan.steps):
            heads = self.queries(step.heads)
            if self.order[index].first:
                tiles = self.plan.tiles_of_round(self.order[index].round)
                name = f"round {self.order[index].round}"
                q, out = Ref("q", heads=heads), Ref("out", heads=heads)
                outputs = Outputs(self, name, tiles, q, out)
            for tile in step.before:
                outputs.compute(tile, Ref("kv", heads=step.heads))
            self.keys.prepare(index + 1, late=False)
            for tile in step.tiles:
                outputs.compute(tile, self.keys.of(index))
            self.keys.prepare(index + 1, late=True)
            if self.order[index].last:
                outputs.merge()

    def backward(self) -> None:
        sides, keys = Sides(self, self.order, self.rounds), self.keys
        shares = Shares(self)
        rows = self.spec.shape.tokens
        of_queries = sums(self, self.order, False, self.dq_of, self.dq_fields_of, rows)
        of_keys = KeySums(self, shares)
        alone = self.spec.topology.inter_size == 1
        sides.prepare(0)
        keys.prepare(0, late=False)
        keys.prepare(0, late=True)
        for index, step in enumerate(self.plan.steps):
            side, heads = sides.of(index), (len(self.queries(step.heads)), len(step.heads))
            direct = self.dq_of(self.order[index].round) if alone else None
            tiles = Gradients(self, f"{index}", step.every_tile, side, direct, heads, rows)
            own = Ref("kv", heads=step.heads)
            of_keys.before(index - 1)
            for tile in step.before:
                shares.add_own(index, tile, tiles.compute(tile, own))
            if step.before:  # these tiles hide the transfer inside the node that the sums wait for
                of_keys.add(index - 1)
            keys.prepare(index + 1, late=False)
            for tile, share in zip(step.tiles, shares.of(index), strict=True):
                tiles.compute(tile, keys.of(index), into=share)
            if not step.before:
                of_keys.add(index - 1)
            sides.prepare(index + 1)
            keys.prepare(index + 1, late=True)
            of_keys.come_home(index - 1)
            shares.leave(index)
            for tile in step.after:
                shares.add_own(index, tile, tiles.compute(tile, own))
            of_queries.add(index, tiles.sums())
            of_queries.come_home(index)
        of_queries.come_home(len(self.order))
        of_keys.finish()


class Keys:
    """Keys and values of all ranks of a node, one gather at a time, in sequence order.

    Rows that no tile of this rank reads are not fetched; their contents are undefined.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan, spec = emitter, emitter.plan, emitter.spec
        self._travels = not spec.backward or spec.circulate is Circulate.KV
        self._recalls = spec.left and spec.backward
        self._circulating = None
        if self._travels and not self._recalls and spec.topology.inter_size > 1:
            self._circulating = Circulating(
                emitter, emitter.order, lambda round_: (Ref("kv", heads=emitter.rounds[round_]),),
                self._fields, emitter.halos,
            )  # fmt: skip
        self._slots = emitter.slot_count(
            Cargo.READ, len(self._plan.reads), self._plan.num_rows, self._fields(0)
        )

    def _fields(self, round_: int) -> tuple[Field, ...]:
        return kv_fields(len(self._emitter.rounds[round_]), self._emitter.spec.shape)

    def _begins(self, index: int) -> bool:
        """Whether a step is the first that uses its gather."""
        steps = self._plan.steps
        return index == 0 or steps[index].gather != steps[index - 1].gather

    def prepare(self, index: int, late: bool) -> None:
        """Start fetching a step's keys: before the kernels that hide it (a gather of what is here,
        if slots allow), and after them (`late`) what waits for other nodes."""
        if index >= len(self._plan.steps):
            return
        comes = bool(self._circulating and self._emitter.order[index].distance)
        early = not comes and (self._slots > 1 or index == 0)
        if not late:
            if early:
                self._gather(index)
            return
        if not comes and not early:
            self._gather(index)
        if self._circulating:
            self._circulating.set_out(index)
        if comes:
            self._gather(index)
        if self._circulating:
            self._circulating.pass_on(index)

    def _gather(self, index: int) -> None:
        emitter, step, stream = self._emitter, self._emitter.order[index], Stream.COMPUTE
        source = Ref("kv", heads=self._plan.steps[index].heads)
        if step.distance and self._circulating:
            source, stream = self._circulating.piece(step.round, step.distance), Stream.SIDE
        if step.distance and emitter.spec.left:
            name = f"left {step.round}+{step.distance}"
            fields = self._fields(step.round)
            halo = emitter.halos[step.distance]
            left = emitter.buffer(name, Home.LEFT, halo.rows, fields)
            if self._circulating and halo.rows:
                emitter.emit(Copy((source,), left, stream))
            source = left
        if self._begins(index):
            self._fill_and_exchange(index, source, stream)

    def _fill_and_exchange(self, index: int, source: Ref, stream: Stream) -> None:
        emitter, step, mine = self._emitter, self._plan.steps[index], self._plan.cp_rank
        slot = emitter.buffer(
            f"keys {step.gather}", Home.SLOT, self._plan.num_rows,
            self._fields(emitter.order[index].round), Cargo.READ, step.gather, self._slots,
        )  # fmt: skip
        away = emitter.order[index].distance if self._travels else 0
        for piece in (piece for piece in step.keys if piece.holder == mine):
            if away == 0:
                emitter.emit(Copy((source.at(piece.rows),), slot.at(piece.whole), stream))
                continue
            for rows, packed in emitter.halos[away].parts(piece.rows):
                there = rows.moved(piece.whole.start - piece.rows.start)
                emitter.emit(Copy((source.at(packed),), slot.at(there), stream))
        reads, others = self._plan.reads[step.gather], self._emitter.others
        gives = [Give(peer, slot.at(p.whole)) for peer in others for p in reads[peer]]
        takes = [
            Take(peer, slot.at(piece.whole), slot.at(piece.whole))
            for peer in others
            for piece in reads[mine]
            if piece.holder == peer
        ]
        emitter.exchange(Cargo.READ, slot, gives, takes)

    def of(self, index: int) -> Ref:
        """The gathered keys and values of a step."""
        return Ref(f"keys {self._plan.steps[index].gather}")


class Shares:
    """Gradients of gathered keys, sent to the ranks that hold these keys.

    A share is in the kernel's dtype (or the wire's) and rounded once; all shares of a row are
    summed in the accumulation dtype in one pass, so errors do not grow with the number of ranks.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan = emitter, emitter.plan
        self.slots = emitter.slot_count(
            Cargo.GRAD, len(self._plan.steps), self._plan.share_rows, self._fields(0)
        )
        self._own: dict[int, list[tuple[Tile, Ref]]] = {}

    def _fields(self, round_: int) -> tuple[Field, ...]:
        emitter = self._emitter
        heads, dtype = len(emitter.rounds[round_]), emitter.spec.share_dtype
        return dkv_fields(heads, emitter.spec.shape, dtype)

    def of(self, index: int) -> list[Ref]:
        """Where the tiles of a step write their shares, one after the other."""
        lengths = [len(tile.kv) for tile in self._plan.steps[index].tiles]
        fields = self._fields(self._emitter.order[index].round)
        slot = self._emitter.buffer(
            f"shares {index}",
            Home.SLOT,
            self._plan.share_rows,
            fields,
            Cargo.GRAD,
            index,
            self.slots,
        )
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        pairs = zip(starts, lengths, strict=True)
        return [slot.at(Span(start, start + length)) for start, length in pairs]

    def add_own(self, index: int, tile: Tile, share: Ref) -> None:
        """Save the share of a tile over the rank's own shard until its step is summed."""
        self._own.setdefault(index, []).append((tile, share))

    def leave(self, index: int) -> None:
        """Start sending a step's shares to the ranks that hold the keys."""
        mine, slot = self._plan.cp_rank, Ref(f"shares {index}")
        leaves = self._plan.steps[index].leaves
        gives = [Give(leaf.piece.holder, slot.at(leaf.rows)) for leaf in leaves[mine]]
        arrivals = self._arrivals(index)
        takes = [Take(rank, slot.at(leaf.rows), rows) for rank, leaf, rows in arrivals]
        self._emitter.exchange(Cargo.GRAD, slot, gives, takes)

    def _arrivals(self, index: int) -> list[tuple]:
        """(rank, what it sends, where that is received)."""
        leaves, found, start = self._plan.steps[index].leaves, [], 0
        total = self._plan.steps[index].arriving_rows
        fields = self._fields(self._emitter.order[index].round)
        staged = self._emitter.buffer(f"came {index}", Home.STAGING, total, fields, "shares")
        for rank in self._emitter.others:
            for leaf in leaves[rank]:
                stop = start + len(leaf.rows)
                found.append((rank, leaf, staged.at(Span(start, stop))))
                start = stop
        return found

    def sums(self, index: int) -> list[Sum]:
        """The sums of a step, for all rows held here."""
        step, mine = self._plan.steps[index], self._plan.cp_rank
        parts = [(tile.kv, share) for tile, share in self._own.pop(index, [])]
        for tile, share in zip(step.tiles, self.of(index), strict=True):
            held = (piece.part(tile.kv) for piece in step.keys if piece.holder == mine)
            parts += [(p.rows, share.at(p.whole.moved(-tile.kv.start))) for p in held if p]
        parts += [(leaf.piece.rows, rows) for _, leaf, rows in self._arrivals(index)]
        edges = (piece.rows for piece in step.keys if piece.holder == mine)
        spans = cut((*edges, *(rows for rows, _ in parts)), self._emitter.spec.shape.tokens)
        return sums_of(parts, spans)


class KeySums:
    """Sums of each step's key gradients, computed during the next step.

    Those that go on to other nodes are summed in parallel with its kernels, so that they are sent
    at once. With a single slot, they must be summed before it is filled again.
    """

    def __init__(self, emitter: _Gather, shares: Shares) -> None:
        self._emitter, self._shares, spec = emitter, shares, emitter.spec

        def fields(round_: int, dtype) -> tuple[Field, ...]:
            return dkv_fields(len(emitter.rounds[round_]), spec.shape, dtype)

        def target(round_: int) -> Ref:
            return Ref("dkv", heads=emitter.rounds[round_])

        self._sums = sums(emitter, emitter.order, True, target, fields, emitter.halos)
        travel = spec.circulate is Circulate.KV and spec.topology.inter_size > 1
        self._one_slot = shares.slots == 1
        self._stream = Stream.SIDE if travel and not self._one_slot else Stream.COMPUTE

    def before(self, index: int) -> None:
        """Before the tiles of the next step."""
        if index >= 0 and self._one_slot:
            self._form(index, Stream.COMPUTE)

    def add(self, index: int) -> None:
        """After its first tiles."""
        if index < 0 or self._one_slot:
            return
        if self._stream is Stream.COMPUTE:
            self._form(index, Stream.COMPUTE)
        else:
            self._sums.add(index, self._shares.sums(index), self._stream)

    def come_home(self, index: int) -> None:
        """After all of them."""
        if index >= 0 and self._stream is Stream.SIDE:
            self._sums.come_home(index, self._stream)

    def _form(self, index: int, stream: Stream) -> None:
        self._sums.add(index, self._shares.sums(index), stream)
        self._sums.come_home(index, stream)

    def finish(self) -> None:
        """The last sums, and the last return transfer."""
        self._form(len(self._emitter.order) - 1, Stream.COMPUTE)
        self._sums.come_home(len(self._emitter.order))
