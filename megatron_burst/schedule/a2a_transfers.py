"""The transfers of an all-to-all: Q, K and V to the ranks that compute them, results back."""

from collections.abc import Sequence

from megatron_burst.schedule.a2a_rounds import AllToAllEmitter, Load
from megatron_burst.schedule.program import (
    Arrange,
    Copy,
    Field,
    FromRanks,
    Give,
    Home,
    Ref,
    Restore,
    Stream,
    Take,
    ToRanks,
    dkv_fields,
    dq_fields,
    out_fields,
)
from megatron_burst.schedule.spec import Cargo, Dtype


class Wholes:
    """Tensors of this rank's heads over all rows of the node, a round at a time. A slot holds this
    rank's rows once for each rank, with that rank's heads. In backward, what forward saved is not
    sent again. The loads of a round are sent one after the other."""

    def __init__(self, emitter: AllToAllEmitter) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._saves = spec.left and not spec.backward
        self._recalls = spec.left and spec.backward
        self._arrived: set[int] = set()
        self._sources: tuple[str, ...] = ("q", "kv")
        if spec.backward:
            delta = emitter.delta().buffer
            self._sources = ("side", delta) if self._recalls else ("side", "kv", delta)
        self._loads = [load for load in emitter.loads if load.some(self._fields(0))]
        self._slots = slots_of(emitter, Cargo.READ, self._loads, self._fields(0))
        self.post(0)

    def _fields(self, round_: int) -> tuple[Field, ...]:
        """Fields of a row that is sent."""
        spec, qkv = self._emitter.spec, self._emitter.qkv_fields(round_)
        if not spec.backward:
            return qkv
        heads_q, _ = self._emitter.heads_of(round_)
        lse, delta = (Field(name, heads_q, 0, Dtype.SUM) for name in ("lse", "delta"))
        dout = Field("dout", heads_q, spec.shape.dim_v)
        return (dout, delta) if self._recalls else (*qkv, dout, lse, delta)

    def post(self, round_: int) -> None:
        """Start the all-to-all of a round's heads, if there is such a round."""
        for turn, load in enumerate(self._loads if round_ < len(self._emitter.rounds) else ()):
            self._post(round_, load, round_ * len(self._loads) + turn)

    def _post(self, round_: int, load: Load, number: int) -> None:
        emitter, fields = self._emitter, load.some(self._fields(round_))
        ranks, (_, part) = emitter.ranks, emitter.heads_of(round_)
        slot = emitter.buffer(
            f"heads{load.name} {round_}", Home.SLOT, load.rows, fields, Cargo.READ, number,
            self._slots,
        )  # fmt: skip
        sources = emitter.refs(round_, filter(load.has, self._sources))
        stream = Stream.beside(round_)
        emitter.emit(ToRanks(sources, slot, len(ranks), part, emitter.copies, stream))
        into = self._came(round_) if emitter.reorders else self._whole(round_, load)
        others, own = emitter.by_rank(slot, load)
        for piece, rows in own:
            emitter.emit(Copy((rows,), into.at(piece.whole), stream))
        gives = [Give(rank, rows) for rank, _, rows in others]
        at = ranks.index(emitter.spec.cp_rank) * load.tokens
        takes = [
            Take(piece.holder, slot.at(piece.rows.moved(at)), into.at(piece.whole))
            for piece in load.pieces
            if piece.holder != emitter.spec.cp_rank
        ]
        emitter.exchange(Cargo.READ, slot, gives, takes)

    def arrive(self, round_: int) -> None:
        """Put a round's received rows in order, once, if there is such a round."""
        emitter = self._emitter
        comes = emitter.reorders and round_ < len(emitter.rounds)
        if comes and round_ not in self._arrived:
            self._arrived.add(round_)
            came, whole = self._came(round_), self._whole(round_, emitter.loads[0])
            stream = Stream.beside(round_ or not emitter.alone)
            emitter.emit(Arrange(came, whole, *emitter.orders, stream))

    def _came(self, round_: int) -> Ref:
        """Where a round is received, rank by rank: one for all, as each is soon put in order."""
        return self._staged("came", round_, "came", self._emitter.loads[0], 1)

    def _whole(self, round_: int, load: Load) -> Ref:
        """Where a round's rows are in order."""
        if self._saves:
            return self._emitter.left(round_, load)
        return self._staged("whole", round_, "heads", load)

    def _staged(self, name: str, round_: int, use: str, load: Load, count: int = 2) -> Ref:
        """A round's buffer on this rank; so many take turns."""
        emitter, fields = self._emitter, load.some(self._fields(round_))
        return emitter.buffer(
            f"{name}{load.name} {round_}", Home.STAGING, load.rows, fields, f"{use}{load.name}",
            round_, min(count, len(emitter.rounds)),
        )  # fmt: skip

    def of(self, round_: int) -> Ref:
        """What was received of queries; of both, unless there are two loads."""
        self.arrive(round_)
        return self._whole(round_, self._emitter.loads[0])

    def keys(self, round_: int) -> Ref:
        """The buffer with k and v: received, or those that forward saved."""
        load = self._emitter.loads[-1]
        if self._recalls:
            return self._emitter.left(round_, load)
        self.arrive(round_)
        return self._whole(round_, load)


