"""Checks what programs compute: every query meets each of its keys once.

Instead of numbers, memory holds the cells of `kernels`, one for each row and head. Programs
are the same for all lengths, so a few rows per rank are enough.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from megatron_burst.schedule.layout import (
    Chunks,
    Layout,
    positions,
    positions_in_documents,
    positions_of_chunks,
)
from megatron_burst.schedule.mask import Mask, Span
from megatron_burst.schedule.program import Program, Recv, Ref, Send, Space
from megatron_burst.schedule.spec import Direction
from tests.proof.kernels import APPLY, Cell, Rows, WrongError, bits, written
from tests.proof.links import Links


class Values:
    """The memory of all ranks.

    Attributes:
        faults: found in what ran.
    """

    def __init__(self, layout: Layout, mask: Mask, boundaries: Sequence[int] = ()) -> None:
        self.layout, self.mask, self.boundaries = layout, mask, boundaries
        self.faults: list[str] = []
        self.memory: dict[tuple, tuple[tuple, dict[str, Rows]]] = {}  # by rank and storage
        self.turn = 0

    # --- a pass ---

    def begin(self, programs: Sequence[Program], links: Links) -> None:
        """Set the inputs of a pass."""
        self.programs, self.sources, self.turn = programs, links.sources, self.turn + 1
        self.given: dict[tuple, tuple] = {}
        if programs[0].direction is Direction.FORWARD:
            self.memory.clear()
        self.taken: set[tuple[int, int]] = set()
        self.left = sum(len(program.ops) for program in programs)
        first = programs[0]
        own = "side" if first.direction is Direction.BACKWARD else "q"
        side, kv = first.buffers[own], first.buffers.get("kv") or first.buffers["dkv"]
        self.heads, self.heads_kv = side.fields[0].heads, kv.fields[0].heads
        size = first.topology.cp_size
        self.positions = [
            {of: [place for span in self.held(rank, size, buffer.rows) for place in span]
             for of, buffer in (("queries", side), ("keys", kv))}
            for rank in range(size)
        ]  # fmt: skip
        self.group, self.queries = self.heads // self.heads_kv, size * side.rows
        self.size = size * kv.rows
        for program in programs:
            for name in {own, "kv"} & program.buffers.keys():
                self._lay_in(program, name)

    def positions_of(self, program: Program, name: str) -> list[int]:
        """Positions of the rows of a buffer of the call."""
        return self.positions[program.cp_rank]["keys" if name in ("kv", "dkv") else "queries"]

    def held(self, rank: int, size: int, rows: int) -> tuple[range, ...]:
        """Positions of a rank's rows."""
        if self.layout is not Layout.DOCUMENTS:
            return positions(self.layout, rank, size, rows)
        return positions_in_documents((0, *self.boundaries, size * rows), rank, size)

    def edges(self) -> Iterator[tuple[int, int]]:
        """Where each document begins and ends."""
        return pairwise((0, *self.boundaries, self.size))

    def places(self, numbers: Chunks, size: int, edges: Sequence[int] = ()) -> list[int]:
        """Positions of some chunks of every document, or of the document between `edges`."""
        spans = positions_of_chunks(edges or (0, *self.boundaries, self.size), numbers, size)
        return [place for span in spans for place in span]

    def _lay_in(self, program: Program, name: str) -> None:
        """Set what the caller passes: without q and lse if backward reads what forward saved."""
        recalled = {"q", "lse"} if name == "side" and "kv" not in program.buffers else set()
        self.memory[program.cp_rank, *self.storage(program, name)] = (name, self.turn), {
            field.name: [
                [None if field.name in recalled else self.whole(field.name, place, head)
                 for head in range(field.heads)]
                for place in self.positions_of(program, name)
            ]
            for field in program.buffers[name].fields
        }  # fmt: skip

    def whole(self, field: str, position: int, head: int) -> Cell:
        """The cell that is correct, with everything summed into it."""
        if field in ("out", "lse"):  # with the sink as one more key
            return Cell(field, position, head, self.visible(position) | 1 << self.size)
        if field == "dq":
            return Cell(field, position, head, self.visible(position))
        if field in ("dk", "dv"):
            queries = (q for q in range(self.queries) if self.visible(q) >> position & 1)
            return Cell(field, position, head, sum(self.of_query(q) for q in queries))
        return Cell(field, position, head)

    def visible(self, position: int) -> int:
        """The keys that a query may see."""
        start, stop = self.document(position) if self.mask.documents else (0, self.size)
        if self.mask.left is not None:
            start = max(start, position - self.mask.left)
        if self.mask.right is not None:
            stop = min(stop, position + self.mask.right + 1)
        return (1 << stop) - (1 << start)

    def of_query(self, position: int) -> int:
        """The bits of a position's query heads in key gradients."""
        return ((1 << self.group) - 1) << position * self.group

    def document(self, position: int) -> tuple[int, int]:
        """Where the document of a position begins and ends."""
        index = bisect_right(self.boundaries, position)
        edges = (0, *self.boundaries, self.size)
        return edges[index], edges[index + 1]

    def _end(self) -> None:
        """Compare the results of the pass with the correct ones."""
        for program in self.programs:
            names = ("dq", "dkv") if program.direction is Direction.BACKWARD else ("out",)
            for name in names:
                for field in program.buffers[name].fields if name in program.buffers else ():
                    self._compare(program, name, field.name)
                if name not in program.buffers:
                    self.faults.append(f"rank {program.cp_rank}: nothing writes {name}")

    def _compare(self, program: Program, name: str, field: str) -> None:
        rank, places = program.cp_rank, self.positions_of(program, name)
        for row, cells in enumerate(self.read(program, Ref(name))[field]):
            for head, cell in enumerate(cells):
                wanted = self.whole(field, places[row], head)
                if cell != wanted:
                    self.faults.append(f"rank {rank} {program.direction}: {field} row {row} head "
                                       f"{head} is {_told(cell)}, not {_told(wanted)}")  # fmt: skip
                    return

    # --- memory ---

    def storage(self, program: Program, name: str) -> tuple:
        buffer = program.buffers[name]
        passing = buffer.space in (Space.CALL, Space.TEMP)
        return (name, self.turn) if passing else buffer.storage

    def fields(self, program: Program, name: str, writes: bool) -> dict[str, Rows]:
        """A buffer's cells; empty if another buffer was written to its memory since."""
        key, buffer = (program.cp_rank, *self.storage(program, name)), program.buffers[name]
        owner, found = self.memory.get(key, (None, {}))
        mine = name, 0 if buffer.space is Space.SAVED else self.turn
        if owner != mine:
            found = {f.name: [[None] * f.heads for _ in range(buffer.rows)] for f in buffer.fields}
            if writes:
                self.memory[key] = mine, found
        return found

    def read(self, program: Program, ref: Ref) -> dict[str, Rows]:
        every = slice(None)
        rows, heads = (span.slice if span else every for span in (ref.rows, ref.heads))
        found = self.fields(program, ref.buffer, writes=False)
        if ref.rows and ref.rows.stop > program.buffers[ref.buffer].rows:
            raise WrongError(f"{ref} is longer than its buffer")
        return {name: [row[heads] for row in cells[rows]] for name, cells in found.items()}

    def write(self, program: Program, ref: Ref, name: str, made: Rows) -> None:
        buffer = program.buffers[ref.buffer]
        rows = ref.rows or Span(0, buffer.rows)
        cells = self.fields(program, ref.buffer, writes=True)[name]
        heads = ref.heads or Span(0, len(cells[0]))
        if (len(made), len(made[0])) != (len(rows), len(heads)) or rows.stop > buffer.rows:
            raise WrongError(f"{len(made)} rows of {len(made[0])} heads do not fit {ref}")
        for row, new in zip(cells[rows.slice], made, strict=True):
            row[heads.slice] = new

    def names(self, program: Program, ref: Ref) -> tuple[str, ...]:
        """The fields of a buffer."""
        return tuple(field.name for field in program.buffers[ref.buffer].fields)

    def first_of(self, program: Program, refs: Sequence[Ref]) -> dict[str, Rows]:
        """Fields by name; the first of each name."""
        found: dict[str, Rows] = {}
        for ref in refs:
            found = self.read(program, ref) | found
        return found

    # --- what runs ---

    def compute(self, rank: int, index: int) -> None:
        """Run a local operation."""
        program = self.programs[rank]
        op = program.ops[index]
        self._guarded(rank, index, lambda: APPLY[type(op)](self, program, op))
        self._one_less()

    def give(self, rank: int, index: int) -> None:
        """Launch a transfer: what it sends is read now."""
        program = self.programs[rank]
        op = program.ops[index]
        for number, give in enumerate(op.sends):
            self._guarded(rank, index, lambda n=number, g=give: self._lay(program, index, n, g))

    def _lay(self, program: Program, index: int, number: int, give: Send) -> None:
        found = self.read(program, give.rows)
        self.given[program.cp_rank, index, number] = (give.peer, found)
        for name, cells in found.items():
            written(name, cells, f"{give.rows}, given to rank {give.peer},")

    def take(self, rank: int, index: int) -> None:
        """Complete a transfer."""
        if (rank, index) in self.taken:
            return
        self.taken.add((rank, index))
        program = self.programs[rank]
        for (peer, other), take in self.sources[rank, index]:
            theirs = self._sent(peer, other, rank, take)
            self._guarded(rank, index, lambda t=take, f=theirs: self._land(program, t.rows, f))
        self._one_less()

    def _land(self, program: Program, rows: Ref, fields: Mapping[str, Rows]) -> None:
        for name, cells in fields.items():
            self.write(program, rows, name, cells)

    def _sent(self, peer: int, other: int, rank: int, take: Recv) -> dict[str, Rows]:
        """What the peer sent, as of the start of the transfer."""
        gives = self.programs[peer].ops[other].sends
        for number, give in enumerate(gives):
            if give.peer == rank and give.rows == take.remote_rows:
                return self.given.get((peer, other, number), (rank, {}))[1]
        return {}

    def _one_less(self) -> None:
        self.left -= 1
        if not self.left:
            self._end()

    def _guarded(self, rank: int, index: int, act: Callable[[], None]) -> None:
        try:
            act()
        except WrongError as wrong:
            program = self.programs[rank]
            kind = type(program.ops[index]).__name__
            self.faults.append(f"rank {rank} {program.direction} {index} {kind}: {wrong}")


def _told(cell: Cell | None) -> str:
    if cell is None:
        return "not written"
    return f"{cell.field} of position {cell.position} head {cell.head} with {bits(cell.of)}"
