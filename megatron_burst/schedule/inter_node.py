"""Between nodes: pieces circulate while the ranks of each node work together on what they have.

A round is a group of heads. In each of its N steps the ranks of a node work with the shards of one
node: each rank has the piece (the round's heads of a shard) of the rank in the same column there.
Pieces go around the column in N-1 hops. With N = 3, a column's link carries

    | own, round 0 | hop 2 | own, round 1 | hop 2 | ...    the next round's follows at once

Gradients of a circulating piece do not follow it. Each node sums its gradients in the accumulation
dtype, rounds them once and sends them straight to the owner, which sums all in the accumulation
dtype. So N-1 contributions are sent, as many bytes as N-1 hops of a sum, but none is rounded again
on the way: errors do not grow with the number of nodes.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.emitter import Emitter, Sum, add_up
from megatron_burst.schedule.mask import Span, split_at_edges
from megatron_burst.schedule.node_shards import Halo
from megatron_burst.schedule.program import Add, Copy, Field, Ref, Space, Stream
from megatron_burst.schedule.spec import Cargo, Circulate, Dtype, Spec
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class NodeStep:
    """One step of a round."""

    round: int
    node_offset: int  # how many nodes away the owner of the circulating piece is
    first: bool  # of the round
    last: bool


@lru_cache(maxsize=1024)
def steps(nodes: int, rounds: int, backward: bool, saved: bool) -> tuple[NodeStep, ...]:
    """The steps of a pass.

    A round begins with the node's own shards, whose tiles hide the first hop. In backward the last
    of several rounds ends with them instead, so that their tiles hide the last gradients on their
    way to the owner. If forward saved the pieces, there is no hop to hide, and every round ends
    with them, so that no two rounds send gradients right after each other.
    """
    order = []
    for round_ in range(rounds):
        own_last = backward and (saved or 0 < round_ == rounds - 1)
        offsets = (*range(1, nodes), 0) if own_last else range(nodes)
        for index, offset in enumerate(offsets):
            order.append(NodeStep(round_, offset, index == 0, index == nodes - 1))
    return tuple(order)


def heads_in_rounds(heads_kv: int, heads_per_round: int) -> tuple[Span, ...]:
    """KV heads in groups; the last may have fewer."""
    starts = range(0, heads_kv, heads_per_round)
    return tuple(Span(start, min(start + heads_per_round, heads_kv)) for start in starts)


@dataclass
class InterNodeRing:
    """The pieces of each round that circulate between nodes."""

    emitter: Emitter
    order: Sequence[NodeStep]
    own: Callable[[int], tuple[Ref, ...]]  # where a round's own piece is
    fields: Callable[[int], tuple[Field, ...]]  # of a round's piece
    halos: Sequence[Halo]  # the rows that circulate, by node offset of their owner

    def __post_init__(self) -> None:
        self._nodes = self.emitter.spec.topology.inter_size
        self._sends: dict[int, list[NodeStep]] = defaultdict(list)  # whose pieces, by step index
        steps = enumerate(self.order)
        index_of = {(step.round, step.node_offset): index for index, step in steps}
        for step in self.order:
            send_at = index_of[step.round, step.node_offset]
            if step.node_offset == 0:
                # after the last hop of the previous round, so that the slow link never idles
                send_at = index_of.get((step.round - 1, self._nodes - 1), 0)
            if step.node_offset < self._nodes - 1:
                self._sends[send_at].append(step)

    def piece(self, round_: int, offset: int) -> Ref:
        """The piece of a step."""
        name = f"piece {round_}+{offset}"
        if name not in self.emitter.buffers:
            rows = self.halos[offset].rows
            self.emitter.buffer(name, Space.POOL, rows, self.fields(round_), Cargo.READ)
        return Ref(name)

    def send_own(self, index: int) -> None:
        """Send the rank's own piece, if it is due while this step is prepared."""
        halo = self.halos[0]
        for step in self._sends[index]:
            if step.node_offset == 0:
                piece, own = self.piece(step.round, 0), self.own(step.round)
                for rows, packed in halo.circulating_parts(Span(0, halo.shard_rows)):
                    sources = tuple(source.at(rows) for source in own)
                    self.emitter.emit(Copy(sources, piece.at(packed), Stream.SIDE))
                self._send(step)

    def send_on(self, index: int) -> None:
        """Send on the piece of a step, if it goes further."""
        for step in self._sends[index]:
            if step.node_offset:
                self._send(step)

    def _send(self, step: NodeStep) -> None:
        offsets = step.node_offset, step.node_offset + 1
        readers = range(step.node_offset + 1, self._nodes)
        source, target = (self.piece(step.round, offset) for offset in offsets)
        needed = [NeededBy.of_nodes(self.emitter.spec, offset, readers) for offset in offsets]
        self.emitter.hop(Link.INTER, Cargo.READ, source, target, needed)


