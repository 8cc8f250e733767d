"""The transfers of an all-to-all: Q, K and V to the ranks that compute them, results back."""

from megatron_burst.schedule.a2a_rounds import AllToAllEmitter
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
    """Tensors of this rank's heads over all rows of the node, a round at a time.

    A slot holds this rank's rows once for each rank, with that rank's heads. In backward, what
    forward saved is not sent again.
    """

    def __init__(self, emitter: AllToAllEmitter) -> None:
        self._emitter, spec = emitter, emitter.spec
        self._saves = spec.left and not spec.backward
        self._recalls = spec.left and spec.backward
        self._arrived: set[int] = set()
        self._sources: tuple[str, ...] = ("q", "kv")
        if spec.backward:
            delta = emitter.delta().buffer
            self._sources = ("side", delta) if self._recalls else ("side", "kv", delta)
        self._slots = emitter.slot_count(
            Cargo.READ, len(emitter.rounds), emitter.rows, self._fields(0)
        )
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
        emitter = self._emitter
        if round_ >= len(emitter.rounds):
            return
        fields, ranks, (_, part) = self._fields(round_), emitter.ranks, emitter.heads_of(round_)
        slot = emitter.buffer(
            f"heads {round_}", Home.SLOT, emitter.rows, fields, Cargo.READ, round_, self._slots
        )
        sources = emitter.refs(round_, self._sources)
        emitter.emit(ToRanks(sources, slot, len(ranks), part, emitter.copies))
        into = self._came(round_) if emitter.reorders else self._whole(round_)
        others, own = emitter.by_rank(slot)
        for piece, rows in own:
            emitter.emit(Copy((rows,), into.at(piece.whole)))
        gives = [Give(rank, rows) for rank, _, rows in others]
        at = ranks.index(emitter.spec.cp_rank) * emitter.spec.shape.tokens
        takes = [
            Take(piece.holder, slot.at(piece.rows.moved(at)), into.at(piece.whole))
            for piece in emitter.pieces
            if piece.holder != emitter.spec.cp_rank
        ]
        emitter.exchange(Cargo.READ, slot, gives, takes)

    def arrive(self, round_: int) -> None:
        """Put a round's received rows in order, once; for other nodes, in parallel with kernels."""
        emitter = self._emitter
        if emitter.reorders and round_ not in self._arrived:
            self._arrived.add(round_)
            came, whole = self._came(round_), self._whole(round_)
            stream = Stream.COMPUTE if emitter.alone else Stream.SIDE
            emitter.emit(Arrange(came, whole, *emitter.orders, stream))

    def _came(self, round_: int) -> Ref:
        """Where a round is received, rank by rank."""
        return self._pair("came", round_, "came")

    def _whole(self, round_: int) -> Ref:
        """Where a round's rows are in order."""
        return self._emitter.left(round_) if self._saves else self._pair("whole", round_, "heads")

    def _pair(self, name: str, round_: int, use: str) -> Ref:
        """A round's buffer on this rank; two take turns."""
        emitter, fields, count = self._emitter, self._fields(round_), len(self._emitter.rounds)
        return emitter.buffer(
            f"{name} {round_}", Home.STAGING, emitter.rows, fields, use, round_, min(2, count)
        )

    def of(self, round_: int) -> Ref:
        """What was received; includes q, k and v unless backward has them from forward."""
        self.arrive(round_)
        return self._whole(round_)

    def keys(self, round_: int) -> Ref:
        """The buffer with k and v."""
        return self._emitter.left(round_) if self._recalls else self.of(round_)


class RoundSides:
    """The query side of this rank's heads for its node's rows, round by round.

    Delta is sent, whatever the kernel needs: it is 4 bytes where a bf16 output is 2 dv, and the
    stand-in made from it is closer to the true delta than a rounded output.
    """

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
        rest = (emitter.left(round_), *left) if left else ()
        return Ref(name), *rest, self._there.of(round_)

    def of(self, round_: int) -> tuple[Ref, ...]:
        """A round's query side for kernels; made once, whichever keys it meets."""
        if round_ not in self._made:
            self._made = {round_: self._emitter.side_for_kernel(*self.bare(round_))}
        return self._made[round_]


class Results:
    """Return transfer of a round's results to the ranks that hold the rows.

    A slot holds this rank's heads of all rows; a rank gets its own rows of them.
    """

    def __init__(self, emitter: AllToAllEmitter) -> None:
        self._emitter = emitter
        self._targets = ("dq", "dkv") if emitter.spec.backward else ("out",)
        self._slots = emitter.slot_count(
            Cargo.GRAD, len(emitter.rounds), emitter.rows, self._fields(0)
        )
        self._under_way: int | None = None

    def _fields(self, round_: int) -> tuple[Field, ...]:
        spec, (heads_q, heads_kv) = self._emitter.spec, self._emitter.heads_of(round_)
        if not spec.backward:
            return out_fields(heads_q, spec.shape, Dtype.INPUT)
        dtype = spec.share_dtype
        return (*dq_fields(heads_q, spec.shape, dtype), *dkv_fields(heads_kv, spec.shape, dtype))

    def of(self, round_: int) -> Ref:
        """Where a round's results are written."""
        if not self._emitter.reorders:
            return self._slot(round_)
        fields = self._fields(round_)
        return self._emitter.buffer(
            f"made {round_}", Home.STAGING, self._emitter.rows, fields, "made"
        )

    def _slot(self, round_: int) -> Ref:
        return self._emitter.buffer(
            f"results {round_}", Home.SLOT, self._emitter.rows, self._fields(round_), Cargo.GRAD,
            round_, self._slots,
        )  # fmt: skip

    def post(self, round_: int) -> None:
        """Start a round's return transfer; the previous round's must be collected."""
        emitter, slot = self._emitter, self._slot(round_)
        if emitter.reorders:
            emitter.emit(Restore(Ref(f"made {round_}"), slot, *emitter.orders))
        fields = self._fields(round_)
        home = emitter.buffer(f"home {round_}", Home.STAGING, emitter.rows, fields, "results")
        others, own = emitter.by_rank(home)
        for piece, rows in own:
            emitter.emit(Copy((slot.at(piece.whole),), rows))
        gives = [
            Give(piece.holder, slot.at(piece.whole))
            for piece in emitter.pieces
            if piece.holder != emitter.spec.cp_rank
        ]
        takes = [Take(rank, slot.at(piece.whole), rows) for rank, piece, rows in others]
        emitter.exchange(Cargo.GRAD, slot, gives, takes)
        self._under_way = round_

    def collect(self) -> None:
        """Put the results of the return transfer in flight, if any, where they belong."""
        if self._under_way is None:
            return
        round_, self._under_way = self._under_way, None
        emitter = self._emitter
        targets, (_, part) = emitter.refs(round_, self._targets), emitter.heads_of(round_)
        home, ranks = Ref(f"home {round_}"), len(emitter.ranks)
        emitter.emit(FromRanks(home, targets, ranks, part, emitter.copies))
