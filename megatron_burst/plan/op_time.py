"""How long each operation of a program keeps the GPU."""

from collections.abc import Callable, Iterable, Sequence

from megatron_burst.plan.kernel_time import Timer
from megatron_burst.schedule.call import AttentionShape
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.program import (
    Add,
    Attend,
    AttendBackward,
    Copy,
    Delta,
    Fill,
    FromRanks,
    Merge,
    Op,
    Program,
    Ref,
    StandIn,
    ToRanks,
)

Bytes = dict[str, int]  # by field


class OpTimer:
    """Times the operations of a program; what has been timed is not timed again.

    Args:
        program: whose operations.
        timer: of kernels.
    """

    def __init__(self, program: Program, timer: Timer) -> None:
        self._program, self._timer = program, timer
        self._tiles: dict[tuple, float] = {}
        self._bytes: dict[Ref, Bytes] = {}

    def seconds(self, op: Op) -> float:
        """Of an operation that is no transfer, with the GPU to itself."""
        if isinstance(op, Attend):
            return self._tile(op.q, op.kv, op.mask)
        if isinstance(op, AttendBackward):
            queries = next(side for side in op.sides if "q" in self._fields(side))
            return self._tile(queries, op.kv, op.mask)
        return self._timer.memory(_MOVED[type(op)](self._fields, op))

    def _tile(self, q: Ref, kv: Ref, mask: Mask) -> float:
        key = self._rows(q), self._rows(kv), mask, self._heads(q, "q"), self._heads(kv, "k")
        if key not in self._tiles:
            self._tiles[key] = self._timer.tile(
                Tile(Span(0, key[0]), Span(0, key[1]), mask), self._shape(q, kv),
                self._program.direction,
            )  # fmt: skip
        return self._tiles[key]

    def _shape(self, q: Ref, kv: Ref) -> AttentionShape:
        """Of the call of a kernel."""
        fields = {f.name: f for ref in (q, kv) for f in self._program.buffers[ref.buffer].fields}
        return AttentionShape(
            self._program.batch, self._rows(q), self._heads(q, "q"), self._heads(kv, "k"),
            fields["q"].dim, fields["v"].dim, *self._program.widths.values(),
        )  # fmt: skip

    def _rows(self, ref: Ref) -> int:
        rows = ref.rows
        return self._program.buffers[ref.buffer].rows if rows is None else len(rows)

    def _heads(self, ref: Ref, name: str) -> int:
        if ref.heads:
            return len(ref.heads)
        fields = self._program.buffers[ref.buffer].fields
        return next(field.heads for field in fields if field.name == name)

    def _fields(self, ref: Ref) -> Bytes:
        """Bytes of each field of a part of a buffer."""
        if ref not in self._bytes:
            rows = self._rows(ref) * self._program.batch
            self._bytes[ref] = {
                field.name: rows * (len(ref.heads) if ref.heads else field.heads)
                * max(field.dim, 1) * self._program.widths[field.dtype]
                for field in self._program.buffers[ref.buffer].fields
            }  # fmt: skip
        return self._bytes[ref]


Fields = Callable[[Ref], Bytes]


def _first_of(fields: Fields, refs: Iterable[Ref]) -> Bytes:
    """Of several fields with one name the first."""
    found: Bytes = {}
    for ref in refs:
        found = fields(ref) | found
    return found


def _sum(names: Iterable[str], every: Sequence[Bytes]) -> int:
    return sum(found[name] for name in names for found in every)


def _copy(fields: Fields, op: Copy | ToRanks) -> int:
    source, target = _first_of(fields, op.sources), fields(op.target)
    return _sum(source.keys() & target.keys(), (source, target))


def _from_ranks(fields: Fields, op: FromRanks) -> int:
    target = _first_of(fields, op.targets)
    return _sum(target, (fields(op.source), target))


def _fill(fields: Fields, op: Fill) -> int:
    return sum(fields(op.target).values())


def _merge(fields: Fields, op: Merge) -> int:
    into = _first_of(fields, op.into)
    return _sum(("out", "lse"), [into, *map(fields, op.parts)])


def _add(fields: Fields, op: Add) -> int:
    every = [fields(op.into), *map(fields, op.parts)]
    return _sum(set.intersection(*map(set, every)), every)


def _delta(fields: Fields, op: Delta) -> int:
    return _sum(("dout", "out"), [fields(op.side)]) + fields(op.into)["delta"]


def _stand_in(fields: Fields, op: StandIn) -> int:
    return _sum(("dout", "delta"), [_first_of(fields, op.sides)]) + fields(op.into)["out"]


_MOVED: dict[type, Callable] = {  # bytes that are read and written
    Copy: _copy, ToRanks: _copy, FromRanks: _from_ranks, Fill: _fill, Merge: _merge, Add: _add,
    Delta: _delta, StandIn: _stand_in,
}  # fmt: skip
