"""Gathering: every rank of a node gets the keys of all, a few heads at a time.

    out[rows of this rank, heads of a round] = merge over nodes of attention(q, the node's K and V)

A round is a group of KV heads. While a step is computed, the next step's keys arrive, and the
previous step's key gradients go to the ranks that hold the keys, which sum them.

Keys are in sequence order, so whatever a rank's queries see is one range of rows. No kernel comes
before the first step and, in backward, none after the last: there the rank's own diagonal tiles,
which need no other rank, hide the transfer. If gradients go on to other nodes, half of the last
step's diagonal tiles come first: they hide the last sum of gradients for another node.

If each rank has two chunks of every document (layout "zigzag-documents"), keys are received rank by
rank and rearranged as this rank's queries need them (`chunks`). So one kernel call computes a step,
all ranks have equal work, and queries, results and their gradients stay in place. Gradients of keys
return to rank order before they are sent. A node of one rank gathers nothing, and its keys are
often in order already.

On one node a round is one step. On several, the other nodes' shards circulate (`inter_node`): K and
V, gathered inside the node in each step; or in backward queries, over keys that are gathered once
per round. A row's *owner* is the rank whose shard has it. If K and V circulate, each node has one
*holder* of the row: its rank in the owner's column, to which the row was sent. Then dk and dv go
back in two hops: the ranks of a node send their parts to the holder, which sums them; the holder
sends the sum to the owner, which adds the sums of all nodes.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Literal

from megatron_burst.schedule import program as ops
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
    grad_reducer,
    heads_in_rounds,
    steps,
    whole_halo,
)
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Span, Tile, check_mask, split_at_edges
from megatron_burst.schedule.node_shards import halo
from megatron_burst.schedule.program import Field, Program, Ref, Space, Stream
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
    """Emits one pass."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        shape, topology = spec.shape, spec.topology
        nodes, saved = topology.inter_size, bool(spec.saves_remote)
        self.rounds = heads_in_rounds(shape.heads_kv, spec.heads_per_round or shape.heads_kv)
        self.order = steps(nodes, len(self.rounds), spec.backward, saved)
        self.plan = gather_steps(spec, self.order)  # what this rank does in each step
        self.peers, self.single_node = topology.row_peers(spec.cp_rank), nodes == 1
        # keys are gathered rank by rank and rearranged, for one tile a step
        self.by_rank = spec.layout is Layout.DOCUMENTS
        row, column = topology.coord(spec.cp_rank)
        owners = (topology.rank_at(row - offset, column) for offset in range(nodes))
        halo_of = partial(halo, topology, spec.layout, spec.mask, shape.tokens)
        self.halos = tuple(map(halo_of, owners))  # of circulating keys, by node offset of the owner
        self.keys = KVGather(self)

    def forward(self) -> None:
        keys = self.keys
        keys.prepare_late(0)
        for index, (node_step, step) in enumerate(zip(self.order, self.plan.steps, strict=True)):
            if node_step.first:
                outputs = self._outputs(node_step.round)
            for tile in step.tiles.before:
                outputs.compute(tile, self.kv_ref("kv", node_step.round))
            keys.prepare_early(index + 1)
            for tile in step.tiles.gathered:
                outputs.compute(tile, keys.of(index))
            keys.prepare_late(index + 1)
            if node_step.last:
                outputs.merge()

    def _outputs(self, round_: int) -> Outputs:
        plan = zip(self.plan.steps, self.order, strict=True)
        in_round = (step for step, node_step in plan if node_step.round == round_)
        tiles = [tile for step in in_round for tile in step.tiles.all_tiles]
        heads = self.q_heads(self.rounds[round_])
        sinks = Sinks(tiles, range(heads.start, heads.stop))
        q, out = Ref("q", heads=heads), Ref("out", heads=heads)
        return Outputs(self, f"round {round_}", tiles, sinks, q, out)

    def backward(self) -> None:
        # One step i; what is in the same column overlaps (on one node a kernel sums the parts):
        #   kernels       | own tiles, before | tiles over gathered keys of i | own tiles, after |
        #   side stream   |                   | dk, dv of i-1: sum of parts   |
        #   intra, grads  | parts of i-1 ---> |                               | parts of i ---->
        #   intra, keys   |                   | keys of i+1 --------------------------->
        #   inter, read   | piece of i+2: K and V, or queries ------------------------->
        #   inter, grads  |                   | sum of i-1 to the node that owns it --->
        inputs, keys, partial_grads = QueryInputs(self), self.keys, PartialKVGrads(self)
        dq_reducer = grad_reducer(self.spec, of_keys=False)(
            self, self.order, partial(self.q_ref, "dq"), self.dq_fields_of, whole_halo(self)
        )
        dkv_reducer = KVGradReducer(self, partial_grads)
        inputs.prepare(0)
        keys.prepare_late(0)
        for index, step in enumerate(self.plan.steps):
            own_before, own_after = step.tiles.before, step.tiles.after
            if self.by_rank:  # no kernel comes before those that need the gathered keys
                keys.prepare_early(index + 1)
            grads = self._gradients(index, inputs.of(index))
            dkv_reducer.add("before", index - 1)
            partial_grads.compute_own(index, grads, own_before)
            if own_before:  # they hide the transfer inside the node that the sums wait for
                dkv_reducer.add("during", index - 1)
            keys.prepare_early(index + 1)
            for tile, part in zip(step.tiles.gathered, partial_grads.of(index), strict=True):
                grads.compute(tile, keys.of(index), into=part)
            if not own_before:
                dkv_reducer.add("during", index - 1)
            inputs.prepare(index + 1)
            keys.prepare_late(index + 1)
            dkv_reducer.add("after", index - 1)
            partial_grads.send(index)
            partial_grads.compute_own(index, grads, own_after)
            dq_reducer.add(index, grads.sums())
            dq_reducer.recv_grads(index)
        dq_reducer.recv_grads(len(self.order))
        dkv_reducer.finish()

    def _gradients(self, index: int, sides: tuple[Ref, ...]) -> Gradients:
        round_, tiles = self.order[index].round, self.plan.steps[index].tiles.all_tiles
        dq = self.q_ref("dq", round_) if self.single_node else None
        return Gradients(self, f"{index}", tiles, sides, dq, len(self.rounds[round_]))

    def kv_ref(self, name: str, round_: int) -> Ref:
        """A round's KV heads of a buffer of the call."""
        return Ref(name, heads=self.rounds[round_])

    def q_ref(self, name: str, round_: int) -> Ref:
        """A round's query heads of a buffer of the call."""
        return Ref(name, heads=self.q_heads(self.rounds[round_]))

    def kv_fields_of(self, round_: int) -> tuple[Field, ...]:
        return self.fields("k v", len(self.rounds[round_]))

    def dkv_fields_of(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return self.fields("dk dv", len(self.rounds[round_]), dtype)

    def dq_fields_of(self, round_: int, dtype: Dtype) -> tuple[Field, ...]:
        return self.fields("dq", len(self.rounds[round_]) * self.spec.q_heads_per_kv, dtype)

    def double_buffer(self, name: str, index: int, rows: int, fields: Sequence[Field]) -> Ref:
        """A step's buffer on this rank; two take turns."""
        count = min(2, len(self.order))
        return self.buffer(f"{name} {index}", Space.STAGING, rows, fields, name, index, count)


class KVGather:
    """Keys and values of all ranks of a node, step by step, gathered a step ahead.

    Rows that no tile of this rank reads are not gathered, so their contents are undefined.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan, spec = emitter, emitter.plan, emitter.spec
        self._circulating = None
        received = spec.queries_stay and not (spec.saves_remote and spec.backward)
        if received and not emitter.single_node:
            self._circulating = InterNodeRing(
                emitter, emitter.order, lambda round_: (emitter.kv_ref("kv", round_),),
                emitter.kv_fields_of, emitter.halos,
            )  # fmt: skip
        gathers, rows = len(self._plan.reads), self._plan.num_rows
        self._slots = emitter.slot_count(Cargo.READ, gathers, rows, emitter.kv_fields_of(0))
        self._gathered: dict[int, Ref] = {}  # by gather
        self._rearranged: dict[int, Ref] = {}  # by step, where the queries need another order

    def of(self, index: int) -> Ref:
        """The keys and values of a step."""
        return self._rearranged.get(index) or self._gathered[self._plan.gathers[index]]

    def prepare_early(self, index: int) -> None:
        """Before the kernels that hide the transfer: gather keys that are on the node, unless they
        need a slot that these kernels read. Rearranged keys have left their slot."""
        free = self._slots > 1 or index == 0 or self._emitter.by_rank
        if free and index < len(self._emitter.order) and not self._is_received(index):
            self._gather(index)

    def prepare_late(self, index: int) -> None:
        """After those kernels: gather what is yet to gather, start transfers between nodes."""
        if index >= len(self._emitter.order):
            return
        if not self._is_received(index):
            self._gather(index)
        if self._circulating:
            self._circulating.send_own(index)
        self._gather(index)
        self._rearrange(index)
        if self._circulating:
            self._circulating.send_on(index)

    def _is_received(self, index: int) -> bool:
        """Whether another node sends a step's keys in this pass."""
        return bool(self._circulating and self._emitter.order[index].node_offset)

    def _gather(self, index: int) -> None:
        """Gather a step's keys inside the node, once."""
        emitter, spec, number = self._emitter, self._emitter.spec, self._plan.gathers[index]
        if number in self._gathered:
            return
        step, reads = emitter.order[index], self._plan.reads[number]
        source = self._gathered[number] = self._source(step)
        if emitter.by_rank and not emitter.peers:
            return
        slot = self._gathered[number] = emitter.buffer(
            f"keys {number}", Space.SLOT, self._plan.num_rows, emitter.kv_fields_of(step.round),
            Cargo.READ, number, self._slots,
        )  # fmt: skip
        self._copy_own(index, source, slot)
        users = [step]
        if not spec.queries_stay:
            users = [user for user in emitter.order if user.round == step.round]
        sends = [
            ops.Send(peer, slot.at(chunk.node_rows), needed_by(spec, users, peer, chunk))
            for peer in emitter.peers
            for chunk in reads[peer]
        ]
        recvs = []
        for chunk in reads[spec.cp_rank]:
            rows, condition = slot.at(chunk.node_rows), needed_by(spec, users, spec.cp_rank, chunk)
            recvs.append(ops.Recv(chunk.cp_rank, rows, rows, condition))
        emitter.exchange(Cargo.READ, slot, sends, recvs)

    def _source(self, step: NodeStep) -> Ref:
        """The shard that this rank contributes: its own, one it received, or one it saved."""
        emitter, offset = self._emitter, step.node_offset
        if not (offset and emitter.spec.queries_stay):
            return emitter.kv_ref("kv", step.round)
        piece = self._circulating and self._circulating.piece(step.round, offset)
        if not emitter.spec.saves_remote:
            assert piece
            return piece
        name, rows = f"saved {step.round}+{offset}", emitter.halos[offset].rows
        saved = emitter.buffer(name, Space.SAVED, rows, emitter.kv_fields_of(step.round))
        if piece and rows:
            emitter.emit(ops.Copy((piece,), saved, Stream.SIDE))
        return saved

    def _copy_own(self, index: int, source: Ref, slot: Ref) -> None:
        """Copy the shard that this rank contributes into the slot."""
        emitter, step = self._emitter, self._plan.steps[index]
        offset = emitter.order[index].node_offset if emitter.spec.queries_stay else 0
        stream = Stream.side_if(index if step.chunk_pairs else self._is_received(index))
        for chunk in step.keys:
            if chunk.cp_rank != emitter.spec.cp_rank:
                continue
            parts = emitter.halos[offset].circulating_parts(chunk.rows)
            for rows, packed in parts if offset else [(chunk.rows, chunk.rows)]:
                target = slot.at(rows.shifted(chunk.node_rows.start - chunk.rows.start))
                part = source if step.chunk_pairs else source.at(packed)
                emitter.emit(ops.Copy((part,), target, stream))

    def _rearrange(self, index: int) -> None:
        """Put a step's gathered keys in the order that its queries need."""
        emitter, pairs = self._emitter, self._plan.steps[index].chunk_pairs
        if not pairs or pairs.is_identity:
            return
        source, fields = self.of(index), emitter.kv_fields_of(emitter.order[index].round)
        target = emitter.double_buffer("rearranged", index, len(pairs.tile.kv), fields)
        self._rearranged[index] = target
        stream = Stream.side_if(index)
        emitter.emit(ops.Arrange(source, target, pairs.src_blocks, pairs.dst_chunks, stream))


class QueryInputs:
    """The query side of each step, including remote queries if queries circulate."""

    def __init__(self, emitter: _Gather) -> None:
        self._emitter = emitter
        self._own: tuple[str, ...] = ("side",)
        self._circulating = None
        if emitter.spec.circulate is Circulate.Q:
            self._own = "side", emitter.delta().buffer
            self._circulating = InterNodeRing(
                emitter, emitter.order, self._of_round, self._fields, whole_halo(emitter)
            )

    def _of_round(self, round_: int) -> tuple[Ref, ...]:
        return tuple(self._emitter.q_ref(name, round_) for name in self._own)

    def _fields(self, round_: int) -> tuple[Field, ...]:
        heads = len(self._emitter.q_heads(self._emitter.rounds[round_]))
        return self._emitter.circulating_side(heads)

    def prepare(self, index: int) -> None:
        """Start receiving the remote queries of a step."""
        if self._circulating and index < len(self._emitter.order):
            self._circulating.send_own(index)
            self._circulating.send_on(index)

    def of(self, index: int) -> tuple[Ref, ...]:
        """The query side of a step."""
        step = self._emitter.order[index]
        if not (self._circulating and step.node_offset):
            return self._of_round(step.round)
        return self._emitter.side_for_kernel(self._circulating.piece(step.round, step.node_offset))


class PartialKVGrads:
    """Gradients of gathered keys, sent to the ranks that hold these keys.

    A rank's part is in the kernel's dtype (or the wire's) and rounded once; all parts of a row are
    summed in the accumulation dtype in one pass, so errors do not grow with the number of ranks.
    """

    def __init__(self, emitter: _Gather) -> None:
        self._emitter, self._plan = emitter, emitter.plan
        steps, rows = len(self._plan.steps), self._plan.grad_rows
        self.slots = emitter.slot_count(Cargo.GRAD, steps, rows, self._fields(0))
        self._own: dict[int, list[tuple[Span, Ref]]] = defaultdict(list)  # by step
        self._sent: dict[int, Ref] = {}  # by step: the parts of the tiles over gathered keys

    def _fields(self, index: int) -> tuple[Field, ...]:
        round_ = self._emitter.order[index].round
        return self._emitter.dkv_fields_of(round_, self._emitter.spec.partial_grad_dtype)

    def of(self, index: int) -> list[Ref]:
        """Where the tiles over gathered keys write their parts: one after the other, in the slot
        that is sent; those of rearranged keys in a buffer of their own."""
        emitter, step = self._emitter, self._plan.steps[index]
        if step.chunk_pairs:
            rows, dtype = len(step.chunk_pairs.tile.kv), emitter.spec.grad_dtype
            fields = emitter.dkv_fields_of(emitter.order[index].round, dtype)
            return [emitter.double_buffer("dkv of rearranged", index, rows, fields)]
        slot = self._slot(index)
        return [slot.at(span) for span in consecutive_spans(len(t.kv) for t in step.tiles.gathered)]

    def _slot(self, index: int) -> Ref:
        rows, fields = self._plan.grad_rows, self._fields(index)
        name = f"partial dkv {index}"
        return self._emitter.buffer(name, Space.SLOT, rows, fields, Cargo.GRAD, index, self.slots)

    def compute_own(self, index: int, grads: Gradients, tiles: Sequence[Tile]) -> None:
        """Compute tiles over the rank's own shard, whose parts stay until their step is summed."""
        own = self._emitter.kv_ref("kv", self._emitter.order[index].round)
        self._own[index] += [(tile.kv, grads.compute(tile, own)) for tile in tiles]

    def send(self, index: int) -> None:
        """Start sending a step's parts to the ranks that hold the keys."""
        emitter, spec = self._emitter, self._emitter.spec
        slot = self._sent[index] = self._in_gathered_order(index)
        needed = partial(needed_by, spec, emitter.order[index : index + 1])
        sends = [
            ops.Send(sent.chunk.cp_rank, slot.at(sent.rows), needed(spec.cp_rank, sent.chunk))
            for sent in self._plan.steps[index].grad_sends[spec.cp_rank]
        ]
        recvs = [
            ops.Recv(peer, slot.at(sent.rows), rows, needed(peer, sent.chunk))
            for peer, sent, rows in self._received(index)
        ]
        emitter.exchange(Cargo.GRAD, slot, sends, recvs)

    def _in_gathered_order(self, index: int) -> Ref:
        """A step's parts in the order of the gathered keys."""
        emitter, pairs = self._emitter, self._plan.steps[index].chunk_pairs
        if not pairs:
            return Ref(f"partial dkv {index}")
        grads = Ref(f"dkv of rearranged {index}")
        if pairs.is_identity:
            return grads
        if emitter.peers:
            target = self._slot(index)
        else:
            rows, fields = self._plan.grad_rows, self._fields(index)
            target = emitter.double_buffer("restored dkv", index, rows, fields)
        emitter.emit(ops.Restore(grads, target, pairs.src_blocks, pairs.dst_chunks, Stream.SIDE))
        return target

    def _received(self, index: int) -> list[tuple[int, GradSend, Ref]]:
        """(peer, what the peer sends, where this rank receives it)."""
        emitter, step = self._emitter, self._plan.steps[index]
        sent = [(peer, grads) for peer in emitter.peers for grads in step.grad_sends[peer]]
        spans = consecutive_spans(len(grads.rows) for _, grads in sent)
        total = sum(map(len, spans))
        if step.chunk_pairs:
            rows_of = {chunk.cp_rank: chunk.node_rows for chunk in step.keys}
            spans, total = [rows_of[peer] for peer, _ in sent], self._plan.num_rows
        fields = self._fields(index)
        staged = emitter.buffer(
            f"received dkv {index}", Space.STAGING, total, fields, "partial dkv"
        )
        return [(*grads, staged.at(span)) for grads, span in zip(sent, spans, strict=True)]

    def sums(self, index: int) -> list[Sum]:
        """The sums of a step, for all key rows that this rank holds."""
        emitter, step, sent = self._emitter, self._plan.steps[index], self._sent[index]
        if step.chunk_pairs and not emitter.peers:
            return [(Span(0, emitter.spec.shape.tokens), (sent,))]
        computed = [(Span(0, self._plan.num_rows), sent)]
        if not step.chunk_pairs:
            key_rows = (tile.kv for tile in step.tiles.gathered)
            computed = list(zip(key_rows, self.of(index), strict=True))
        own = [chunk for chunk in step.keys if chunk.cp_rank == emitter.spec.cp_rank]
        parts = self._own.pop(index, [])
        for span, grads in computed:
            within = (chunk.within(span) for chunk in own)
            parts += [(c.rows, grads.at(c.node_rows.shifted(-span.start))) for c in within if c]
        parts += [(remote.chunk.rows, rows) for _, remote, rows in self._received(index)]
        edges = *(chunk.rows for chunk in own), *(rows for rows, _ in parts)
        return sums_of(parts, split_at_edges(edges, emitter.spec.shape.tokens))


# where in the issue order of a step: before its kernels; directly before or after the kernels over
# gathered keys; once the next step's transfers have been issued
Moment = Literal["before", "during", "after"]


class KVGradReducer:
    """Sums of each step's key gradients, computed during the next step.

    Sums for other nodes are computed in parallel with the step's kernels, so that they are sent at
    once; what other nodes sent is added after the kernels. With a single slot, parts must be summed
    before the slot is filled again.
    """

    def __init__(self, emitter: _Gather, partial_grads: PartialKVGrads) -> None:
        self._partial_grads, self._last = partial_grads, len(emitter.order) - 1
        self._reducer = grad_reducer(emitter.spec, of_keys=True)(
            emitter, emitter.order, partial(emitter.kv_ref, "dkv"), emitter.dkv_fields_of,
            emitter.halos,
        )  # fmt: skip
        by_rank = emitter.by_rank
        one_slot = partial_grads.slots == 1 and not by_rank
        remote_keys = emitter.spec.circulate is Circulate.KV and not emitter.single_node
        self._adds: Moment = "before" if one_slot else "during"
        self._recvs: Moment = self._adds
        if remote_keys and not (one_slot or by_rank):
            self._recvs = "after"
        self._stream = Stream.side_if(by_rank or self._recvs == "after")
        self._last_stream = Stream.side_if(by_rank)

    def add(self, moment: Moment, index: int) -> None:
        """Issue what is due of a step's sums at this place in the next step."""
        if index >= 0 and moment == self._adds:
            self._reducer.add(index, self._partial_grads.sums(index), self._stream)
        if index >= 0 and moment == self._recvs:
            self._reducer.recv_grads(index, self._stream)

    def finish(self) -> None:
        """Add the last step's gradients, and the last ones that other nodes sent."""
        sums = self._partial_grads.sums(self._last)
        self._reducer.add(self._last, sums, self._last_stream)
        for index in (self._last, self._last + 1):
            self._reducer.recv_grads(index, self._last_stream)