class RoundSides:
    """The query side of this rank's heads for its node's rows, round by round. Delta is sent,
    whatever the kernel needs: it is 4 bytes where a bf16 output is 2 dv, and the stand-in made from
    it is closer to the true delta than a rounded output."""

    def __init__(self, emitter: AllToAllEmitter, there: Wholes) -> None:
        self._emitter, self._there = emitter, there
        self._made: dict[int, tuple[Ref, ...]] = {}

    def bare(self, round_: int) -> tuple[Ref, ...]:
        """A round's side without an output, with dense statistics."""
        emitter, spec = self._emitter, self._emitter.spec
        name, heads = f"statistics {round_}", emitter.heads_of(round_)[0]
        lse, delta = (Field(field, heads, 0, Dtype.SUM) for field in ("lse", "delta"))
        left = (emitter.lse(round_),) if spec.left else ()
        if name not in emitter.buffers:
            # with other nodes it may have to be sent while kernels run
            home, stream = (Home.PART, Stream.COMPUTE) if emitter.alone else (Home.HOP, Stream.SIDE)
            fields = (delta,) if left else (lse, delta)
            made = emitter.buffer(name, home, emitter.rows, fields, "statistics")
            emitter.emit(Copy((self._there.of(round_),), made, stream))
        rest = (emitter.left(round_, emitter.loads[0]), *left) if left else ()
        return Ref(name), *rest, self._there.of(round_)

    def of(self, round_: int) -> tuple[Ref, ...]:
        """A round's query side for kernels; made once, whichever keys it meets."""
        if round_ not in self._made:
            self._made = {round_: self._emitter.side_for_kernel(*self.bare(round_))}
        return self._made[round_]


class Results:
    """Return transfer of a round's results to the ranks that hold the rows: a slot has this rank's
    heads of all rows, and a rank gets its own rows of them."""

    def __init__(self, emitter: AllToAllEmitter) -> None:
        self._emitter = emitter
        self._targets = ("dq", "dkv") if emitter.spec.backward else ("out",)
        self._loads = [load for load in emitter.loads if load.some(self._fields(0))]
        # with one slot the next round's kernels would wait until all ranks have pulled
        least = 1 + len(self._loads) if len(emitter.rounds) > 1 else 1
        self._slots = max(least, slots_of(emitter, Cargo.GRAD, self._loads, self._fields(0)))
        self._under_way: int | None = None

    def _fields(self, round_: int) -> tuple[Field, ...]:
        spec, (heads_q, heads_kv) = self._emitter.spec, self._emitter.heads_of(round_)
        if not spec.backward:
            return out_fields(heads_q, spec.shape, Dtype.INPUT)
        dtype = spec.share_dtype
        return (*dq_fields(heads_q, spec.shape, dtype), *dkv_fields(heads_kv, spec.shape, dtype))

    def of(self, round_: int) -> Ref:
        """Where a round's results of queries are written."""
        return self._made(round_, self._loads[0])

    def of_keys(self, round_: int) -> Ref:
        """Where a round's gradients of keys are written: there too, unless there are two loads."""
        return self._made(round_, self._loads[-1])

    def _made(self, round_: int, load: Load) -> Ref:
        """In the slot that is sent next; what goes into the one after that is made elsewhere."""
        if self._emitter.reorders or load is not self._loads[0]:
            return self._staged("made", "made", round_, load)
        return self._slot(round_, load)

    def _staged(self, name: str, use: str, round_: int, load: Load) -> Ref:
        fields, name = load.some(self._fields(round_)), f"{name}{load.name} {round_}"
        return self._emitter.buffer(name, Home.STAGING, load.rows, fields, use + load.name)

    def _slot(self, round_: int, load: Load) -> Ref:
        number = round_ * len(self._loads) + self._loads.index(load)
        return self._emitter.buffer(
            f"results{load.name} {round_}", Home.SLOT, load.rows, load.some(self._fields(round_)),
            Cargo.GRAD, number, self._slots,
        )  # fmt: skip

    def post(self, *rounds: int) -> None:
        """Start rounds' return transfers, each once the previous one's results are in place."""
        for round_ in rounds:
            self.collect(Stream.SIDE)
            for load in self._loads:
                self._post(round_, load)
            self._under_way = round_

    def _post(self, round_: int, load: Load) -> None:
        emitter, slot, made = self._emitter, self._slot(round_, load), self._made(round_, load)
        if emitter.reorders:
            emitter.emit(Restore(made, slot, *emitter.orders))
        elif made != slot:
            emitter.emit(Copy((made,), slot))
        home = self._staged("home", "results", round_, load)
        others, own = emitter.by_rank(home, load)
        for piece, rows in own:
            emitter.emit(Copy((slot.at(piece.whole),), rows))
        gives = [
            Give(piece.holder, slot.at(piece.whole))
            for piece in load.pieces
            if piece.holder != emitter.spec.cp_rank
        ]
        takes = [Take(rank, slot.at(piece.whole), rows) for rank, piece, rows in others]
        emitter.exchange(Cargo.GRAD, slot, gives, takes)

    def collect(self, stream: Stream = Stream.COMPUTE) -> None:
        """Put the results of the return transfer in flight, if any, where they belong."""
        if self._under_way is None:
            return
        round_, self._under_way = self._under_way, None
        emitter, (_, part) = self._emitter, self._emitter.heads_of(round_)
        for load in self._loads:
            targets = emitter.refs(round_, filter(load.has, self._targets))
            home, ranks = Ref(f"home{load.name} {round_}"), len(emitter.ranks)
            emitter.emit(FromRanks(home, targets, ranks, part, emitter.copies, stream))


def slots_of(
    emitter: AllToAllEmitter, cargo: Cargo, loads: Sequence[Load], fields: Sequence[Field]
) -> int:
    """How many slots the exchanges of all rounds cycle through; loads take turns in them."""
    count = len(loads) * len(emitter.rounds)
    return max(emitter.slot_count(cargo, count, load.rows, load.some(fields)) for load in loads)
