"""What follows from the order of a program's operations: waits, shared memory, lifetimes.

Two operations conflict if they access the same memory and one of the two writes it. An operation
waits for the earlier operations that it conflicts with, unless its stream knows them as finished:

    finished(stream) |= finished when operation i was      for each wait for operation i
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.node_shards import union
from megatron_burst.schedule.program import Buffer, Op, Program, Ref, Space, Stream, Transfer


@dataclass(frozen=True, slots=True)
class Order:
    """Which operations wait for which."""

    # for each operation, earlier ones on other streams that must finish before it starts
    waits: tuple[tuple[int, ...], ...]
    joins: tuple[int, ...]  # operations that the compute stream waits for at the end
    # for each operation, temps that nothing needs once it is issued
    frees: tuple[tuple[str, ...], ...]


def stream_of(index: int, op: Op) -> Hashable:
    """An operation's stream. Each transfer has a stream, as transfers may overtake each other."""
    return index if isinstance(op, Transfer) else op.stream


def assign_buffers(program: Program) -> Program:
    """The program with ring buffers numbered. Buffers of the same number share memory, so their
    lifetimes do not overlap.

    What a transfer sends lives until what it receives is read. Using its memory earlier would make
    another operation wait for the transfer.
    """
    ends = _ends(program)
    free: dict[str, list[int]] = defaultdict(list)
    count: dict[str, int] = defaultdict(int)
    numbered: dict[str, Buffer] = {}
    ending: dict[int, list[Buffer]] = defaultdict(list)
    for index, accesses in enumerate(program.accesses):
        names = dict.fromkeys(ref.buffer for refs in accesses for ref in refs)
        for buffer in ending[index]:
            if buffer.name not in names:
                free[buffer.use].append(buffer.number)
        for name in names:
            if name in ends and name not in numbered:
                buffer = program.buffers[name]
                if not free[buffer.use]:
                    free[buffer.use].append(count[buffer.use])
                    count[buffer.use] += 1
                number = min(free[buffer.use])
                free[buffer.use].remove(number)
                numbered[name] = replace(buffer, number=number)
                ending[ends[name]].append(numbered[name])
        for buffer in ending[index]:
            if buffer.name in names:
                free[buffer.use].append(buffer.number)
    return replace(program, buffers={**program.buffers, **numbered})


def _ends(program: Program) -> dict[str, int]:
    """For each ring buffer, the operation after which its memory may be used again."""
    accesses: dict[str, list[int]] = defaultdict(list)
    for index, (reads, writes) in enumerate(program.accesses):
        for ref in (*reads, *writes):
            if program.buffers[ref.buffer].space is Space.POOL:
                accesses[ref.buffer].append(index)
    ends = {name: indices[-1] for name, indices in accesses.items()}
    for index, op in enumerate(program.ops):
        if isinstance(op, Transfer) and op.slot is None:
            read = max((_first_behind(index, accesses[ref.buffer]) for ref in op.writes),
                       default=index)  # fmt: skip
            for ref in op.reads:
                if ref.buffer in ends:
                    ends[ref.buffer] = max(ends[ref.buffer], read)
    return ends


def _first_behind(index: int, accesses: Sequence[int]) -> int:
    """The first access after an operation; if there is none, the operation itself."""
    position = bisect_right(accesses, index)
    return accesses[position] if position < len(accesses) else index


def order(program: Program) -> Order:
    """The waits with which a program computes what it would if its operations ran one by one."""
    builder = _Builder(program)
    for index, op in enumerate(program.ops):
        builder.add(index, op)
    return Order(tuple(builder.waits), builder.joins(), tuple(map(tuple, builder.frees)))


