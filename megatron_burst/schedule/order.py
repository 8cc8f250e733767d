"""What follows from the order of a program's operations: waits, shared memory, lifetimes."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.node_shards import union
from megatron_burst.schedule.program import Buffer, Op, Program, Ref, Space, Stream, Transfer


@dataclass(frozen=True, slots=True)
class Order:
    """Which operations wait for which.

    Attributes:
        waits: for each operation, earlier ones on other streams that must finish before it starts.
        joins: operations that the compute stream waits for at the end.
        frees: for each operation, parts that nothing needs once it is issued.
    """

    waits: tuple[tuple[int, ...], ...]
    joins: tuple[int, ...]
    frees: tuple[tuple[str, ...], ...]


def stream_of(index: int, op: Op) -> Hashable:
    """An operation's stream. Each transfer has its own, as transfers may overtake each other."""
    return index if isinstance(op, Transfer) else op.stream


def assign_buffers(program: Program) -> Program:
    """The program with hop buffers numbered. Buffers of the same number share memory, so their
    lifetimes do not overlap.

    What a transfer sends is kept until what it receives is needed. Using its memory earlier would
    make another operation wait for the transfer.
    """
    ends = _ends(program)
    free: dict[str, list[int]] = defaultdict(list)
    count: dict[str, int] = defaultdict(int)
    numbered: dict[str, Buffer] = {}
    due: dict[int, list[Buffer]] = defaultdict(list)
    for index, accesses in enumerate(program.accesses):
        names = dict.fromkeys(ref.buffer for refs in accesses for ref in refs)
        for buffer in due.get(index, ()):
            if buffer.name not in names:
                free[buffer.use].append(buffer.number)
        due[index] = [buffer for buffer in due.pop(index, ()) if buffer.name in names]
        for name in names:
            if name in ends and name not in numbered:
                buffer = program.buffers[name]
                if not free[buffer.use]:
                    free[buffer.use].append(count[buffer.use])
                    count[buffer.use] += 1
                number = min(free[buffer.use])
                free[buffer.use].remove(number)
                numbered[name] = replace(buffer, number=number)
                due[ends[name]].append(numbered[name])
        for buffer in due.pop(index, ()):
            free[buffer.use].append(buffer.number)
    return replace(program, buffers={**program.buffers, **numbered})


def _ends(program: Program) -> dict[str, int]:
    """For each hop buffer, the operation after which its memory may be used again."""
    hops = {name for name, buffer in program.buffers.items() if buffer.space is Space.RING}
    accesses: dict[str, list[int]] = defaultdict(list)
    for index, refs in enumerate(program.accesses):
        for some in refs:
            for ref in some:
                if ref.buffer in hops:
                    accesses[ref.buffer].append(index)
    ends = {name: found[-1] for name, found in accesses.items()}
    for index, op in enumerate(program.ops):
        if isinstance(op, Transfer) and op.slot is None:
            landed = max((_first_behind(index, accesses[ref.buffer]) for ref in op.writes),
                         default=index)  # fmt: skip
            for ref in op.reads:
                if ref.buffer in hops:
                    ends[ref.buffer] = max(ends[ref.buffer], landed)
    return ends


def _first_behind(index: int, accesses: Sequence[int]) -> int:
    """The first access after an operation; without one, the operation itself."""
    place = bisect_right(accesses, index)
    return accesses[place] if place < len(accesses) else index


def order(program: Program) -> Order:
    """The waits with which a program computes what it would if its operations ran one by one."""
    builder = _Builder(program)
    for index, op in enumerate(program.ops):
        builder.add(index, op)
    return Order(tuple(builder.waits), builder.joins(), tuple(map(tuple, builder.frees)))


