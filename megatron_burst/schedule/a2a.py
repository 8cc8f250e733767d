"""All-to-all: each rank computes all rows of the sequence for some heads.

A round is a group of KV heads with the query heads that use them, sharded over the ranks:

    [rows of this rank, all heads of the round]  <-- all-to-all -->  [all rows, heads of this rank]

While a round is computed, the next round's tensors arrive and the previous round's results leave,
issued behind the kernels that hide the transfers. Every pair of ranks trades 1/L of a shard, so
fewer bytes are sent than with gathered keys unless heads are grouped; kernel calls are as long as
possible, and no gradient is a sum over ranks.

If the ranks do not divide the KV heads, for example if there are fewer heads than ranks, each KV
head goes to several ranks, which share its query heads; the rank that holds the rows sums these
ranks' gradients of the head. Rounds count heads with these copies.

Source: Ulysses (arXiv 2309.14509), here in rounds.
"""

from megatron_burst.errors import BurstError
from megatron_burst.schedule import program as ops
from megatron_burst.schedule.a2a_rounds import AllToAllEmitter
from megatron_burst.schedule.mask import check_mask
from megatron_burst.schedule.program import Field, Program, Ref, Space, Stream
from megatron_burst.schedule.spec import Cargo, Spec


def a2a(spec: Spec) -> Program:
    """The program of one rank.

    Raises:
        BurstError: if the heads cannot be sharded evenly, the layout is striped, or ranks are in
            several rows.
    """
    check_mask(spec.mask, spec.layout, "a2a", one_call=True)
    if spec.topology.inter_size > 1:
        raise BurstError(
            "burst attention: an all-to-all must run over all ranks, because no ring between nodes "
            f"continues it; got {spec.topology}; pass a flat topology"
        )
    if spec.shape.heads_q % spec.topology.cp_size:
        raise BurstError(
            "burst attention: for an all-to-all, the number of ranks must divide the number of "
            "query heads, because each rank computes equally many; got "
            f"{spec.shape.heads_q} query heads on {spec.topology.cp_size} ranks; pass "
            "--burst-intra gather (intra='gather') or auto, and no --burst-inter a2a or "
            "--burst-invariant"
        )
    emitter = _AllToAll(spec)
    (emitter.backward if spec.backward else emitter.forward)()
    return emitter.program()


class _AllToAll(AllToAllEmitter):
    def forward(self) -> None:
        inputs, outputs, tile = HeadsAllToAll(self), OutputAllToAll(self), self.tile
        for round_ in range(len(self.rounds)):
            q, kv = inputs.queries(round_).at(tile.q), inputs.keys(round_).at(tile.kv)
            lse, out = self.lse(round_), outputs.of(round_)
            into, heads = (lse.at(tile.q), out.at(tile.q)), self.own_heads(round_)
            self.emit(ops.Attend(q, kv, tile.mask, into, tile.positions, heads, True))
            inputs.post(round_ + 1)
            # issued before operations that wait for the kernel
            outputs.collect(Stream.SIDE)
            inputs.arrange(round_ + 1)
            self.emit(ops.Copy((lse,), out))
            outputs.post(round_)
        outputs.collect()

    def backward(self) -> None:
        inputs, outputs = HeadsAllToAll(self), OutputAllToAll(self)
        tile = self.tile
        for round_ in range(len(self.rounds)):
            grads, side = outputs.of(round_), self.side_of(inputs, round_)
            kv = inputs.keys(round_)
            # the kernel is followed by conversions of its sums, which would hold up these sends
            inputs.post(round_ + 1)
            self.emit(ops.AttendBackward(side, kv, tile.mask, grads, grads, tile.positions))
            inputs.arrange(round_ + 1)
            outputs.post(round_)
        outputs.collect()

    def side_of(self, inputs: "HeadsAllToAll", round_: int) -> tuple[Ref, ...]:
        """The query side of this rank's heads for all rows, for kernels, with dense statistics.

        Delta is sent, whatever the kernel needs: delta is 4 bytes where a bf16 output is 2 dim_v,
        and a surrogate output made from delta is closer to the true delta than a rounded output.
        """
        heads_q, _ = self.heads_of(round_)
        saved_lse = self.lse(round_) if self.spec.saves_remote else None
        fields = self.fields("delta" if saved_lse else "lse delta", heads_q)
        name = f"statistics {round_}"
        statistics = self.buffer(name, Space.TEMP, self.rows, fields, "statistics")
        received = inputs.queries(round_)
        self.emit(ops.Copy((received,), statistics))
        saved = (self.saved(round_), saved_lse) if saved_lse else ()
        return self.side_for_kernel(statistics, *saved, received)


