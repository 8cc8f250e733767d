"""How long kernels and the operations of a program take on given hardware."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from megatron_burst.rules import BLOCK, busy_share, thread_blocks
from megatron_burst.schedule import program as ops
from megatron_burst.schedule.layout import ChunkSegments
from megatron_burst.schedule.mask import Span, Tile
from megatron_burst.schedule.program import Op, Program, Ref, Space
from megatron_burst.schedule.spec import AttentionShape, Direction
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.simulate.sample import Sample, slowest_share, typical_share

_BACKWARD_KERNELS = 3  # rowsum(dO O) and zeroed sums; the products; sums in the inputs' dtype
# Cost per query of packed documents beyond the keys that it sees, in keys: kernels start over with
# each document. With documents of 2K, FlashAttention-4 alone on H200 has 0.76 of its speed forward
# and 0.79 in both passes (packed_2xh200_one_node.csv): 270 to 320 keys. Chunks of documents are
# fitted to the gathers there, whose backward is slower by more than their transfers.
_BEGIN = 300
_BEGIN_OF_CHUNK = {Direction.FORWARD: 350, Direction.BACKWARD: 575}


@dataclass(frozen=True, slots=True)
class Timer:
    """Times kernels."""

    hardware: Hardware
    backend: str = "auto"  # of attention; "auto": the first one that the hardware lists
    pass_tflop: float = inf  # TFLOP computed without a pause; training has no pauses
    sample: Sample | None = None  # the documents; None: one
    tokens: int | None = None  # of the whole sequence; None: those of the program's ranks
    slow_chunks: bool = True  # whether chunks of documents cost more: measured for FlashAttention-4

    def tile(
        self, tile: Tile, shape: AttentionShape, direction: Direction, share: float = 1.0,
        in_chunks: bool = False,
    ) -> float:  # fmt: skip
        """Seconds of a tile of a call with these heads, if a share of its pairs is computed;
        `in_chunks`: whether ranks have chunks of each document.

        A pair costs two products forward and five backward. A GPU with fewer blocks than
        multiprocessors is partly idle, and so it is in the last wave of blocks that are alike;
        causal kernels begin with their longest blocks, which evens out the end.
        """
        rows = len(tile.q) if direction is Direction.FORWARD else len(tile.kv)
        pairs = share * self.pairs(tile)
        if self.sample:
            slow = in_chunks and self.slow_chunks
            pairs += (_BEGIN_OF_CHUNK[direction] if slow else _BEGIN) * len(tile.q)
        return self._kernel(pairs, rows, tile.mask.causal, shape, direction)

    def pairs(self, tile: Tile) -> float:
        """(query, key) pairs that a tile computes."""
        return self.sample.pairs(tile) if self.sample else tile.pairs

    def window(self, keys: float, shape: AttentionShape, direction: Direction) -> float:
        """Seconds of sliding-window attention of a call's queries.

        Kernels skip keys that no query of a block sees, and compute the blocks at both ends of a
        window whole: one block more than the `keys` that a query sees on average.
        """
        return self._kernel(shape.tokens * (keys + BLOCK), shape.tokens, False, shape, direction)

    def _kernel(
        self, pairs: float, rows: int, causal: bool, shape: AttentionShape, direction: Direction
    ) -> float:
        forward = direction is Direction.FORWARD
        dims = shape.dim_qk + shape.dim_v if forward else 3 * shape.dim_qk + 2 * shape.dim_v
        flops = 2 * pairs * shape.batch * shape.heads_q * dims
        blocks = thread_blocks(rows) * shape.batch * shape.heads_q
        units = self.hardware.gpu.multiprocessors
        busy = min(1.0, blocks / units) if causal else busy_share([blocks], units)
        kernel = self.hardware.kernel((shape.dim_qk + shape.dim_v) / 2, self.backend)
        speed = (kernel.forward if forward else kernel.backward).at(self.pass_tflop)
        if not causal:
            speed *= kernel.unmasked_forward if forward else kernel.unmasked_backward
        launches = 1 if forward else _BACKWARD_KERNELS
        return launches * self._launch + flops / (speed * 1e12 * busy)

    def memory(self, num_bytes: float) -> float:
        """Seconds of an element-wise kernel with this much memory traffic."""
        if not num_bytes:
            return 0.0
        return self._launch + num_bytes / (self.hardware.gpu.memory_gbs * 1e9)

    def matmul(self, flops: float) -> float:
        """Seconds of large matrix products."""
        return flops / (self.hardware.gpu.matmul_tflops * 1e12)

    @property
    def _launch(self) -> float:
        return self.hardware.gpu.launch_us * 1e-6


Bytes = dict[str, int]  # by field


class Parts:
    """Sizes of the parts of buffers that a program's operations use, with caching."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._bytes: dict[Ref, Bytes] = {}

    def sides(self, op: ops.Attend | ops.AttendBackward) -> tuple[Ref, Ref]:
        """Queries and keys of a kernel."""
        if isinstance(op, ops.Attend):
            return op.q, op.kv
        return next(side for side in op.sides if "q" in self._fields(side)), op.kv

    def tile_of(self, op: ops.Attend | ops.AttendBackward) -> tuple[Tile, AttentionShape]:
        """The tile of a kernel, and the shape with its heads."""
        q, kv = self.sides(op)
        fields = {f.name: f for r in (q, kv) for f in self._program.buffers[r.buffer].fields}
        rows, keys = self._rows(q), self._rows(kv)
        shape = AttentionShape(
            self._program.batch, rows, self._heads(q, "q"), self._heads(kv, "k"),
            fields["q"].dim, fields["v"].dim, *self._program.widths.values(),
        )  # fmt: skip
        return Tile(Span(0, rows), Span(0, keys), op.mask, op.positions), shape

    def _rows(self, ref: Ref) -> int:
        rows = ref.rows
        return self._program.buffers[ref.buffer].rows if rows is None else len(rows)

    def _heads(self, ref: Ref, name: str) -> int:
        if ref.heads:
            return len(ref.heads)
        fields = self._program.buffers[ref.buffer].fields
        return next(field.heads for field in fields if field.name == name)

    def _fields(self, ref: Ref) -> Bytes:
        """Bytes of each field in part of a buffer."""
        if ref not in self._bytes:
            rows = self._rows(ref) * self._program.batch
            self._bytes[ref] = {
                field.name: rows * (len(ref.heads) if ref.heads else field.heads)
                * max(field.dim, 1) * self._program.widths[field.dtype]
                for field in self._program.buffers[ref.buffer].fields
            }  # fmt: skip
        return self._bytes[ref]

    def _first(self, refs: Iterable[Ref]) -> Bytes:
        """Bytes by field; the first of each name."""
        sizes: Bytes = {}
        for ref in refs:
            sizes = self._fields(ref) | sizes
        return sizes

    def _moved(self, op: Op) -> int:
        """Bytes that an operation without products reads and writes."""
        fields = self._fields
        match op:
            case ops.Arrange():
                rows = self._fields(op.target), self._fields(op.source)
                return sum(sum(some.values()) for some in rows)
            case ops.Copy() | ops.ToRanks():
                source, target = self._first(op.sources), fields(op.target)
                return _sum(source.keys() & target.keys(), source, target)
            case ops.FromRanks():
                target = self._first(op.targets)
                return _sum(target, fields(op.source), target)
            case ops.Fill():
                return sum(fields(op.target).values())
            case ops.Merge():
                return _sum(("out", "lse"), self._first(op.into), *map(fields, op.parts))
            case ops.Add():
                every = [fields(op.into), *map(fields, op.parts)]
                return _sum(set.intersection(*map(set, every)), *every)
            case ops.Delta():
                return _sum(("dout", "out"), fields(op.side)) + fields(op.into)["delta"]
            case ops.SurrogateOut():
                made = fields(op.into)["out"]
                return _sum(("dout", "delta"), self._first(op.sides)) + made
        raise AssertionError(op)


