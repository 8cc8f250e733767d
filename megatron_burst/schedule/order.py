"""What follows from the order of a program: memory that buffers share, waits, lifetimes."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

from megatron_burst.plan.mask import Span
from megatron_burst.schedule.program import Buffer, Home, Op, Program, Ref, Stream, Transfer

Clock = dict[Hashable, int]  # by stream, the last of its operations that is known to be over


@dataclass(frozen=True, slots=True)
class Order:
    """Who waits for whom.

    Attributes:
        waits: by operation, earlier ones on other streams that must be over before it starts.
        joins: what the compute stream waits for when all operations are issued.
        frees: by operation, parts that nobody needs once it is issued.
    """

    waits: tuple[tuple[int, ...], ...]
    joins: tuple[int, ...]
    frees: tuple[tuple[str, ...], ...]


def stream_of(index: int, op: Op) -> Hashable:
    """The stream of an operation; transfers, which overtake each other, have one each."""
    return index if isinstance(op, Transfer) else op.stream


def placed(program: Program) -> Program:
    """The program with hop buffers numbered: those whose lifetimes do not overlap share memory.

    What a transfer sends stays until what it brings is needed: sharing it earlier would make
    somebody wait for the transfer.
    """
    ends = _ends(program)
    free: dict[str, list[int]] = defaultdict(list)
    count: dict[str, int] = defaultdict(int)
    numbered: dict[str, Buffer] = {}
    due: dict[int, list[Buffer]] = defaultdict(list)
    for index, op in enumerate(program.ops):
        names = dict.fromkeys(ref.buffer for ref in _refs(op))
        for buffer in due.get(index, ()):
            if buffer.name not in names:
                free[buffer.use].append(buffer.number)
        due[index] = [buffer for buffer in due.pop(index, ()) if buffer.name in names]
        for name in names:
            buffer = program.buffers[name]
            if buffer.home is Home.HOP and name not in numbered:
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
    """The operation after which a buffer's memory may be used for another."""
    accesses: dict[str, list[int]] = defaultdict(list)
    for index, op in enumerate(program.ops):
        for ref in (*op.reads, *op.writes):
            accesses[ref.buffer].append(index)
    ends = {name: found[-1] for name, found in accesses.items()}
    for index, op in enumerate(program.ops):
        if isinstance(op, Transfer):
            needed = (min((i for i in accesses[ref.buffer] if i > index), default=index)
                      for ref in op.writes)  # fmt: skip
            landed = max(needed, default=index)
            for ref in op.reads:
                ends[ref.buffer] = max(ends[ref.buffer], landed)
    return ends


def order(program: Program) -> Order:
    """Who waits for whom, so that the result is that of one operation after the other."""
    builder = _Builder(program)
    for index, op in enumerate(program.ops):
        builder.add(index, op)
    return Order(tuple(builder.waits), builder.joins(), tuple(map(tuple, builder.frees)))


class _Builder:
    """Goes through a program once; thrown away then."""

    def __init__(self, program: Program) -> None:
        self.program, self.waits, self.frees = program, [], [[] for _ in program.ops]
        self.written = {ref.buffer for op in program.ops for ref in op.writes}
        self.history: dict[tuple, list[tuple[int, Ref, bool]]] = defaultdict(list)
        self.known: dict[Hashable, Clock] = {stream: {} for stream in Stream}
        self.after: list[Clock] = []  # what is known once an operation is over
        self.uses: dict[str, list[int]] = defaultdict(list)  # of parts that are alive
        # a part that is never read is a result
        last = {ref.buffer: i for i, op in enumerate(program.ops) for ref in op.reads}
        self.last = {n: i for n, i in last.items() if program.buffers[n].home is Home.PART}

    def add(self, index: int, op: Op) -> None:
        stream = stream_of(index, op)
        clock = self.known[stream] if stream in Stream else {}
        waits = []
        for earlier in sorted(self._conflicts(op), reverse=True):
            other = stream_of(earlier, self.program.ops[earlier])
            if other != stream and clock.get(other, -1) < earlier:
                waits.append(earlier)
                _learn(clock, self.after[earlier])
        clock[stream] = index
        self.waits.append(tuple(sorted(waits)))
        # sent, a transfer of nothing is no wait for what it waits for: a program that pulls may be
        # sent where a rank has no memory that others can read
        empty = isinstance(op, Transfer) and not (op.gives or op.takes)
        self.after.append({stream: index} if empty else dict(clock))
        self._remember(index, op)
        if stream is Stream.COMPUTE:
            self._free(index)

    def _conflicts(self, op: Op) -> set[int]:
        found = set()
        for refs, writes in ((op.reads, False), (op.writes, True)):
            for ref in refs:
                if ref.buffer in self.written:
                    storage = self.program.buffers[ref.buffer].storage
                    found |= {
                        index
                        for index, other, wrote in self.history[storage]
                        if (writes or wrote) and overlap(ref, other)
                    }
        return found

    def _remember(self, index: int, op: Op) -> None:
        for refs, writes in ((op.reads, False), (op.writes, True)):
            for ref in refs:
                if ref.buffer not in self.written:
                    continue
                storage = self.program.buffers[ref.buffer].storage
                if writes:  # whoever conflicts with what it covers conflicts with it
                    self.history[storage] = [
                        entry for entry in self.history[storage] if not _covers(ref, entry[1])
                    ]
                self.history[storage].append((index, ref, writes))
        for name in {ref.buffer for ref in _refs(op)} & self.last.keys():
            self.uses[name].append(index)

    def _free(self, index: int) -> None:
        """Parts are the compute stream's: they may go when it knows that all uses are over."""
        clock = self.known[Stream.COMPUTE]
        for name, uses in list(self.uses.items()):
            known = (clock.get(stream_of(i, self.program.ops[i]), -1) >= i for i in uses)
            if self.last[name] <= index and all(known):
                self.frees[index].append(name)
                del self.uses[name]

    def joins(self) -> tuple[int, ...]:
        """The last of each stream that the compute stream does not know to be over."""
        clock, found = self.known[Stream.COMPUTE], []
        for index in reversed(range(len(self.program.ops))):
            stream = stream_of(index, self.program.ops[index])
            if stream is not Stream.COMPUTE and clock.get(stream, -1) < index:
                found.append(index)
                _learn(clock, self.after[index])
        return tuple(sorted(found))


def overlap(one: Ref, other: Ref) -> bool:
    """Whether two accesses to the same memory touch; of buffers that share it, always."""
    if one.buffer != other.buffer:
        return True
    return _touch(one.rows, other.rows) and _touch(one.heads, other.heads)


def _touch(one: Span | None, other: Span | None) -> bool:
    return one is None or other is None or (one.start < other.stop and other.start < one.stop)


def _covers(one: Ref, other: Ref) -> bool:
    if one.buffer != other.buffer:
        return one.rows is None and one.heads is None
    return all(
        mine is None or (theirs is not None and mine.holds(theirs))
        for mine, theirs in ((one.rows, other.rows), (one.heads, other.heads))
    )


def _learn(clock: Clock, other: Clock) -> None:
    for stream, index in other.items():
        clock[stream] = max(clock.get(stream, -1), index)


def _refs(op: Op) -> tuple[Ref, ...]:
    return (*op.reads, *op.writes)
