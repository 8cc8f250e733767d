"""What all modes share: buffers of the call, transfers, and results of several tiles.

out of a row = merge of (out, lse) over the row's tiles; dq of a row = sum of dq over these tiles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_burst.schedule import program as ops
from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.mask import Span, Tile, has_sole_rows, split_at_edges
from megatron_burst.schedule.order import assign_buffers
from megatron_burst.schedule.program import Field, Program, Ref, Space, Stream
from megatron_burst.schedule.spec import Cargo, Dtype, Spec, power_below, pulled_count
from megatron_burst.schedule.topology import Link


@dataclass
class Emitter:
    """Builds one program, then is discarded."""

    spec: Spec
    operations: list[ops.Op] = field(default_factory=list)
    buffers: dict[str, ops.Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, result = self.spec.shape, self.result_dtype
        rows, heads, heads_kv = shape.tokens, shape.heads_q, shape.heads_kv
        if self.spec.backward:
            self.buffer("side", Space.CALL, rows, self.fields("q dout out lse", heads))
            self.buffer("dq", Space.CALL, rows, self.fields("dq", heads, result))
            self.buffer("dkv", Space.CALL, shape.keys, self.fields("dk dv", heads_kv, result))
        else:
            self.buffer("q", Space.CALL, rows, self.fields("q", heads))
            self.buffer("out", Space.CALL, rows, self.fields("out lse", heads, result))
        self.buffer("kv", Space.CALL, shape.keys, self.fields("k v", heads_kv))

    @property
    def result_dtype(self) -> Dtype:
        """Dtype in which the program writes out, dq, dk and dv: the input's, because each row is
        written once. Rings, which sum in place, have a wider one."""
        return Dtype.INPUT

    def buffer(
        self, name: str, space: Space, rows: int, fields: Sequence[Field], use: str = "",
        number: int = 0, count: int = 1, interleaved: bool = False,
    ) -> Ref:  # fmt: skip
        """Declare a buffer; returns a ref to all of it."""
        interleaved |= space in (Space.SLOT, Space.STAGING)
        self.buffers[name] = ops.Buffer(
            name, space, rows, tuple(fields), use, number, count, interleaved
        )
        return Ref(name)

    def fields(self, names: str, heads: int, dtype: Dtype = Dtype.INPUT) -> tuple[Field, ...]:
        """Fields of these names. lse and delta are one number per row, in the dtype of sums."""
        dims = dict.fromkeys("q k dq dk".split(), self.spec.shape.dim_qk)
        dims |= dict.fromkeys("v out dv dout".split(), self.spec.shape.dim_v)
        return tuple(
            Field(name, heads, dims[name], dtype) if name in dims
            else Field(name, heads, 0, Dtype.SUM)
            for name in names.split()
        )  # fmt: skip

    def circulating_side(self, heads: int) -> tuple[Field, ...]:
        """Fields of a query side that is sent to other ranks: delta replaces the output."""
        return self.fields("lse delta q dout", heads)

    def emit(self, *operations: ops.Op) -> None:
        self.operations += operations

    def program(self) -> Program:
        spec, widths = self.spec, ops.widths_of(self.spec.shape)
        used = {ref.buffer for op in self.operations for ref in (*op.reads, *op.writes)}
        buffers = {name: buffer for name, buffer in self.buffers.items() if name in used}
        rank, batch = (spec.topology, spec.cp_rank, spec.direction), spec.shape.batch
        return assign_buffers(Program(*rank, batch, widths, buffers, tuple(self.operations)))

    def slot_count(self, cargo: Cargo, transfers: int, rows: int, fields: Sequence[Field]) -> int:
        """How many slots of so many rows the transfers of a pass take in turns."""
        if not self.spec.pulled:
            return min(2, transfers)  # that may be in flight
        shape, widths = self.spec.shape, ops.widths_of(self.spec.shape)
        width = sum(field.elements * widths[field.dtype] for field in fields)
        # for the largest power of two of tokens: lengths up to the next power have equal programs
        tokens = power_below(shape.tokens) * self.spec.unit_rows
        num_bytes = rows * tokens / shape.tokens * shape.batch * width
        return pulled_count(cargo, transfers, num_bytes, tokens)

    def exchange(
        self, cargo: Cargo, slot: Ref, sends: Sequence[ops.Send], recvs: Sequence[ops.Recv]
    ) -> None:
        """A transfer between the ranks of a node, whose pulls begin at different ranks."""
        peers, pulled = self.spec.topology.row_peers(self.spec.cp_rank), bool(self.spec.pulled)
        if peers and (sends or recvs or pulled):
            recvs = sorted(recvs, key=lambda recv: peers.index(recv.peer))
            self.emit(ops.Transfer(Link.INTRA, cargo, tuple(sends), tuple(recvs), slot, pulled))

    def hop(
        self, link: Link, cargo: Cargo, source: Ref, target: Ref,
        needed_by: Sequence[NeededBy | None], by: int = 1,
    ) -> None:  # fmt: skip
        """Send to the rank `by` places on in the row, or column; the rank as far behind sends its
        buffer of the same name. Buffers without rows are not sent. `needed_by`: of source, target.
        """
        down, right = (by, 0) if link is Link.INTER else (0, by)
        topology = self.spec.topology
        row, column = topology.coord(self.spec.cp_rank)
        send = ops.Send(topology.rank_at(row + down, column + right), source, needed_by[0])
        recv = ops.Recv(topology.rank_at(row - down, column - right), source, target, needed_by[1])
        sends = (send,) if self.buffers[source.buffer].rows else ()
        recvs = (recv,) if self.buffers[target.buffer].rows else ()
        if sends or recvs:
            self.emit(ops.Transfer(link, cargo, sends, recvs))

    def temp(self, name: str, rows: int, fields: Sequence[Field]) -> Ref:
        """Declare an output of a kernel."""
        return self.buffer(name, Space.TEMP, rows, fields)

    def q_heads(self, heads: Span) -> Span:
        """The query heads of these KV heads."""
        return Span(heads.start * self.spec.q_heads_per_kv, heads.stop * self.spec.q_heads_per_kv)

    def delta(self) -> Ref:
        """Delta of the rank's own query side."""
        shape = self.spec.shape
        delta = self.temp("delta", shape.tokens, self.fields("delta", shape.heads_q))
        self.emit(ops.Delta(Ref("side"), delta))
        return delta

    def side_for_kernel(self, *sides: Ref) -> tuple[Ref, ...]:
        """A query side with delta, and a surrogate output with it if the kernel needs one."""
        if self.spec.kernel.takes_delta:
            return sides
        name, rows = f"surrogate out of {sides[0].buffer}", self.buffers[sides[0].buffer].rows
        fields = (f for side in sides for f in self.buffers[side.buffer].fields)
        heads = next(field.heads for field in fields if field.name == "dout")
        out = self.temp(name, rows, self.fields("out", heads))
        self.emit(ops.SurrogateOut(sides, out))
        return out, *sides