class OpTimer(Parts):
    """Times the operations of a program, with caching."""

    def __init__(self, program: Program, timer: Timer) -> None:
        super().__init__(program)
        self._timer = timer
        self._tiles: dict[tuple, float] = {}

    def seconds(self, op: Op) -> float:
        """Seconds of an operation other than a transfer, with the GPU to itself."""
        if isinstance(op, ops.Attend | ops.AttendBackward):
            return self._tile(op)
        return self._timer.memory(self._moved(op))

    def _tile(self, op: ops.Attend | ops.AttendBackward) -> float:
        q, kv = self.sides(op)
        matter = self._timer.sample or isinstance(op.positions, ChunkSegments)
        heads = self._heads(q, "q"), self._heads(kv, "k")
        key = self._rows(q), self._rows(kv), (op.mask, op.positions if matter else None), heads
        if key not in self._tiles:
            tile, shape = self.tile_of(op)
            # windows are short compared with documents
            usual = op.mask.documents and not (op.mask.windowed or self._timer.sample)
            share = self._share(tile) if usual else 1.0
            chunks = isinstance(tile.positions, ChunkSegments) and len(tile.q) < self._all_rows
            self._tiles[key] = self._timer.tile(tile, shape, self._program.direction, share, chunks)
        return self._tiles[key]

    @property
    def _all_rows(self) -> int:
        """Of all ranks."""
        own = next(
            buffer.rows for buffer in self._program.buffers.values() if buffer.space is Space.CALL
        )
        return self._program.topology.cp_size * own

    def _share(self, tile: Tile) -> float:
        """Share of a tile's pairs in typical documents. All ranks have equal work if each has
        chunks of every document, or all rows; else each is assumed to be the slowest."""
        size, every = self._program.topology.cp_size, self._all_rows
        even = isinstance(tile.positions, ChunkSegments) or len(tile.q) == every
        own, tokens = every // size, self._timer.tokens or every
        return typical_share(tokens) * (1.0 if even else slowest_share(tokens // own))


def _sum(names: Iterable[str], *every: Bytes) -> int:
    return sum(sizes[name] for name in names for sizes in every)