class HeadsAllToAll:
    """From shards of the sequence to shards of the heads: Q, K, V, and in backward dO, lse and
    delta, a round at a time. A slot has this rank's rows once for each rank, with that rank's
    heads. What forward saved is not sent again in backward."""

    def __init__(self, emitter: AllToAllEmitter) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._saves = spec.saves_remote and not spec.backward
        self._reuses = spec.saves_remote and spec.backward
        self._arranged_rounds: set[int] = set()
        self._sources: tuple[str, ...] = ("q", "kv")
        if spec.backward:
            delta = emitter.delta().buffer
            self._sources = ("side", delta) if self._reuses else ("side", "kv", delta)
        self._slots = emitter.slots(Cargo.READ, self._fields(0))
        self.post(0)

    def _fields(self, round_: int) -> tuple[Field, ...]:
        """Fields of a row that is sent."""
        emitter, (heads_q, _) = self._emitter, self._emitter.heads_of(round_)
        if self._reuses:
            return emitter.fields("dout delta", heads_q)
        side = emitter.fields("dout lse delta", heads_q) if emitter.spec.backward else ()
        return *emitter.qkv_fields(round_), *side

    def post(self, round_: int) -> None:
        """Start the all-to-all of a round's heads, if there is such a round."""
        emitter = self._emitter
        if round_ >= len(emitter.rounds):
            return
        this_rank, stream = emitter.spec.cp_rank, Stream.side_if(round_)
        slot = emitter.slot("heads", round_, Cargo.READ, self._fields(round_), self._slots)
        sources = emitter.refs(round_, self._sources)
        ranks, (_, heads_kv) = len(emitter.ranks), emitter.heads_of(round_)
        emitter.emit(ops.ToRanks(sources, slot, ranks, heads_kv, emitter.copies, stream))
        target = self._received(round_) if emitter.reorders else self._in_order(round_)
        sends = []
        for rank, chunk, rows in emitter.by_rank(slot):
            if rank == this_rank:
                emitter.emit(ops.Copy((rows,), target.at(chunk.node_rows), stream))
            else:
                sends.append(ops.Send(rank, rows))
        offset = emitter.ranks.index(this_rank) * emitter.spec.shape.tokens
        recvs = [
            ops.Recv(chunk.cp_rank, slot.at(chunk.rows.shifted(offset)), target.at(chunk.node_rows))
            for chunk in emitter.chunks
            if chunk.cp_rank != this_rank
        ]
        emitter.exchange(Cargo.READ, slot, sends, recvs)

    def arrange(self, round_: int) -> None:
        """Put a round's received rows in order, once, if there is such a round."""
        emitter, rounds = self._emitter, self._arranged_rounds
        if emitter.reorders and round_ < len(emitter.rounds) and round_ not in rounds:
            rounds.add(round_)
            received, in_order = self._received(round_), self._in_order(round_)
            emitter.emit(ops.Arrange(received, in_order, *emitter.orders, Stream.side_if(round_)))

    def _received(self, round_: int) -> Ref:
        """Where a round is received, rank by rank: one buffer for all rounds; it is soon read."""
        fields = self._fields(round_)
        return self._emitter.staging("received", round_, "received", fields, 1, round_)

    def _in_order(self, round_: int) -> Ref:
        """Where a round's rows are in order."""
        if self._saves:
            return self._emitter.saved(round_)
        fields, count = self._fields(round_), min(2, len(self._emitter.rounds))
        return self._emitter.staging("all rows", round_, "heads", fields, count, round_)

    def queries(self, round_: int) -> Ref:
        """The buffer with a round's received query side."""
        self.arrange(round_)
        return self._in_order(round_)

    def keys(self, round_: int) -> Ref:
        """The buffer with a round's k and v: received, or saved by forward."""
        return self._emitter.saved(round_) if self._reuses else self.queries(round_)


class OutputAllToAll:
    """From shards of the heads back to shards of the sequence: out, or dq, dk and dv. A slot has
    this rank's heads of all rows, of which a peer gets the peer's rows."""

    def __init__(self, emitter: AllToAllEmitter) -> None:
        self._emitter = emitter
        self._targets = ("dq", "dkv") if emitter.spec.backward else ("out",)
        # with one slot the next round's kernels would wait until all ranks have pulled
        least = 2 if len(emitter.rounds) > 1 else 1
        self._slots = max(least, emitter.slots(Cargo.GRAD, self._fields(0)))
        self._in_flight: int | None = None

    def _fields(self, round_: int) -> tuple[Field, ...]:
        emitter, (heads_q, heads_kv) = self._emitter, self._emitter.heads_of(round_)
        if not emitter.spec.backward:
            return emitter.fields("out lse", heads_q)
        dtype = emitter.spec.partial_grad_dtype
        return *emitter.fields("dq", heads_q, dtype), *emitter.fields("dk dv", heads_kv, dtype)

    def of(self, round_: int) -> Ref:
        """Where a round's results are written: in its slot, unless they are reordered first."""
        if self._emitter.reorders:
            return self._emitter.staging("computed", round_, "computed", self._fields(round_))
        return self._slot(round_)

    def _slot(self, round_: int) -> Ref:
        fields = self._fields(round_)
        return self._emitter.slot("results", round_, Cargo.GRAD, fields, self._slots)

    def post(self, round_: int) -> None:
        """Start a round's transfer, once the previous one's results are in place."""
        self.collect(Stream.SIDE)
        emitter, slot = self._emitter, self._slot(round_)
        if emitter.reorders:
            emitter.emit(ops.Restore(self.of(round_), slot, *emitter.orders))
        received = emitter.staging("own results", round_, "results", self._fields(round_))
        recvs = []
        for rank, chunk, rows in emitter.by_rank(received):
            if rank == emitter.spec.cp_rank:
                emitter.emit(ops.Copy((slot.at(chunk.node_rows),), rows))
            else:
                recvs.append(ops.Recv(rank, slot.at(chunk.node_rows), rows))
        sends = [
            ops.Send(chunk.cp_rank, slot.at(chunk.node_rows))
            for chunk in emitter.chunks
            if chunk.cp_rank != emitter.spec.cp_rank
        ]
        emitter.exchange(Cargo.GRAD, slot, sends, recvs)
        self._in_flight = round_

    def collect(self, stream: Stream = Stream.COMPUTE) -> None:
        """Put the results of the transfer in flight, if any, into the buffers of the call."""
        if self._in_flight is None:
            return
        round_, self._in_flight = self._in_flight, None
        emitter, targets = self._emitter, self._emitter.refs(round_, self._targets)
        ranks, (_, heads_kv) = len(emitter.ranks), emitter.heads_of(round_)
        received = Ref(f"own results {round_}")
        emitter.emit(ops.FromRanks(received, targets, ranks, heads_kv, emitter.copies, stream))
