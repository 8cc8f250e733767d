"""Gathering for documents of which each rank has two chunks (the layout "zigzag-documents").

Keys come from all ranks of the node, a few heads at a time, rank by rank, and are copied into the
order in which this rank's queries see them under a causal mask: a document's keys up to the end of
its first chunk, then those up to the end of its second one. So one kernel call does a round, each
chunk is a segment of it, and all ranks have equal work. Queries, results and their gradients stay
where they are. Gradients of keys are summed per row and go to the ranks that hold them while the
next round is computed.
"""

from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.emitter import Emitter, Spec, add_up, dkv_fields, kv_fields
from megatron_burst.schedule.inter_node import heads_in_rounds
from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.program import (
    Attend,
    AttendBackward,
    Copy,
    Field,
    Give,
    Home,
    Ref,
    Repeat,
    Stream,
    SumRepeats,
    Take,
)


class Documents(Emitter):
    """Emits one pass."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        topology, self.tokens = spec.topology, spec.shape.tokens
        self.ranks = topology.grid[0]
        self.rounds = heads_in_rounds(spec.shape.heads_kv, spec.heads_per_round)
        self.rows = len(self.ranks) * self.tokens
        chunks = 2 * len(self.ranks)
        self.seen = self.rows // chunks * (chunks + 1)
        self.read_slots = self.slot_count(
            Cargo.READ, len(self.rounds), self.rows, self.fields_of(0, kv_fields)
        )
        self.grad_slots = self.slot_count(
            Cargo.GRAD, len(self.rounds), self.rows, self.share_fields(0)
        )

    def fields_of(self, round_: int, fields) -> tuple[Field, ...]:
        return fields(len(self.rounds[round_]), self.spec.shape)

    def share_fields(self, round_: int) -> tuple[Field, ...]:
        return dkv_fields(len(self.rounds[round_]), self.spec.shape, self.spec.share_dtype)

    def block(self, slot: Ref, rank: int) -> Ref:
        """A rank's rows of a slot that has those of all."""
        first = self.ranks.index(rank) * self.tokens
        return slot.at(Span(first, first + self.tokens))

    @property
    def others(self) -> tuple[int, ...]:
        """Beginning after this rank: not all turn to the same one."""
        column = self.ranks.index(self.spec.cp_rank)
        return (*self.ranks[column + 1 :], *self.ranks[:column])

    def post(self, round_: int) -> None:
        """Let the keys of a round come, if there is such a round."""
        if round_ >= len(self.rounds):
            return
        fields, mine = self.fields_of(round_, kv_fields), self.spec.cp_rank
        slot = self.buffer(
            f"keys {round_}", Home.SLOT, self.rows, fields, Cargo.READ, round_, self.read_slots
        )
        own = Ref("kv", heads=self.rounds[round_])
        self.emit(Copy((own,), self.block(slot, mine), self.beside(round_)))
        gives = [Give(peer, self.block(slot, mine)) for peer in self.others]
        takes = [Take(p, self.block(slot, p), self.block(slot, p)) for p in self.others]
        self.exchange(Cargo.READ, slot, gives, takes)

    def repeat(self, round_: int) -> None:
        """Copy the keys of a round into the order in which they are seen."""
        if round_ < len(self.rounds):
            fields, count = self.fields_of(round_, kv_fields), min(2, len(self.rounds))
            seen = self.buffer(
                f"seen {round_}", Home.STAGING, self.seen, fields, "seen", round_, count
            )
            self.emit(Repeat(Ref(f"keys {round_}"), seen, self.beside(round_)))

    @staticmethod
    def beside(round_: int) -> Stream:
        """Nothing hides the first round's copies; those of others run beside kernels."""
        return Stream.SIDE if round_ else Stream.COMPUTE

    def forward(self) -> None:
        self.post(0)
        self.repeat(0)
        for round_, heads in enumerate(self.rounds):
            self.post(round_ + 1)
            q, out = (Ref(name, heads=self.queries(heads)) for name in ("q", "out"))
            self.emit(Attend(q, Ref(f"seen {round_}"), self.spec.mask, (out,)))
            self.repeat(round_ + 1)

    def backward(self) -> None:
        self.post(0)
        self.repeat(0)
        for round_, heads in enumerate(self.rounds):
            self.post(round_ + 1)
            fields = dkv_fields(len(heads), self.spec.shape, self.spec.grad_dtype)
            made = self.buffer(
                f"made {round_}", Home.STAGING, self.seen, fields, "made", round_,
                min(2, len(self.rounds)),
            )  # fmt: skip
            side, dq = (Ref(name, heads=self.queries(heads)) for name in ("side", "dq"))
            keys = Ref(f"seen {round_}")
            self.emit(AttendBackward((side,), keys, self.spec.mask, dq, made))
            self.repeat(round_ + 1)
            self.sum_up(round_ - 1)
            self.leave(round_, made)
        self.sum_up(len(self.rounds) - 1)

    def leave(self, round_: int, made: Ref) -> None:
        """Let a round's gradients of keys go to the ranks that hold them."""
        fields, mine = self.share_fields(round_), self.spec.cp_rank
        slot = self.buffer(
            f"shares {round_}", Home.SLOT, self.rows, fields, Cargo.GRAD, round_, self.grad_slots
        )
        self.emit(SumRepeats(made, slot, Stream.SIDE))
        came = self.buffer(f"came {round_}", Home.STAGING, self.rows, fields, "shares")
        gives = [Give(peer, self.block(slot, peer)) for peer in self.others]
        takes = [Take(p, self.block(slot, mine), self.block(came, p)) for p in self.others]
        self.exchange(Cargo.GRAD, slot, gives, takes)

    def sum_up(self, round_: int) -> None:
        """Sum what has come of a round, and the own share."""
        if round_ < 0:
            return
        own = self.block(Ref(f"shares {round_}"), self.spec.cp_rank)
        came = (self.block(Ref(f"came {round_}"), peer) for peer in self.others)
        sums = [(Span(0, self.tokens), (own, *came))]
        add_up(self, Ref("dkv", heads=self.rounds[round_]), sums, True, Stream.SIDE)