class _Builder:
    """Derives the order of one program, then is discarded.

    A bit set holds the operations that a stream knows to have finished. Waiting for an operation
    adds those that its stream knew when it finished.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.waits, self.frees = program, [], [[] for _ in program.ops]
        self.written = {ref.buffer for _, writes in program.accesses for ref in writes}
        self.history: dict[tuple, list[tuple[int, Ref, bool]]] = defaultdict(list)
        self.finished: dict[Hashable, int] = dict.fromkeys(Stream, 0)  # as each stream knows
        self.after: list[int] = []  # what is known to have finished once an operation has
        self.uses: dict[str, int] = defaultdict(int)  # of live temps
        self.storage = {name: buffer.storage for name, buffer in program.buffers.items()}
        # a temp that nothing reads is a result: it is not freed
        accesses = enumerate(program.accesses)
        last = {ref.buffer: index for index, (reads, _) in accesses for ref in reads}
        self.last = {n: i for n, i in last.items() if program.buffers[n].space is Space.TEMP}

    def add(self, index: int, op: Op) -> None:
        stream = stream_of(index, op)
        finished, waits = self.finished.get(stream, 0), []
        reads, writes = ([ref for ref in _widest(refs) if ref.buffer in self.written]
                         for refs in self.program.accesses[index])  # fmt: skip
        for earlier in sorted(self._conflicts(reads, writes), reverse=True):
            if not finished >> earlier & 1:
                waits.append(earlier)
                finished |= self.after[earlier]
        finished |= 1 << index
        self.waits.append(tuple(sorted(waits)))
        # waiting for a transfer that sends and receives nothing orders nothing. This holds for
        # pulls too: if a rank lacks symmetric memory, their rows are sent instead
        empty = isinstance(op, Transfer) and not (op.sends or op.recvs)
        self.after.append(1 << index if empty else finished)
        if stream in self.finished:
            self.finished[stream] = finished
        self._remember(index, reads, writes)
        if stream is Stream.COMPUTE:
            self._free(index)

    def _conflicts(self, reads: list[Ref], writes: list[Ref]) -> set[int]:
        """Earlier operations that access the same memory, if one of the two accesses writes."""
        conflicts = set()
        for refs, writing in ((reads, False), (writes, True)):
            for ref in refs:
                for index, earlier, wrote in self.history[self.storage[ref.buffer]]:
                    if (writing or wrote) and index not in conflicts and overlap(ref, earlier):
                        conflicts.add(index)
        return conflicts

    def _remember(self, index: int, reads: list[Ref], writes: list[Ref]) -> None:
        for ref in reads:
            self._entries(ref.buffer).append((index, ref, False))
        # whatever conflicts with an access inside this write also conflicts with this write
        for ref in writes:
            entries = self._entries(ref.buffer)
            entries[:] = [entry for entry in entries if not _covers(ref, entry[1])]
            entries.append((index, ref, True))
        for ref in (*reads, *writes):
            if ref.buffer in self.last:
                self.uses[ref.buffer] |= 1 << index

    def _entries(self, name: str) -> list[tuple[int, Ref, bool]]:
        """The accesses to a buffer's memory that may still matter. The first use of a buffer waits
        for all writers of the buffer that had the memory before. These writers had waited for all
        earlier accesses, which are dropped."""
        entries = self.history[self.storage[name]]
        if entries and entries[-1][1].buffer != name:
            before = entries[-1][1].buffer
            if entries[0][1].buffer != before and any(
                wrote for _, ref, wrote in entries if ref.buffer == before
            ):
                entries[:] = [entry for entry in entries if entry[1].buffer == before]
        return entries

    def _free(self, index: int) -> None:
        """Free temps once the compute stream, which owns them, knows all uses to be finished."""
        finished = self.finished[Stream.COMPUTE]
        for name, uses in list(self.uses.items()):
            if self.last[name] <= index and not uses & ~finished:
                self.frees[index].append(name)
                del self.uses[name]

    def joins(self) -> tuple[int, ...]:
        """What the compute stream must wait for to know that every operation has finished."""
        finished, waits = self.finished[Stream.COMPUTE], []
        for index in reversed(range(len(self.program.ops))):
            if not finished >> index & 1:
                waits.append(index)
                finished |= self.after[index]
        return tuple(sorted(waits))


def _widest(refs: Sequence[Ref]) -> Sequence[Ref]:
    """The same accesses in fewer refs: adjacent rows merged, a whole buffer instead of parts."""
    if len(refs) < 2:
        return refs
    groups: dict[tuple, list[Span | None]] = defaultdict(list)
    for ref in refs:
        groups[ref.buffer, ref.heads].append(ref.rows)
    widest = []
    for (buffer, heads), spans in groups.items():
        merged = [None] if None in spans else union(spans)
        widest += [Ref(buffer, rows, heads) for rows in merged]
    return widest


def overlap(a: Ref, b: Ref) -> bool:
    """Whether two accesses to the same memory overlap. Different buffers always do."""
    if a.buffer != b.buffer:
        return True
    return _intersect(a.rows, b.rows) and _intersect(a.heads, b.heads)


def _intersect(a: Span | None, b: Span | None) -> bool:
    return a is None or b is None or (a.start < b.stop and b.start < a.stop)


def _covers(a: Ref, b: Ref) -> bool:
    """Whether the first access covers the second, to the same memory."""
    if a.buffer != b.buffer:
        return a.rows is None and a.heads is None
    return all(
        outer is None or (inner is not None and outer.contains(inner))
        for outer, inner in ((a.rows, b.rows), (a.heads, b.heads))
    )