class _Builder:
    """Derives the order of one program, then is discarded.

    Each stream knows that some operations have finished; a bit set holds them. Waiting for an
    operation adds what was known when that operation finished.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.waits, self.frees = program, [], [[] for _ in program.ops]
        self.written = {ref.buffer for _, writes in program.accesses for ref in writes}
        self.history: dict[tuple, list[tuple[int, Ref, bool]]] = defaultdict(list)
        self.known: dict[Hashable, int] = dict.fromkeys(Stream, 0)
        self.after: list[int] = []  # what is known once an operation has finished
        self.uses: dict[str, int] = defaultdict(int)  # of live parts
        self.storage = {name: buffer.storage for name, buffer in program.buffers.items()}
        # a part that nothing reads is a result: it is not freed
        every = enumerate(program.accesses)
        last = {ref.buffer: index for index, (reads, _) in every for ref in reads}
        self.last = {n: i for n, i in last.items() if program.buffers[n].space is Space.TEMP}

    def add(self, index: int, op: Op) -> None:
        stream = stream_of(index, op)
        known, waits = self.known.get(stream, 0), []
        reads, writes = ([ref for ref in _widest(refs) if ref.buffer in self.written]
                         for refs in self.program.accesses[index])  # fmt: skip
        for earlier in sorted(self._conflicts(reads, writes), reverse=True):
            if not known >> earlier & 1:
                waits.append(earlier)
                known |= self.after[earlier]
        known |= 1 << index
        self.waits.append(tuple(sorted(waits)))
        # waiting for a transfer that sends and receives nothing orders nothing. This holds for
        # pulls too: if a rank lacks symmetric memory, their rows are sent instead
        empty = isinstance(op, Transfer) and not (op.sends or op.recvs)
        self.after.append(1 << index if empty else known)
        if stream in self.known:
            self.known[stream] = known
        self._remember(index, reads, writes)
        if stream is Stream.COMPUTE:
            self._free(index)

    def _conflicts(self, reads: list[Ref], writes: list[Ref]) -> set[int]:
        found = set()
        for refs, writing in ((reads, False), (writes, True)):
            for ref in refs:
                for index, other, wrote in self.history[self.storage[ref.buffer]]:
                    if (writing or wrote) and index not in found and overlap(ref, other):
                        found.add(index)
        return found

    def _remember(self, index: int, reads: list[Ref], writes: list[Ref]) -> None:
        for ref in reads:
            self._entries(ref.buffer).append((index, ref, False))
        for (
            ref
        ) in writes:  # what conflicts with an access inside this one also conflicts with this one
            entries = self._entries(ref.buffer)
            entries[:] = [entry for entry in entries if not _covers(ref, entry[1])]
            entries.append((index, ref, True))
        for ref in (*reads, *writes):
            if ref.buffer in self.last:
                self.uses[ref.buffer] |= 1 << index

    def _entries(self, name: str) -> list[tuple[int, Ref, bool]]:
        """The accesses to a buffer's memory that may still matter. The first use of a buffer waits
        for all writers of the buffer that had the memory before. These had waited for everything
        earlier, which is dropped."""
        entries = self.history[self.storage[name]]
        if entries and entries[-1][1].buffer != name:
            before = entries[-1][1].buffer
            if entries[0][1].buffer != before and any(
                wrote for _, ref, wrote in entries if ref.buffer == before
            ):
                entries[:] = [entry for entry in entries if entry[1].buffer == before]
        return entries

    def _free(self, index: int) -> None:
        """Free parts once the compute stream, which owns them, knows all uses to be finished."""
        known = self.known[Stream.COMPUTE]
        for name, uses in list(self.uses.items()):
            if self.last[name] <= index and not uses & ~known:
                self.frees[index].append(name)
                del self.uses[name]

    def joins(self) -> tuple[int, ...]:
        """What the compute stream must wait for to know that every operation has finished."""
        known, found = self.known[Stream.COMPUTE], []
        for index in reversed(range(len(self.program.ops))):
            if not known >> index & 1:
                found.append(index)
                known |= self.after[index]
        return tuple(sorted(found))


def _widest(refs: Sequence[Ref]) -> Sequence[Ref]:
    """The same accesses in fewer refs: adjacent rows are joined, and the whole buffer replaces its
    parts."""
    if len(refs) < 2:
        return refs
    found: dict[tuple, list[Ref]] = {}
    for ref in refs:
        found.setdefault((ref.buffer, ref.heads), []).append(ref)
    return [ref for (_, heads), some in found.items() for ref in _joined(some, heads)]


def _joined(refs: list[Ref], heads: Span | None) -> list[Ref]:
    """The same for one buffer and one range of heads."""
    if len(refs) == 1:
        return refs
    if any(ref.rows is None for ref in refs):
        return [Ref(refs[0].buffer, None, heads)]
    joined = union((ref.rows.start, ref.rows.stop) for ref in refs)
    return [Ref(refs[0].buffer, Span(*rows), heads) for rows in joined]


def overlap(one: Ref, other: Ref) -> bool:
    """Whether two accesses to the same memory overlap. Different buffers always do."""
    if one.buffer != other.buffer:
        return True
    return _touch(one.rows, other.rows) and _touch(one.heads, other.heads)


def _touch(one: Span | None, other: Span | None) -> bool:
    return one is None or other is None or (one.start < other.stop and other.start < one.stop)


def _covers(one: Ref, other: Ref) -> bool:
    if one.buffer != other.buffer:
        return one.rows is None and one.heads is None
    return all(
        mine is None or (theirs is not None and mine.contains(theirs))
        for mine, theirs in ((one.rows, other.rows), (one.heads, other.heads))
    )