@dataclass
class GradReducer:
    """Sums the gradients of a rank's queries or keys over the steps of each round."""

    emitter: Emitter
    order: Sequence[NodeStep]
    target: Callable[[int], Ref]  # where the rank's own gradients of a round go
    fields: Callable[[int, Dtype], tuple[Field, ...]]  # of a round's gradients, by dtype
    halos: Sequence[Halo]  # the rows that circulate, by node offset of their owner

    def _add_into(self, round_: int, total: Ref, sums: Sequence[Sum], stream: Stream) -> None:
        """target = total + sum of parts."""
        target = self.target(round_)
        for span, parts in sums:
            self.emitter.emit(Add((total.at(span), *parts), target.at(span), stream))


@dataclass
class RemoteGradReduce(GradReducer):
    """Gradients of what circulates: each node's go straight to the owner, which sums them."""

    def __post_init__(self) -> None:
        self._nodes = self.emitter.spec.topology.inter_size
        self._recvs: dict[int, list[NodeStep]] = defaultdict(list)  # whose gradients, by step index
        for index, step in enumerate(self.order):
            if step.node_offset:  # sent in the next step, whose tiles hide the transfer
                self._recvs[min(len(self.order), index + 2)].append(step)
        self._missing: dict[int, int] = {}  # contributions of a round that are yet to be added

    def add(self, index: int, sums: Sequence[Sum], stream: Stream = Stream.COMPUTE) -> None:
        """Add this node's contribution of a step, or send it; `sums` has every row once."""
        step, emitter = self.order[index], self.emitter
        offset = step.node_offset
        if offset == 0:
            self._add(step.round, sums, stream)
            return
        packed_sums = [
            (packed, tuple(part.at(rows.shifted(-span.start)) for part in parts))
            for span, parts in sums
            for rows, packed in self.halos[offset].circulating_parts(span)
        ]
        outgoing, incoming = (
            emitter.buffer(
                f"{name} {step.round}+{offset}", Space.POOL, self.halos[owner].rows,
                self.fields(step.round, Dtype.WIRE), Cargo.GRAD,
            )
            for name, owner in (("outgoing sum", offset), ("incoming sum", 0))
        )  # fmt: skip
        add_up(emitter, outgoing, packed_sums, True, stream)
        needed = [NeededBy.of_nodes(emitter.spec, owner, (offset,)) for owner in (offset, 0)]
        emitter.hop(Link.INTER, Cargo.GRAD, outgoing, incoming, needed, -offset)

    def recv_grads(self, index: int, stream: Stream = Stream.COMPUTE) -> None:
        """Add what other nodes sent for this rank's rows, if it is due at this step."""
        halo = self.halos[0]
        for step in self._recvs[index]:
            incoming = Ref(f"incoming sum {step.round}+{step.node_offset}")
            sums = [
                (span, tuple(incoming.at(packed) for _, packed in halo.circulating_parts(span)))
                for span in split_at_edges(halo.spans, halo.shard_rows)
            ]
            self._add(step.round, sums, stream)

    def _add(self, round_: int, sums: Sequence[Sum], stream: Stream) -> None:
        """Add a contribution; the last one completes the rank's gradients of the round."""
        emitter, total = self.emitter, Ref(f"sum {round_}")
        missing = self._missing[round_] = self._missing.get(round_, self._nodes) - 1
        if missing == 0:
            self._add_into(round_, total, sums, stream)
            return
        if total.buffer not in emitter.buffers:
            fields = self.fields(round_, Dtype.SUM)
            emitter.buffer(total.buffer, Space.POOL, self.halos[0].shard_rows, fields, "sums")
        add_up(emitter, total, sums, missing == self._nodes - 1, stream)


class LocalGradSum(GradReducer):
    """Gradients that stay: summed over the steps of a round, then rounded into its `target`."""

    def add(self, index: int, sums: Sequence[Sum], stream: Stream = Stream.COMPUTE) -> None:
        """Add a step's sums, which have rows at most once; those of a round cover every row."""
        step, emitter = self.order[index], self.emitter
        total = Ref(f"local sum {step.round}")
        if step.first and step.last:
            add_up(emitter, self.target(step.round), sums, True, stream)
            return
        if step.first:
            fields = self.fields(step.round, Dtype.SUM)
            rows = self.halos[0].shard_rows
            emitter.buffer(total.buffer, Space.SUM, rows, fields, "local", step.round)
        if step.last:
            self._add_into(step.round, total, sums, stream)
        else:
            add_up(emitter, total, sums, step.first, stream)

    def recv_grads(self, index: int, stream: Stream = Stream.COMPUTE) -> None:
        """Nothing is returned."""


def grad_reducer(spec: Spec, of_keys: bool) -> type[RemoteGradReduce] | type[LocalGradSum]:
    """What reduces key or query gradients: of the operand that circulates, between nodes."""
    circulates = of_keys == (spec.circulate is Circulate.KV)
    return RemoteGradReduce if circulates and spec.topology.inter_size > 1 else LocalGradSum


def whole_halo(emitter: Emitter) -> tuple[Halo, ...]:
    """All rows of a shard of queries, for every node offset."""
    rows = emitter.spec.shape.tokens
    return (Halo((Span(0, rows),), rows),) * emitter.spec.topology.inter_size
