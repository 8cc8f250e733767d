"""Gathering for documents of which each rank has two chunks (layout "zigzag-documents").

Keys are received from all ranks of the node, a few heads at a time, rank by rank, and rearranged as
this rank's queries need them (`chunks`). So one kernel call computes a step of a round, all ranks
have equal work, and queries, results and their gradients stay in place. Gradients of keys are put
back into rank order, sent to the ranks that hold the keys, and summed there during the next step. A
node of one rank gathers nothing; its keys are often in order already.

On several nodes the other nodes' shards circulate (`inter_node`), as in `gather`.
"""

from megatron_burst.schedule.call import Cargo, Circulate
from megatron_burst.schedule.chunks import Meeting, by_rank, meeting
from megatron_burst.schedule.emitter import Gradients, Outputs
from megatron_burst.schedule.inter_node import (
    Circulating,
    InRounds,
    Sides,
    heads_in_rounds,
    steps,
    sums,
    whole,
)
from megatron_burst.schedule.layout import chunks_of
from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.operations import Arrange, Copy, Give, Ref, Restore, Stream, Take
from megatron_burst.schedule.program import Dtype, Field, Home, dkv_fields, kv_fields
from megatron_burst.schedule.spec import Spec


class Documents(InRounds):
    """Emits one pass."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        topology, self.tokens = spec.topology, spec.shape.tokens
        self.row, self.column = topology.coord(spec.cp_rank)
        self.ranks, self.others = topology.grid[self.row], topology.others(spec.cp_rank)
        self.alone = topology.inter_size == 1
        self.rounds = heads_in_rounds(spec.shape.heads_kv, spec.heads_per_round)
        self.order = steps(topology.inter_size, len(self.rounds), spec.backward, spec.left)
        self.met = [self.meeting(step.distance) for step in self.order]
        self.keys = Keys(self)

    def meeting(self, away: int) -> Meeting:
        """How this rank's chunks meet those of the node `away` nodes away."""
        topology, spec = self.spec.topology, self.spec
        rank, ranks = topology.rank_at(self.row - away, self.column), self.ranks
        if spec.circulate is Circulate.KV:
            rank, ranks = spec.cp_rank, topology.grid[(self.row - away) % topology.inter_size]
        size = topology.cp_size
        lies = by_rank(ranks, size)
        return meeting(chunks_of(rank, size), lies, spec.mask, self.tokens // 2)

    def forward(self) -> None:
        self.keys.prepare(0, late=False)
        self.keys.prepare(0, late=True)
        for index, step in enumerate(self.order):
            if step.first:
                heads = self.queries(self.rounds[step.round])
                q, out = (Ref(name, heads=heads) for name in ("q", "out"))
                here = self.order, self.met
                tiles = [met.tile for at, met in zip(*here, strict=True) if at.round == step.round]
                outputs = Outputs(self, f"round {step.round}", tiles, q, out)
            self.keys.prepare(index + 1, late=False)
            outputs.compute(self.met[index].tile, self.keys.of(index))
            self.keys.prepare(index + 1, late=True)
            if step.last:
                outputs.merge()

    def backward(self) -> None:
        sides, keys, shares = Sides(self, self.order, self.rounds), self.keys, Shares(self)
        of_queries = sums(self, self.order, False, self.dq_of, self.dq_fields_of, self.tokens)
        sides.prepare(0)
        keys.prepare(0, late=False)
        keys.prepare(0, late=True)
        for index, step in enumerate(self.order):
            heads = self.rounds[step.round]
            tile, direct = self.met[index].tile, self.dq_of(step.round) if self.alone else None
            counts = len(self.queries(heads)), len(heads)
            keys.prepare(index + 1, late=False)
            grads = Gradients(
                self, f"{index}", (tile,), sides.of(index), direct, counts, self.tokens
            )
            grads.compute(tile, keys.of(index), into=shares.made(index))
            shares.sum_up(index - 1)
            sides.prepare(index + 1)
            keys.prepare(index + 1, late=True)
            shares.leave(index)
            of_queries.add(index, grads.sums())
            of_queries.come_home(index)
        of_queries.come_home(len(self.order))
        shares.finish()

    def block(self, slot: Ref, rank: int) -> Ref:
        """A rank's rows in a slot that has those of all."""
        first = self.ranks.index(rank) * self.tokens
        return slot.at(Span(first, first + self.tokens))

    @staticmethod
    def beside(index: int) -> Stream:
        """Nothing hides the first step's copies; later ones run in parallel with kernels."""
        return Stream.SIDE if index else Stream.COMPUTE


class Keys:
    """Keys and values of each step, in the order that this rank's queries need."""

    def __init__(self, emitter: Documents) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._recalls = spec.left and spec.backward
        self._travel = not spec.backward or spec.circulate is Circulate.KV
        self._circulating = None
        if self._travel and not self._recalls and not emitter.alone:
            self._circulating = Circulating(
                emitter, emitter.order, lambda round_: (Ref("kv", heads=emitter.rounds[round_]),),
                self._fields, whole(emitter, emitter.tokens),
            )  # fmt: skip
        gathers = len(emitter.order) if self._travel else len(emitter.rounds)
        self._slots = emitter.slot_count(
            Cargo.READ, gathers, len(emitter.ranks) * emitter.tokens, self._fields(0)
        )
        self._there: dict[int, Ref] = {}  # by step, before and after rearranging
        self._seen: dict[int, Ref] = {}

    def _fields(self, round_: int) -> tuple[Field, ...]:
        return kv_fields(len(self._emitter.rounds[round_]), self._emitter.spec.shape)

    def prepare(self, index: int, late: bool) -> None:
        """Start fetching a step's keys: what is here before the kernels that hide it; after them
        (`late`) what comes from other nodes, and copies."""
        if index >= len(self._emitter.order):
            return
        comes = bool(self._circulating and self._emitter.order[index].distance)
        if self._circulating and late:
            self._circulating.set_out(index)
        if comes == late:
            self._there[index] = self._gather(index)
        if late:
            self._seen[index] = self._arrange(index)
            if self._circulating:
                self._circulating.pass_on(index)

    def _source(self, index: int) -> Ref:
        """The shard that this rank contributes: its own, or the one it received."""
        emitter, step = self._emitter, self._emitter.order[index]
        source = Ref("kv", heads=emitter.rounds[step.round])
        if not (step.distance and self._travel):
            return source
        if self._circulating:
            source = self._circulating.piece(step.round, step.distance)
        if emitter.spec.left:
            name, fields = f"left {step.round}+{step.distance}", self._fields(step.round)
            left = emitter.buffer(name, Home.LEFT, emitter.tokens, fields)
            if self._circulating:
                emitter.emit(Copy((source,), left, Stream.SIDE))
            source = left
        return source

    def _gather(self, index: int) -> Ref:
        """The keys of all ranks of the node."""
        emitter, step = self._emitter, self._emitter.order[index]
        if not (self._travel or step.first):
            return self._there[index - 1]
        source = self._source(index)
        if len(emitter.ranks) == 1:
            return source
        number, mine = index if self._travel else step.round, emitter.spec.cp_rank
        slot = emitter.buffer(
            f"keys {number}", Home.SLOT, len(emitter.ranks) * emitter.tokens,
            self._fields(step.round), Cargo.READ, number, self._slots,
        )  # fmt: skip
        emitter.emit(Copy((source,), emitter.block(slot, mine), emitter.beside(index)))
        gives = [Give(peer, emitter.block(slot, mine)) for peer in emitter.others]
        takes = [Take(p, emitter.block(slot, p), emitter.block(slot, p)) for p in emitter.others]
        emitter.exchange(Cargo.READ, slot, gives, takes)
        return slot

    def _arrange(self, index: int) -> Ref:
        emitter, met = self._emitter, self._emitter.met[index]
        if met.as_they_lie:
            return self._there[index]
        fields, count = self._fields(emitter.order[index].round), min(2, len(emitter.order))
        seen = emitter.buffer(
            f"seen {index}", Home.STAGING, len(met.tile.kv), fields, "seen", index, count
        )
        there, stream = self._there[index], emitter.beside(index)
        emitter.emit(Arrange(there, seen, met.lies, met.numbers, stream))
        return seen

    def of(self, index: int) -> Ref:
        """The keys and values of a step."""
        return self._seen[index]


class Shares:
    """Gradients of a step's keys, sent to the ranks that hold the keys, and their sums."""

    def __init__(self, emitter: Documents) -> None:
        self._emitter = emitter
        self._rows = len(emitter.ranks) * emitter.tokens
        self._slots = emitter.slot_count(
            Cargo.GRAD, len(emitter.order), self._rows, self._fields(0, emitter.spec.share_dtype)
        )
        self._parts: dict[int, tuple[Ref, ...]] = {}  # by step, of the rows held here

        def fields(round_: int, dtype: Dtype) -> tuple[Field, ...]:
            return self._fields(round_, dtype)

        def target(round_: int) -> Ref:
            return Ref("dkv", heads=emitter.rounds[round_])

        self._sums = sums(emitter, emitter.order, True, target, fields, emitter.tokens)

    def _fields(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return dkv_fields(len(self._emitter.rounds[round_]), self._emitter.spec.shape, dtype)

    def made(self, index: int) -> Ref:
        """Where the kernel of a step writes them, in the order of its keys."""
        emitter = self._emitter
        fields = self._fields(emitter.order[index].round, emitter.spec.grad_dtype)
        rows, count = len(emitter.met[index].tile.kv), min(2, len(emitter.order))
        return emitter.buffer(f"made {index}", Home.STAGING, rows, fields, "made", index, count)

    def leave(self, index: int) -> None:
        """Send them to the ranks that hold the keys."""
        emitter, met, made = self._emitter, self._emitter.met[index], Ref(f"made {index}")
        fields = self._fields(emitter.order[index].round, emitter.spec.share_dtype)
        if met.as_they_lie:
            self._parts[index] = (made,)
            return
        if len(emitter.ranks) == 1:
            count = min(2, len(emitter.order))
            whole = emitter.buffer(
                f"whole {index}", Home.STAGING, self._rows, fields, "whole", index, count
            )
            emitter.emit(Restore(made, whole, met.lies, met.numbers, Stream.SIDE))
            self._parts[index] = (whole,)
            return
        slot, mine = emitter.buffer(
            f"shares {index}", Home.SLOT, self._rows, fields, Cargo.GRAD, index, self._slots
        ), emitter.spec.cp_rank  # fmt: skip
        emitter.emit(Restore(made, slot, met.lies, met.numbers, Stream.SIDE))
        came = emitter.buffer(f"came {index}", Home.STAGING, self._rows, fields, "shares")
        gives = [Give(peer, emitter.block(slot, peer)) for peer in emitter.others]
        takes = [Take(p, emitter.block(slot, mine), emitter.block(came, p)) for p in emitter.others]
        emitter.exchange(Cargo.GRAD, slot, gives, takes)
        here = (emitter.block(came, peer) for peer in emitter.others)
        self._parts[index] = (emitter.block(slot, mine), *here)

    def sum_up(self, index: int) -> None:
        """Sum what was received of a step; send on what goes to other nodes."""
        if index < 0:
            return
        parts = [(Span(0, self._emitter.tokens), self._parts.pop(index))]
        self._sums.add(index, parts, Stream.SIDE)
        self._sums.come_home(index, Stream.SIDE)

    def finish(self) -> None:
        """The last sums, and the last return transfer."""
        last = len(self._emitter.order)
        self.sum_up(last - 1)
        self._sums.come_home(last, Stream.SIDE)
