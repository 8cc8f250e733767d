"""Gathering for documents of which each rank has two chunks (layout "zigzag-documents").

Keys are received from all ranks of the node, a few heads at a time, rank by rank, and rearranged as
this rank's queries need them (`chunks`). So one kernel call computes a step of a round, all ranks
have equal work, and queries, results and their gradients stay in place. Gradients of keys are put
back into rank order, sent to the ranks that hold the keys, and summed there during the next step. A
node of one rank gathers nothing; its keys are often in order already.

On several nodes the other nodes' shards circulate (`inter_node`), as in `gather`.
"""

from megatron_burst.schedule.chunks import Meeting, by_rank, meeting
from megatron_burst.schedule.emitter import Gradients
from megatron_burst.schedule.gather_rounds import GatherEmitter, Keys, StepSides
from megatron_burst.schedule.gather_steps import StepTiles
from megatron_burst.schedule.inter_node import sums, whole_halo
from megatron_burst.schedule.layout import chunks_of
from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.program import (
    Arrange,
    Copy,
    Field,
    Give,
    Home,
    Ref,
    Restore,
    Stream,
    Take,
)
from megatron_burst.schedule.spec import Cargo, Circulate, Dtype, Spec


class DocumentGather(GatherEmitter):
    """Emits one pass."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        topology, self.tokens = spec.topology, spec.shape.tokens
        self.row, self.column = topology.coord(spec.cp_rank)
        self.ranks = topology.grid[self.row]
        self.met = [self.meeting(step.distance) for step in self.order]
        self.tiles = [StepTiles((), (met.tile,), ()) for met in self.met]
        self.keys = KeysByRank(self)

    def meeting(self, away: int) -> Meeting:
        """How this rank's chunks meet those of the node `away` nodes away."""
        topology, spec = self.spec.topology, self.spec
        rank, ranks = topology.rank_at(self.row - away, self.column), self.ranks
        if spec.circulate is Circulate.KV:
            rank, ranks = spec.cp_rank, topology.grid[(self.row - away) % topology.inter_size]
        size = topology.cp_size
        lies = by_rank(ranks, size)
        return meeting(chunks_of(rank, size), lies, spec.mask, self.tokens // 2)

    def backward(self) -> None:
        sides, keys, shares = StepSides(self), self.keys, StepShares(self)
        of_queries = sums(self, self.order, False, self.dq_of, self.dq_fields_of, self.tokens)
        sides.prepare(0)
        keys.prepare(0)
        for index, step in enumerate(self.order):
            heads, (tile,) = self.rounds[step.round], self.tiles[index].gathered
            direct = self.dq_of(step.round) if self.alone else None
            counts = len(self.queries(heads)), len(heads)
            keys.prepare_early(index + 1)
            side = sides.of(index)
            grads = Gradients(self, f"{index}", (tile,), side, direct, counts, self.tokens)
            grads.compute(tile, keys.of(index), into=shares.made(index))
            shares.sum_up(index - 1)
            sides.prepare(index + 1)
            keys.prepare_late(index + 1)
            shares.leave(index)
            of_queries.add(index, grads.sums())
            of_queries.come_home(index)
        of_queries.come_home(len(self.order))
        shares.finish()

    def block(self, slot: Ref, rank: int) -> Ref:
        """A rank's rows in a slot that has those of all."""
        first = self.ranks.index(rank) * self.tokens
        return slot.at(Span(first, first + self.tokens))

    def pair(self, what: str, index: int, rows: int, fields: tuple[Field, ...]) -> Ref:
        """A step's buffer on this rank; two take turns."""
        count = min(2, len(self.order))
        return self.buffer(f"{what} {index}", Home.STAGING, rows, fields, what, index, count)


class KeysByRank(Keys):
    """Keys as gathered, rank by rank, and in the order that this rank's queries need."""

    _emitter: DocumentGather

    def __init__(self, emitter: DocumentGather) -> None:
        gathers = len(emitter.order) if emitter.keys_travel else len(emitter.rounds)
        rows = len(emitter.ranks) * emitter.tokens
        super().__init__(emitter, whole_halo(emitter, emitter.tokens), gathers, rows)
        self._there: dict[int, Ref] = {}  # by step, before and after rearranging
        self._seen: dict[int, Ref] = {}

    def of(self, index: int) -> Ref:
        return self._seen[index]

    def _gather(self, index: int) -> None:
        emitter, step = self._emitter, self._emitter.order[index]
        if not (emitter.keys_travel or step.first):
            self._there[index] = self._there[index - 1]
            return
        source = self._there[index] = self._source(index)
        if len(emitter.ranks) == 1:
            return
        number, mine = index if emitter.keys_travel else step.round, emitter.spec.cp_rank
        slot = self._there[index] = emitter.buffer(
            f"keys {number}", Home.SLOT, len(emitter.ranks) * emitter.tokens,
            emitter.kv_fields_of(step.round), Cargo.READ, number, self._slots,
        )  # fmt: skip
        emitter.emit(Copy((source,), emitter.block(slot, mine), _beside(index)))
        steps, own = emitter.steps_of_keys(index), emitter.block(slot, mine)
        gives = [Give(p, own, emitter.sent_for(steps, p, mine)) for p in emitter.others]
        takes = [
            Take(p, theirs, theirs, emitter.sent_for(steps, mine, p))
            for p in emitter.others
            for theirs in (emitter.block(slot, p),)
        ]
        emitter.exchange(Cargo.READ, slot, gives, takes)

    def _arrange(self, index: int) -> None:
        emitter, met, there = self._emitter, self._emitter.met[index], self._there[index]
        if met.as_they_lie:
            self._seen[index] = there
            return
        fields = emitter.kv_fields_of(emitter.order[index].round)
        self._seen[index] = emitter.pair("seen", index, len(met.tile.kv), fields)
        emitter.emit(Arrange(there, self._seen[index], met.lies, met.numbers, _beside(index)))


def _beside(index: int) -> Stream:
    """Nothing hides the first step's copies; later ones run in parallel with kernels."""
    return Stream.SIDE if index else Stream.COMPUTE


class StepShares:
    """Gradients of a step's keys, sent to the ranks that hold the keys, and their sums."""

    def __init__(self, emitter: DocumentGather) -> None:
        self._emitter, self._rows = emitter, len(emitter.ranks) * emitter.tokens
        fields = self._fields(0, emitter.spec.share_dtype)
        self._slots = emitter.slot_count(Cargo.GRAD, len(emitter.order), self._rows, fields)
        self._parts: dict[int, tuple[Ref, ...]] = {}  # by step, of the rows held here
        dkv = emitter.dkv_of, emitter.dkv_fields_of
        self._sums = sums(emitter, emitter.order, True, *dkv, emitter.tokens)

    def _fields(self, index: int, dtype: Dtype) -> tuple[Field, ...]:
        return self._emitter.dkv_fields_of(self._emitter.order[index].round, dtype)

    def made(self, index: int) -> Ref:
        """Where the kernel of a step writes them, in the order of its keys."""
        rows = len(self._emitter.met[index].tile.kv)
        fields = self._fields(index, self._emitter.spec.grad_dtype)
        return self._emitter.pair("made", index, rows, fields)

    def leave(self, index: int) -> None:
        """Send them to the ranks that hold the keys."""
        emitter, met, made = self._emitter, self._emitter.met[index], Ref(f"made {index}")
        fields, mine = self._fields(index, emitter.spec.share_dtype), emitter.spec.cp_rank
        if met.as_they_lie:
            self._parts[index] = (made,)
            return
        if len(emitter.ranks) == 1:
            by_rank = emitter.pair("whole", index, self._rows, fields)
        else:
            by_rank = emitter.buffer(
                f"shares {index}", Home.SLOT, self._rows, fields, Cargo.GRAD, index, self._slots
            )
        emitter.emit(Restore(made, by_rank, met.lies, met.numbers, Stream.SIDE))
        if len(emitter.ranks) == 1:
            self._parts[index] = (by_rank,)
            return
        own = emitter.block(by_rank, mine)
        came = emitter.buffer(f"came {index}", Home.STAGING, self._rows, fields, "shares")
        steps = emitter.order[index : index + 1]
        gives = [
            Give(peer, emitter.block(by_rank, peer), emitter.sent_for(steps, mine, peer))
            for peer in emitter.others
        ]
        takes = [
            Take(peer, own, emitter.block(came, peer), emitter.sent_for(steps, peer, mine))
            for peer in emitter.others
        ]
        emitter.exchange(Cargo.GRAD, by_rank, gives, takes)
        self._parts[index] = (own, *(emitter.block(came, peer) for peer in emitter.others))

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