class Sinks:
    """Attention sinks, which join in one tile for each row; `heads`: the query heads of the tiles,
    as the call counts them."""

    def __init__(self, tiles: Iterable[Tile], heads: Iterable[int]) -> None:
        self.heads, self._rows = tuple(heads), list[Span]()
        for rows in sorted((tile.q for tile in tiles), key=len, reverse=True):
            if not any(rows.intersection(span) for span in self._rows):
                self._rows.append(rows)

    def join(self, tile: Tile) -> bool:
        """Whether sinks join in a tile, and not in another tile of its rows."""
        joins = tile.q in self._rows
        if joins:
            self._rows.remove(tile.q)
        return joins


class Outputs:
    """Results of a round's tiles: written in place, or merged at the end of the round."""

    def __init__(
        self, emitter: Emitter, name: str, tiles: Sequence[Tile], sinks: Sinks, q: Ref, out: Ref
    ) -> None:
        self._emitter, self._name, self._tiles, self._sinks = emitter, name, tiles, sinks
        self._q, self._out = q, out
        self._parts: list[tuple[Span, Ref]] = []
        assert q.heads
        self._fields = emitter.fields("out lse", len(q.heads))

    def compute(self, tile: Tile, kv: Ref) -> None:
        """Compute a tile over these keys and values."""
        emitter, out = self._emitter, self._out.at(tile.q)
        if not has_sole_rows(tile, self._tiles):
            out = emitter.temp(f"{self._name} part {len(self._parts)}", len(tile.q), self._fields)
            self._parts.append((tile.q, out))
        q, keys, sinks = self._q.at(tile.q), kv.at(tile.kv), self._sinks
        joins = sinks.join(tile)
        emitter.emit(ops.Attend(q, keys, tile.mask, (out,), tile.positions, sinks.heads, joins))

    def merge(self) -> None:
        """Merge the results of rows with several tiles."""
        spans = split_at_edges((tile.q for tile in self._tiles), self._emitter.spec.shape.tokens)
        for span, parts in sums_of(self._parts, spans):
            if parts:
                self._emitter.emit(ops.Merge(parts, (self._out.at(span),)))


