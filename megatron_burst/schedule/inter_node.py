"""Between nodes: pieces circulate while the ranks of each node work together on what they have.

A round is a group of heads. In each of its N steps the ranks of a node work with the shards of one
node: each rank has the piece (its shard's heads of the round) of the rank at the same place there.
Pieces go around the column of equal places in N-1 hops. A rank sends its own piece of the next
round right after the last hop of the current one, so the slow link is never idle.

The gradient of a circulating piece follows it: each node adds its sum, and the last of N-1 hops
returns the total to the owner's node, whose own contribution never leaves it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.schedule.emitter import Emitter, Sum, add_up
from megatron_burst.schedule.mask import Span, cut
from megatron_burst.schedule.pieces import Halo
from megatron_burst.schedule.program import Add, Copy, Field, Home, Ref, Stream
from megatron_burst.schedule.spec import Cargo, Circulate, Dtype
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of a round: `distance` is how many nodes away the circulating piece is from."""

    round: int
    distance: int
    first: bool  # of its round
    last: bool


@lru_cache(maxsize=1024)
def steps(nodes: int, rounds: int, backward: bool, here: bool) -> tuple[Turn, ...]:
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
        found += [Turn(round_, away, place == 0, place == nodes - 1) for place, away in places]
    return tuple(found)


def heads_in_rounds(heads_kv: int, heads_per_round: int) -> tuple[Span, ...]:
    """KV heads in groups; the last may have fewer."""
    starts = range(0, heads_kv, heads_per_round)
    return tuple(Span(start, min(start + heads_per_round, heads_kv)) for start in starts)


class Circulating:
    """The pieces of each round that circulate between nodes.

    Args:
        emitter: of the program.
        order: its steps.
        own: the rank's own piece of a round.
        fields: of a round's piece.
        halos: rows of it that circulate, by how many nodes away it is from.
    """

    def __init__(
        self, emitter: Emitter, order: Sequence[Turn],
        own: Callable[[int], tuple[Ref, ...]], fields: Callable[[int], tuple[Field, ...]],
        halos: Sequence[Halo],
    ) -> None:  # fmt: skip
        self._emitter, self._order, self._own, self._fields = emitter, order, own, fields
        self._halos, self._nodes = halos, emitter.spec.topology.inter_size
        self._leaving: dict[int, list[Turn]] = defaultdict(list)
        at = {(step.round, step.distance): index for index, step in enumerate(order)}
        for step in order:
            if step.distance < self._nodes - 1:
                before = at.get((step.round - 1, self._nodes - 1), 0)
                leaves = at[step.round, step.distance] if step.distance else before
                self._leaving[leaves].append(step)

    def piece(self, round_: int, distance: int) -> Ref:
        """The piece of a step."""
        name = f"piece {round_}+{distance}"
        if name not in self._emitter.buffers:
            rows = self._halos[distance].rows
            self._emitter.buffer(name, Home.HOP, rows, self._fields(round_), Cargo.READ)
        return Ref(name)

    def set_out(self, index: int) -> None:
        """Send the rank's own piece, if it is due while this step is prepared."""
        for step in self._leaving[index]:
            if step.distance == 0:
                piece, own = self.piece(step.round, 0), self._own(step.round)
                for rows, packed in self._halos[0].parts(Span(0, self._halos[0].of)):
                    sources = tuple(source.at(rows) for source in own)
                    self._emitter.emit(Copy(sources, piece.at(packed), Stream.SIDE))
                self._send(step)

    def pass_on(self, index: int) -> None:
        """Send on the piece of a step, if it goes further."""
        for step in self._leaving[index]:
            if step.distance:
                self._send(step)

    def _send(self, step: Turn) -> None:
        sends, brings = (self.piece(step.round, step.distance + n) for n in (0, 1))
        self._emitter.hop(Link.INTER, Cargo.READ, sends, brings)


