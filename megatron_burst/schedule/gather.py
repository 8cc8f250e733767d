"""Gathering: every rank of a node gets the keys of all, a few heads at a time.

A round is a group of KV heads. While a step is computed, the next step's keys arrive, and the
previous step's key gradients go to the ranks that hold the keys, which sum them.

Keys are in sequence order, so whatever a rank's queries may see is one range of rows. The first
step has none before it and, in backward, the last has none after it: there the rank's own diagonal
tiles, which need no other rank, hide the transfer. If gradients go on to other nodes, half of the
last step's diagonal tiles come first: they hide the last such sum.

If each rank has two chunks of every document (layout "zigzag-documents"), keys are received rank by
rank and rearranged as this rank's queries need them (`chunks`). So one kernel call computes a step,
all ranks have equal work, and queries, results and their gradients stay in place. Gradients of keys
are put back into rank order before they leave. A node of one rank gathers nothing; its keys are
often in order already.

On one node a round is one step. On several, the other nodes' shards circulate (`inter_node`): K and
V, gathered inside the node in each step; or in backward queries, which meet keys gathered once per
round.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Literal

from megatron_burst.schedule.emitter import Emitter, Gradients, Outputs, Sinks, Sum, sums_of
from megatron_burst.schedule.gather_steps import (
    GradSend,
    consecutive_spans,
    gather_steps,
    needed_by,
)
from megatron_burst.schedule.inter_node import (
    InterNodeRing,
    NodeStep,
    heads_in_rounds,
    steps,
    sums,
    whole_halo,
)
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Span, Tile, check_mask, split_at_edges
from megatron_burst.schedule.node_shards import halo
from megatron_burst.schedule.program import (
    Arrange,
    Copy,
    Field,
    Program,
    Recv,
    Ref,
    Restore,
    Send,
    Space,
    Stream,
    circulating_side_fields,
    dkv_fields,
    dq_fields,
    kv_fields,
)
from megatron_burst.schedule.spec import Cargo, Circulate, Dtype, Spec


def gather(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the layout cannot be gathered or cannot hold that many rows.
    """
    check_mask(spec.mask, spec.layout, "gather", spec.topology.inter_size == 1)
    emitter = _Gather(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _Gather(Emitter):
    """Emits one pass.

    Attributes:
        rounds: KV heads of each.
        order: round and distance of each step.
        plan: what this rank does in each.
        others: ranks of the node, without this one.
        alone: whether all ranks share the node, so that nothing circulates.
        by_rank: whether keys are gathered rank by rank and rearranged, for one tile a step.
        halos: rows of the circulating keys, by how many nodes away they are from.
        keys: of each step.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        shape, topology = spec.shape, spec.topology
        self.rounds = heads_in_rounds(shape.heads_kv, spec.heads_per_round or shape.heads_kv)
        self.order = steps(
            topology.inter_size, len(self.rounds), spec.backward, bool(spec.saves_remote)
        )
        self.plan = gather_steps(spec, self.order)
        self.others, self.alone = topology.others(spec.cp_rank), topology.inter_size == 1
        self.by_rank = spec.layout is Layout.DOCUMENTS
        row, column = topology.coord(spec.cp_rank)
        owners = (topology.rank_at(row - away, column) for away in range(topology.inter_size))
        terms = topology, spec.layout, spec.mask, shape.tokens
        self.halos = tuple(halo(*terms, owner) for owner in owners)
        self.keys = KVGather(self)

    def forward(self) -> None:
        keys = self.keys
        keys.prepare_late(0)
        for index, (turn, step) in enumerate(zip(self.order, self.plan.steps, strict=True)):
            if turn.first:
                outputs = self._outputs(turn.round)
            for tile in step.tiles.before:
                outputs.compute(tile, self.of_keys("kv", turn.round))
            keys.prepare_early(index + 1)
            for tile in step.tiles.gathered:
                outputs.compute(tile, keys.of(index))
            keys.prepare_late(index + 1)
            if turn.last:
                outputs.merge()

    def _outputs(self, round_: int) -> Outputs:
        every = zip(self.plan.steps, self.order, strict=True)
        tiles = [tile for step, at in every if at.round == round_ for tile in step.tiles.all_tiles]
        q, out = (self.of_queries(name, round_) for name in ("q", "out"))
        heads = self.queries(self.rounds[round_])
        sinks = Sinks(tiles, range(heads.start, heads.stop))
        return Outputs(self, f"round {round_}", tiles, sinks, q, out)

    def backward(self) -> None:
        sides, keys, shares = QueryInputs(self), self.keys, PartialKVGrads(self)
        dq = partial(self.of_queries, "dq"), self.dq_fields_of
        of_queries = sums(self, self.order, False, *dq, self.spec.shape.tokens)
        of_keys = KVGradReducer(self, shares)
        sides.prepare(0)
        keys.prepare_late(0)
        for index in range(len(self.order)):
            tiles = self.plan.steps[index].tiles
            if self.by_rank:  # no kernel comes before those that need the gathered keys
                keys.prepare_early(index + 1)
            grads = self._gradients(index, sides.of(index))
            of_keys.at("before", index - 1)
            shares.compute_own(index, grads, tiles.before)
            if tiles.before:  # they hide the transfer inside the node that the sums wait for
                of_keys.at("amid", index - 1)
            keys.prepare_early(index + 1)
            for tile, share in zip(tiles.gathered, shares.of(index), strict=True):
                grads.compute(tile, keys.of(index), into=share)
            if not tiles.before:
                of_keys.at("amid", index - 1)
            sides.prepare(index + 1)
            keys.prepare_late(index + 1)
            of_keys.at("after", index - 1)
            shares.leave(index)
            shares.compute_own(index, grads, tiles.after)
            of_queries.add(index, grads.sums())
            of_queries.recv_grads(index)
        of_queries.recv_grads(len(self.order))
        of_keys.finish()

    def _gradients(self, index: int, side: tuple[Ref, ...]) -> Gradients:
        round_, tiles = self.order[index].round, self.plan.steps[index].tiles.all_tiles
        direct, heads = self.of_queries("dq", round_) if self.alone else None, self.rounds[round_]
        counts = len(self.queries(heads)), len(heads)
        return Gradients(self, f"{index}", tiles, side, direct, counts, self.spec.shape.tokens)

    def of_keys(self, name: str, round_: int) -> Ref:
        """A round's KV heads of a buffer of the call."""
        return Ref(name, heads=self.rounds[round_])

    def of_queries(self, name: str, round_: int) -> Ref:
        """A round's query heads of a buffer of the call."""
        return Ref(name, heads=self.queries(self.rounds[round_]))

    def kv_fields_of(self, round_: int) -> tuple[Field, ...]:
        return kv_fields(len(self.rounds[round_]), self.spec.shape)

    def dkv_fields_of(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return dkv_fields(len(self.rounds[round_]), self.spec.shape, dtype)

    def dq_fields_of(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return dq_fields(
            len(self.rounds[round_]) * self.spec.q_heads_per_kv, self.spec.shape, dtype
        )

    def pair(self, what: str, index: int, rows: int, fields: Sequence[Field]) -> Ref:
        """A step's buffer on this rank; two take turns."""
        count = min(2, len(self.order))
        return self.buffer(f"{what} {index}", Space.STAGING, rows, fields, what, index, count)


class KVGather:
    """Keys and values of all ranks of a node, step by step, fetched a step ahead.

    Rows that no tile of this rank reads are not fetched, so their contents are undefined.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan, spec = emitter, emitter.plan, emitter.spec
        self._circulating = None
        if spec.kv_circulates and not (spec.saves_remote and spec.backward) and not emitter.alone:
            self._circulating = InterNodeRing(
                emitter, emitter.order, lambda round_: (emitter.of_keys("kv", round_),),
                emitter.kv_fields_of, emitter.halos,
            )  # fmt: skip
        gathers, rows = len(self._plan.reads), self._plan.num_rows
        self._slots = emitter.slot_count(Cargo.READ, gathers, rows, emitter.kv_fields_of(0))
        self._gathered: dict[int, Ref] = {}  # by gather
        self._arranged: dict[int, Ref] = {}  # by step, where the queries need another order

    def of(self, index: int) -> Ref:
        """The keys and values of a step."""
        return self._arranged.get(index) or self._gathered[self._plan.gathers[index]]

    def prepare_early(self, index: int) -> None:
        """Before the kernels that hide it: gather what is on the node, unless it needs a slot that
        these kernels read. What is rearranged has left its slot."""
        free = self._slots > 1 or index == 0 or self._emitter.by_rank
        if free and index < len(self._emitter.order) and not self._comes(index):
            self._gather(index)

    def prepare_late(self, index: int) -> None:
        """After those kernels: what is left. At the start of a pass, everything."""
        if index >= len(self._emitter.order):
            return
        if not self._comes(index):
            self._gather(index)
        if self._circulating:
            self._circulating.send_own(index)
        self._gather(index)
        self._arrange(index)
        if self._circulating:
            self._circulating.send_on(index)

    def _comes(self, index: int) -> bool:
        """Whether another node sends a step's keys in this pass."""
        return bool(self._circulating and self._emitter.order[index].node_offset)

    def _gather(self, index: int) -> None:
        """Gather a step's keys inside the node, unless they are already."""
        emitter, spec, number = self._emitter, self._emitter.spec, self._plan.gathers[index]
        if number in self._gathered:
            return
        turn, reads, mine = emitter.order[index], self._plan.reads[number], spec.cp_rank
        source = self._gathered[number] = self._source(turn)
        if emitter.by_rank and not emitter.others:
            return
        slot = self._gathered[number] = emitter.buffer(
            f"keys {number}", Space.SLOT, self._plan.num_rows, emitter.kv_fields_of(turn.round),
            Cargo.READ, number, self._slots,
        )  # fmt: skip
        self._contribute(index, source, slot)
        turns = (
            [turn] if spec.kv_circulates else [t for t in emitter.order if t.round == turn.round]
        )
        sends = [
            Send(peer, slot.at(piece.node_rows), needed_by(spec, turns, peer, piece))
            for peer in emitter.others
            for piece in reads[peer]
        ]
        recvs = [
            Recv(peer, rows, rows, needed_by(spec, turns, mine, piece))
            for peer in emitter.others
            for piece in reads[mine]
            if piece.cp_rank == peer
            for rows in (slot.at(piece.node_rows),)
        ]
        emitter.exchange(Cargo.READ, slot, sends, recvs)

    def _source(self, turn: NodeStep) -> Ref:
        """The shard that this rank contributes: its own, one it received, or one it saved."""
        emitter = self._emitter
        if not (turn.node_offset and emitter.spec.kv_circulates):
            return emitter.of_keys("kv", turn.round)
        came = self._circulating and self._circulating.piece(turn.round, turn.node_offset)
        if not emitter.spec.saves_remote:
            assert came
            return came
        rows = emitter.halos[turn.node_offset].rows
        name, fields = f"left {turn.round}+{turn.node_offset}", emitter.kv_fields_of(turn.round)
        left = emitter.buffer(name, Space.SAVED, rows, fields)
        if came and rows:
            emitter.emit(Copy((came,), left, Stream.SIDE))
        return left

    def _contribute(self, index: int, source: Ref, slot: Ref) -> None:
        """Copy that shard into the slot."""
        emitter, step = self._emitter, self._plan.steps[index]
        away = emitter.order[index].node_offset if emitter.spec.kv_circulates else 0
        stream = Stream.beside(index if step.chunk_pairs else self._comes(index))
        for piece in (piece for piece in step.keys if piece.cp_rank == emitter.spec.cp_rank):
            own = [(piece.rows, piece.rows)]
            for rows, packed in emitter.halos[away].circulating_parts(piece.rows) if away else own:
                there = slot.at(rows.shifted(piece.node_rows.start - piece.rows.start))
                part = source if step.chunk_pairs else source.at(packed)
                emitter.emit(Copy((part,), there, stream))

    def _arrange(self, index: int) -> None:
        """Put a step's gathered keys in the order that its queries need."""
        emitter, met = self._emitter, self._plan.steps[index].chunk_pairs
        if met and not met.is_identity:
            there, fields = self.of(index), emitter.kv_fields_of(emitter.order[index].round)
            seen = self._arranged[index] = emitter.pair("seen", index, len(met.tile.kv), fields)
            emitter.emit(Arrange(there, seen, met.src_blocks, met.dst_chunks, Stream.beside(index)))


class QueryInputs:
    """The query side of each step, including remote queries if queries circulate."""

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._own: tuple[str, ...] = ("side",)
        self._circulating = None
        if spec.circulate is Circulate.Q:
            self._own = "side", emitter.delta().buffer
            self._circulating = InterNodeRing(
                emitter, emitter.order, self._of_round, self._fields,
                whole_halo(emitter, spec.shape.tokens),
            )  # fmt: skip

    def _of_round(self, round_: int) -> tuple[Ref, ...]:
        return tuple(self._emitter.of_queries(name, round_) for name in self._own)

    def _fields(self, round_: int) -> tuple[Field, ...]:
        heads = len(self._emitter.queries(self._emitter.rounds[round_]))
        return circulating_side_fields(heads, self._emitter.spec.shape)

    def prepare(self, index: int) -> None:
        """Start receiving the remote queries of a step."""
        if self._circulating and index < len(self._emitter.order):
            self._circulating.send_own(index)
            self._circulating.send_on(index)

    def of(self, index: int) -> tuple[Ref, ...]:
        """The side of a step."""
        turn = self._emitter.order[index]
        if not (self._circulating and turn.node_offset):
            return self._of_round(turn.round)
        return self._emitter.side_for_kernel(self._circulating.piece(turn.round, turn.node_offset))


class PartialKVGrads:
    """Gradients of gathered keys, sent to the ranks that hold these keys.

    A share is in the kernel's dtype (or the wire's) and rounded once; all shares of a row are
    summed in the accumulation dtype in one pass, so errors do not grow with the number of ranks.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan = emitter, emitter.plan
        steps, rows = len(self._plan.steps), self._plan.share_rows
        self.slots = emitter.slot_count(Cargo.GRAD, steps, rows, self._fields(0))
        self._own: dict[int, list[tuple[Span, Ref]]] = defaultdict(list)  # by step
        self._left: dict[int, Ref] = {}  # by step: all of them, as they leave

    def _fields(self, index: int) -> tuple[Field, ...]:
        round_ = self._emitter.order[index].round
        return self._emitter.dkv_fields_of(round_, self._emitter.spec.partial_grad_dtype)

    def of(self, index: int) -> list[Ref]:
        """Where the tiles over gathered keys write their shares: one after the other, as they
        leave; those of rearranged keys are yet to be put back."""
        emitter, step = self._emitter, self._plan.steps[index]
        if step.chunk_pairs:
            dtype = emitter.spec.grad_dtype
            fields = emitter.dkv_fields_of(emitter.order[index].round, dtype)
            return [emitter.pair("made", index, len(step.chunk_pairs.tile.kv), fields)]
        slot = self._slot(index)
        return [slot.at(span) for span in consecutive_spans(len(t.kv) for t in step.tiles.gathered)]

    def _slot(self, index: int) -> Ref:
        return self._emitter.buffer(
            f"shares {index}", Space.SLOT, self._plan.share_rows, self._fields(index), Cargo.GRAD,
            index, self.slots,
        )  # fmt: skip

    def compute_own(self, index: int, grads: Gradients, tiles: Sequence[Tile]) -> None:
        """Compute tiles over the rank's own shard, whose shares stay until their step is summed."""
        own = self._emitter.of_keys("kv", self._emitter.order[index].round)
        self._own[index] += [(tile.kv, grads.compute(tile, own)) for tile in tiles]

    def leave(self, index: int) -> None:
        """Start sending a step's shares to the ranks that hold the keys."""
        emitter, leaves = self._emitter, self._plan.steps[index].leaves
        slot = self._left[index] = self._put_back(index)
        spec, mine, turns = emitter.spec, emitter.spec.cp_rank, emitter.order[index : index + 1]
        sends = [
            Send(leaf.piece.cp_rank, slot.at(leaf.rows), needed_by(spec, turns, mine, leaf.piece))
            for leaf in leaves[mine]
        ]
        recvs = [
            Recv(rank, slot.at(leaf.rows), rows, needed_by(spec, turns, rank, leaf.piece))
            for rank, leaf, rows in self._arrivals(index)
        ]
        emitter.exchange(Cargo.GRAD, slot, sends, recvs)

    def _put_back(self, index: int) -> Ref:
        """A step's shares in the order of the gathered keys."""
        emitter, met, made = (
            self._emitter,
            self._plan.steps[index].chunk_pairs,
            Ref(f"made {index}"),
        )
        if not met:
            return Ref(f"shares {index}")
        if met.is_identity:
            return made
        if emitter.others:
            slot = self._slot(index)
        else:
            slot = emitter.pair("whole", index, self._plan.share_rows, self._fields(index))
        emitter.emit(Restore(made, slot, met.src_blocks, met.dst_chunks, Stream.SIDE))
        return slot

    def _arrivals(self, index: int) -> list[tuple[int, GradSend, Ref]]:
        """(rank, what it sends, where that is received)."""
        emitter, step = self._emitter, self._plan.steps[index]
        coming = [(rank, leaf) for rank in emitter.others for leaf in step.leaves[rank]]
        spans = consecutive_spans(len(leaf.rows) for _, leaf in coming)
        total = sum(map(len, spans))
        if step.chunk_pairs:
            whole = {piece.cp_rank: piece.node_rows for piece in step.keys}
            spans, total = [whole[rank] for rank, _ in coming], self._plan.num_rows
        name, fields = f"came {index}", self._fields(index)
        staged = emitter.buffer(name, Space.STAGING, total, fields, "shares")
        return [(*sent, staged.at(span)) for sent, span in zip(coming, spans, strict=True)]

    def sums(self, index: int) -> list[Sum]:
        """The sums of a step, for all rows held here."""
        emitter, step, left = self._emitter, self._plan.steps[index], self._left[index]
        if step.chunk_pairs and not emitter.others:
            return [(Span(0, emitter.spec.shape.tokens), (left,))]
        shares = [(Span(0, self._plan.num_rows), left)]
        if not step.chunk_pairs:
            tiles = (tile.kv for tile in step.tiles.gathered)
            shares = list(zip(tiles, self.of(index), strict=True))
        own = [piece for piece in step.keys if piece.cp_rank == emitter.spec.cp_rank]
        parts = self._own.pop(index, [])
        for whole, share in shares:
            held = (piece.within(whole) for piece in own)
            parts += [(p.rows, share.at(p.node_rows.shifted(-whole.start))) for p in held if p]
        parts += [(leaf.piece.rows, rows) for _, leaf, rows in self._arrivals(index)]
        edges = *(piece.rows for piece in own), *(rows for rows, _ in parts)
        return sums_of(parts, split_at_edges(edges, emitter.spec.shape.tokens))


Moment = Literal["before", "amid", "after"]  # of a step: its tiles over gathered keys


class KVGradReducer:
    """Sums of each step's key gradients, computed during the next step.

    Those that go on to other nodes are summed in parallel with its kernels, so that they are sent
    at once; what other nodes sent is added after these. With a single slot, shares must be summed
    before it is filled again.
    """

    def __init__(self, emitter: _Gather, shares: PartialKVGrads) -> None:
        self._shares, self._last, by_rank = shares, len(emitter.order) - 1, emitter.by_rank
        dkv = partial(emitter.of_keys, "dkv"), emitter.dkv_fields_of
        self._sums = sums(emitter, emitter.order, True, *dkv, emitter.halos)
        one_slot = shares.slots == 1 and not by_rank
        sent_on = emitter.spec.circulate is Circulate.KV and not (emitter.alone or by_rank)
        self._adds: Moment = "before" if one_slot else "amid"
        self._ends: Moment = "after" if sent_on and not one_slot else self._adds
        self._stream = Stream.beside(by_rank or self._ends == "after")
        self._last_stream = Stream.beside(by_rank)

    def at(self, moment: Moment, index: int) -> None:
        """What is due of a step's sums at this moment of the next."""
        if index >= 0 and moment == self._adds:
            self._sums.add(index, self._shares.sums(index), self._stream)
        if index >= 0 and moment == self._ends:
            self._sums.recv_grads(index, self._stream)

    def finish(self) -> None:
        """The last sums, and the last return transfer."""
        self._sums.add(self._last, self._shares.sums(self._last), self._last_stream)
        for turn in (self._last, self._last + 1):
            self._sums.recv_grads(turn, self._last_stream)