Sum = tuple[Span, tuple[Ref, ...]]  # rows, and the partial results to add there


@dataclass
class Gradients:
    """Gradients of a step's tiles; dq of rows with only one tile is written in place."""

    emitter: Emitter
    name: str
    tiles: Sequence[Tile]
    sides: tuple[Ref, ...]  # the query side, in one or two buffers
    dq: Ref | None  # where dq goes if nothing else is added to it; None if something is
    heads_kv: int  # of the tiles

    def __post_init__(self) -> None:
        self._count = 0
        self._parts: list[tuple[Span, Ref]] = []
        self._written: list[Span] = []
        emitter, spec = self.emitter, self.emitter.spec
        heads_q = self.heads_kv * spec.q_heads_per_kv
        self._dq_fields = emitter.fields("dq", heads_q, spec.grad_dtype)
        self._dkv_fields = emitter.fields("dk dv", self.heads_kv, spec.grad_dtype)

    def compute(self, tile: Tile, kv: Ref, into: Ref | None = None) -> Ref:
        """Compute a tile; returns dk and dv, in a new buffer unless written `into` a buffer."""
        emitter, name = self.emitter, f"{self.name} {self._count}"
        self._count += 1
        if self.dq is not None and has_sole_rows(tile, self.tiles):
            dq = self.dq.at(tile.q)
            self._written.append(tile.q)
        else:
            dq = emitter.temp(f"dq {name}", len(tile.q), self._dq_fields)
            self._parts.append((tile.q, dq))
        dkv = into or emitter.temp(f"dkv {name}", len(tile.kv), self._dkv_fields)
        sides = tuple(side.at(tile.q) for side in self.sides)
        keys = kv.at(tile.kv)
        emitter.emit(ops.AttendBackward(sides, keys, tile.mask, dq, dkv, tile.positions))
        return dkv

    def sums(self) -> list[Sum]:
        """The sums still to do, for all query rows that are not complete."""
        spans = split_at_edges((tile.q for tile in self.tiles), self.emitter.spec.shape.tokens)
        open_spans = [s for s in spans if not any(done.contains(s) for done in self._written)]
        return sums_of(self._parts, open_spans)


def sums_of(parts: Sequence[tuple[Span, Ref]], spans: Iterable[Span]) -> list[Sum]:
    """For each span, the parts to sum there; each part contains the span or does not overlap it."""
    sums = []
    for span in spans:
        containing = ((rows, part) for rows, part in parts if rows.contains(span))
        sums.append((span, tuple(p.at(span.shifted(-rows.start)) for rows, p in containing)))
    return sums


def add_up(
    emitter: Emitter, total: Ref, sums: Sequence[Sum], fresh: bool, stream: Stream = Stream.COMPUTE
) -> None:
    """total += sum of parts; total = sum of parts if the total is fresh."""
    for span, parts in sums:
        rows = total.at(span)
        if parts or fresh:
            emitter.emit(ops.Add(parts if fresh else (rows, *parts), rows, stream))
