"""Between nodes: pieces circulate while the ranks of each node work together on what they have.

A round is a group of heads. In each of its N steps the ranks of a node work with the shards of one
node: each rank has the piece (its shard's heads of the round) of the rank at the same place there.
Pieces go around the column of equal places in N-1 hops. A rank sends its own piece of the next
round right after the last hop of the current one, so the slow link is never idle.

Gradients of a circulating piece do not follow it. Each node sums its own in the accumulation dtype,
rounds them once and sends them straight home, where all are summed in the accumulation dtype. So
N-1 contributions are sent, as many bytes as N-1 hops of a sum, but none is rounded again on the
way: errors do not grow with the number of nodes.
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
from megatron_burst.schedule.spec import Cargo, Circulate, Dtype
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class NodeStep:
    """One step of a round: `distance` is how many nodes away the circulating piece is from."""

    round: int
    node_offset: int
    first: bool  # of its round
    last: bool


@lru_cache(maxsize=1024)
def steps(nodes: int, rounds: int, backward: bool, here: bool) -> tuple[NodeStep, ...]:
    """The steps of a pass.

    Each round begins with the node's own shards. In backward the last round ends with them, so that
    their tiles hide the last return transfer. A single round does not: nothing would hide its first
    piece. If pieces are `here` already, saved by forward, every round ends with the node's own, so
    that no two of them send gradients right after each other.
    """
    found = []
    for round_ in range(rounds):
        ends_at_home = here or 0 < round_ == rounds - 1
        turn = (*range(1, nodes), 0) if backward and ends_at_home else range(nodes)
        places = list(enumerate(turn))
        found += [NodeStep(round_, away, place == 0, place == nodes - 1) for place, away in places]
    return tuple(found)


def heads_in_rounds(heads_kv: int, heads_per_round: int) -> tuple[Span, ...]:
    """KV heads in groups; the last may have fewer."""
    starts = range(0, heads_kv, heads_per_round)
    return tuple(Span(start, min(start + heads_per_round, heads_kv)) for start in starts)


class InterNodeRing:
    """The pieces of each round that circulate between nodes.

    Args:
        emitter: of the program.
        order: its steps.
        own: the rank's own piece of a round.
        fields: of a round's piece.
        halos: rows of it that circulate, by how many nodes away it is from.
    """

    def __init__(
        self, emitter: Emitter, order: Sequence[NodeStep],
        own: Callable[[int], tuple[Ref, ...]], fields: Callable[[int], tuple[Field, ...]],
        halos: Sequence[Halo],
    ) -> None:  # fmt: skip
        self._emitter, self._order, self._own, self._fields = emitter, order, own, fields
        self._halos, self._nodes = halos, emitter.spec.topology.inter_size
        self._leaving: dict[int, list[NodeStep]] = defaultdict(list)
        at = {(step.round, step.node_offset): index for index, step in enumerate(order)}
        for step in order:
            if step.node_offset < self._nodes - 1:
                before = at.get((step.round - 1, self._nodes - 1), 0)
                leaves = at[step.round, step.node_offset] if step.node_offset else before
                self._leaving[leaves].append(step)

    def piece(self, round_: int, distance: int) -> Ref:
        """The piece of a step."""
        name = f"piece {round_}+{distance}"
        if name not in self._emitter.buffers:
            rows = self._halos[distance].rows
            self._emitter.buffer(name, Space.RING, rows, self._fields(round_), Cargo.READ)
        return Ref(name)

    def send_own(self, index: int) -> None:
        """Send the rank's own piece, if it is due while this step is prepared."""
        for step in self._leaving[index]:
            if step.node_offset == 0:
                piece, own = self.piece(step.round, 0), self._own(step.round)
                for rows, packed in self._halos[0].circulating_parts(
                    Span(0, self._halos[0].shard_rows)
                ):
                    sources = tuple(source.at(rows) for source in own)
                    self._emitter.emit(Copy(sources, piece.at(packed), Stream.SIDE))
                self._send(step)

    def send_on(self, index: int) -> None:
        """Send on the piece of a step, if it goes further."""
        for step in self._leaving[index]:
            if step.node_offset:
                self._send(step)

    def _send(self, step: NodeStep) -> None:
        sends, brings = (self.piece(step.round, step.node_offset + n) for n in (0, 1))
        readers = range(step.node_offset + 1, self._nodes)
        both = [
            NeededBy.of_nodes(self._emitter.spec, step.node_offset + n, readers) for n in (0, 1)
        ]
        self._emitter.hop(Link.INTER, Cargo.READ, sends, brings, both)