class TravellingSums:
    """Gradients of what circulates: each node adds its own; the last hop returns them.

    Args:
        emitter: of the program.
        order: its steps.
        target: where the rank's own gradients of a round go.
        fields: of a round's gradients, as sent.
        halos: rows of a piece that circulate, by how many nodes away it is from.
    """

    def __init__(
        self, emitter: Emitter, order: Sequence[Turn], target: Callable[[int], Ref],
        fields: Callable[[int], tuple[Field, ...]], halos: Sequence[Halo],
    ) -> None:  # fmt: skip
        self._emitter, self._order, self._target = emitter, order, target
        self._fields, self._halos = fields, halos
        self._nodes = emitter.spec.topology.inter_size
        self._coming: dict[int, list[int]] = defaultdict(list)  # rounds that return, by turn
        at = {(step.round, step.distance): index for index, step in enumerate(order)}
        for index, step in enumerate(order):
            if 0 < step.distance == self._nodes - 1:
                turn = min(len(order), max(at[step.round, 0], index + 2))
                self._coming[turn].append(step.round)

    def _sum(self, round_: int, distance: int) -> Ref:
        """The sum of a step; after the last one, the returned total."""
        name, halo = f"sum {round_}+{distance}", self._halos[distance % self._nodes]
        if name not in self._emitter.buffers:
            rows = halo.rows if distance else halo.of
            self._emitter.buffer(name, Home.HOP, rows, self._fields(round_), Cargo.GRAD)
        return Ref(name)

    def add(self, index: int, sums: Sequence[Sum], stream: Stream = Stream.COMPUTE) -> None:
        """Add this node's contribution of a step and send it on; `sums` has every row once."""
        step = self._order[index]
        fresh = step.distance <= 1
        if self._nodes == 1:
            add_up(self._emitter, self._target(step.round), sums, fresh, stream)
            return
        if step.distance == 0:
            add_up(self._emitter, self._sum(step.round, 0), sums, fresh, stream)
            return
        travel = [
            (packed, tuple(part.at(rows.moved(-span.start)) for part in parts))
            for span, parts in sums
            for rows, packed in self._halos[step.distance].parts(span)
        ]
        total, came = (self._sum(step.round, step.distance + n) for n in (0, 1))
        add_up(self._emitter, total, travel, fresh, stream)
        self._emitter.hop(Link.INTER, Cargo.GRAD, total, came)

    def come_home(self, turn: int, stream: Stream = Stream.COMPUTE) -> list[int]:
        """Complete the rank's own gradients returned by this turn; returns their rounds."""
        halo = self._halos[0]
        for round_ in self._coming[turn]:
            own, target = self._sum(round_, 0), self._target(round_)
            for span in cut(halo.spans, halo.of):
                came = tuple(
                    self._sum(round_, self._nodes).at(packed) for _, packed in halo.parts(span)
                )
                self._emitter.emit(Add((own.at(span), *came), target.at(span), stream))
        return self._coming[turn]


class LocalSums:
    """Gradients that stay: summed over the steps of a round, then rounded.

    Args:
        emitter: of the program.
        order: its steps.
        target: where a round's gradients go.
        fields: of a round's sums.
        rows: of them.
    """

    def __init__(
        self, emitter: Emitter, order: Sequence[Turn], target: Callable[[int], Ref],
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
            emitter.buffer(name, Home.SUM, self._rows, fields, "local", step.round)
        if not step.last:
            add_up(emitter, Ref(name), sums, step.first, stream)
            return
        for span, parts in sums:
            emitter.emit(Add((Ref(name).at(span), *parts), target.at(span), stream))

    def come_home(self, turn: int, stream: Stream = Stream.COMPUTE) -> list[int]:
        """Nothing is returned."""
        return []


def sums(
    emitter: Emitter, order: Sequence[Turn], of_keys: bool, target: Callable[[int], Ref],
    fields: Callable[[int, Dtype], tuple[Field, ...]], rows: int | Sequence[Halo],
) -> LocalSums | TravellingSums:  # fmt: skip
    """Sums of key or query gradients; those of what circulates are returned. `rows`: how many, or
    those that circulate."""
    halos = whole_halo(emitter, rows) if isinstance(rows, int) else rows
    if of_keys == (emitter.spec.circulate is Circulate.KV):
        return TravellingSums(emitter, order, target, lambda r: fields(r, Dtype.WIRE), halos)
    return LocalSums(emitter, order, target, lambda r: fields(r, Dtype.SUM), halos[0].of)


def whole_halo(emitter: Emitter, rows: int) -> tuple[Halo, ...]:
    """All rows, at every distance."""
    return (Halo((Span(0, rows),), rows),) * emitter.spec.topology.inter_size