class RemoteGradReduce:
    """Gradients of what circulates: each node's go straight home, and are summed there.

    Args:
        emitter: of the program.
        order: its steps.
        target: where the rank's own gradients of a round go.
        fields: of a round's gradients, by dtype.
        halos: rows of a piece that circulate, by how many nodes away it is from.
    """

    def __init__(
        self, emitter: Emitter, order: Sequence[NodeStep], target: Callable[[int], Ref],
        fields: Callable[[int, Dtype], tuple[Field, ...]], halos: Sequence[Halo],
    ) -> None:  # fmt: skip
        self._emitter, self._order, self._target = emitter, order, target
        self._fields, self._halos = fields, halos
        self._nodes = emitter.spec.topology.inter_size
        self._arriving: dict[int, list[NodeStep]] = defaultdict(list)  # added at a turn
        for index, step in enumerate(order):
            if step.node_offset:  # one more step hides the transfer
                self._arriving[min(len(order), index + 2)].append(step)
        self._missing: dict[int, int] = {}  # contributions of a round that are yet to come

    def add(self, index: int, sums: Sequence[Sum], stream: Stream = Stream.COMPUTE) -> None:
        """Add this node's contribution of a step, or send it; `sums` has every row once."""
        step, emitter = self._order[index], self._emitter
        if step.node_offset == 0:
            self._add(step.round, sums, stream)
            return
        away = [
            (packed, tuple(part.at(rows.shifted(-span.start)) for part in parts))
            for span, parts in sums
            for rows, packed in self._halos[step.node_offset].circulating_parts(span)
        ]
        leaves, arrives = (
            emitter.buffer(
                f"{name} {step.round}+{step.node_offset}", Space.RING, self._halos[owner].rows,
                self._fields(step.round, Dtype.WIRE), Cargo.GRAD,
            )
            for name, owner in (("leaves", step.node_offset), ("arrives", 0))
        )  # fmt: skip
        add_up(emitter, leaves, away, True, stream)
        both = [
            NeededBy.of_nodes(emitter.spec, away, (step.node_offset,))
            for away in (step.node_offset, 0)
        ]
        emitter.hop(Link.INTER, Cargo.GRAD, leaves, arrives, both, -step.node_offset)

    def recv_grads(self, turn: int, stream: Stream = Stream.COMPUTE) -> None:
        """Add what other nodes sent for this rank's rows."""
        halo = self._halos[0]
        for step in self._arriving[turn]:
            arrived = Ref(f"arrives {step.round}+{step.node_offset}")
            parts = [
                (span, tuple(arrived.at(packed) for _, packed in halo.circulating_parts(span)))
                for span in split_at_edges(halo.spans, halo.shard_rows)
            ]
            self._add(step.round, parts, stream)

    def _add(self, round_: int, sums: Sequence[Sum], stream: Stream) -> None:
        """Add a contribution; the last one completes the rank's gradients of the round."""
        emitter, total = self._emitter, Ref(f"sum {round_}")
        left = self._missing[round_] = self._missing.get(round_, self._nodes) - 1
        if left:
            if total.buffer not in emitter.buffers:
                fields = self._fields(round_, Dtype.SUM)
                emitter.buffer(total.buffer, Space.RING, self._halos[0].shard_rows, fields, "sums")
            add_up(emitter, total, sums, left == self._nodes - 1, stream)
        else:
            for span, parts in sums:
                emitter.emit(Add((total.at(span), *parts), self._target(round_).at(span), stream))


class LocalGradSum:
    """Gradients that stay: summed over the steps of a round, then rounded.

    Args:
        emitter: of the program.
        order: its steps.
        target: where a round's gradients go.
        fields: of a round's sums.
        rows: of them.
    """

    def __init__(
        self, emitter: Emitter, order: Sequence[NodeStep], target: Callable[[int], Ref],
        fields: Callable[[int], tuple[Field, ...]], rows: int,
    ) -> None:  # fmt: skip
        self._emitter, self._order, self._target = emitter, order, target
        self._fields, self._rows = fields, rows

    def add(self, index: int, sums: Sequence[Sum], stream: Stream = Stream.COMPUTE) -> None:
        """Add a step's share; a step's sums have rows at most once, a round's cover every row."""
        step, emitter = self._order[index], self._emitter
        target = self._target(step.round)
        if step.first and step.last:
            add_up(emitter, target, sums, True, stream)
            return
        name = f"local sum {step.round}"
        if name not in emitter.buffers:
            fields = self._fields(step.round)
            emitter.buffer(name, Space.SUM, self._rows, fields, "local", step.round)
        if not step.last:
            add_up(emitter, Ref(name), sums, step.first, stream)
            return
        for span, parts in sums:
            emitter.emit(Add((Ref(name).at(span), *parts), target.at(span), stream))

    def recv_grads(self, turn: int, stream: Stream = Stream.COMPUTE) -> None:
        """Nothing is returned."""


def sums(
    emitter: Emitter, order: Sequence[NodeStep], of_keys: bool, target: Callable[[int], Ref],
    fields: Callable[[int, Dtype], tuple[Field, ...]], rows: int | Sequence[Halo],
) -> LocalGradSum | RemoteGradReduce:  # fmt: skip
    """Sums of key or query gradients; those of what circulates come from all nodes. `rows`: how
    many, or those that circulate."""
    halos = whole_halo(emitter, rows) if isinstance(rows, int) else rows
    circulates = of_keys == (emitter.spec.circulate is Circulate.KV)
    if circulates and emitter.spec.topology.inter_size > 1:
        return RemoteGradReduce(emitter, order, target, fields, halos)
    return LocalGradSum(emitter, order, target, lambda r: fields(r, Dtype.SUM), halos[0].shard_rows)


def whole_halo(emitter: Emitter, rows: int) -> tuple[Halo, ...]:
    """All rows, at every distance."""
    return (Halo((Span(0, rows),), rows),) * emitter.spec.topology.inter_size
