"""Proves the programs of all ranks of a group, before any of them runs.

The waits that `order` derives are not trusted. The check goes through a rank's operations and
keeps what each stream knows to be finished, one bit per operation. Two uses of the same memory must
be ordered if one of them writes. `links` checks that transfers match, `values` what is
computed.

Ranks read each other's memory only when they pull. The check assumes what
`comm.pulled.PulledSlots` does. A rank that has passed the barrier of a transfer knows that all
copies of the previous transfer have finished, because each rank copies in order. A rank's slot may
be read once that rank has reached the barrier.
"""

from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.order import Order, order
from megatron_burst.schedule.program import Op, Program, Ref, Space, Stream, Transfer
from megatron_burst.schedule.spec import Cargo
from tests.proof.links import How, Links, meet, run
from tests.proof.values import Values

Passes = Sequence[Sequence[Program]]
_OWN = (Space.CALL, Space.TEMP)  # memory of one pass
_CARRIED = (
    Space.POOL,
    Space.SLOT,
    Space.STAGING,
    Space.SUM,
    Space.SAVED,
)  # what can be sent


def check(
    passes: Passes, layout: Layout, mask: Mask, orders: Sequence[Sequence[Order]] | None = None,
    boundaries: Sequence[int] = (),
) -> list[str]:  # fmt: skip
    """Faults in the programs of a group, each once; none if they are correct.

    Args:
        passes: for each pass, the programs of all ranks, by cp rank. A forward is followed by the
            backward that reads what it saved. All passes run twice, on the same memory.
        layout: of the tokens.
        mask: of the sequence.
        orders: used instead of what `order` derives.
        boundaries: positions where documents begin, except the first.
    """
    return list(dict.fromkeys(faults(passes, layout, mask, orders, boundaries)))


def faults(
    passes: Passes, layout: Layout, mask: Mask, orders: Sequence[Sequence[Order]] | None = None,
    boundaries: Sequence[int] = (),
) -> Iterator[str]:  # fmt: skip
    """What `check` returns, as it is found: who asks for the first fault only waits less."""
    orders = orders or [[order(program) for program in programs] for programs in passes]
    links = [meet(programs) for programs in passes]
    yield from (fault for found in links for fault in found.faults)
    slots, waits = _slots(passes), []
    for number in range(len(passes[0])):
        rank, turns = _Rank(slots), list(zip(passes, orders, strict=True))
        waits.append([rank.go(p[number], o[number]) for _ in range(2) for p, o in turns])
        yield from rank.faults
    values = Values(layout, mask, boundaries)
    for turn, (programs, found) in enumerate(zip(passes, links, strict=True)):
        if not found.faults:
            waits_of = [mine[turn] for mine in waits]
            single = {use for use, count in slots.items() if count == 1}
            yield from run(programs, found, waits_of, How.STREAMS, values, single)
            yield from _held_up(programs, found, waits_of, single)
    yield from values.faults


def _held_up(
    programs: Sequence[Program], links: Links, waits: Sequence, single: Container[str]
) -> list[str]:
    """Operations that hang where a wait blocks more than its stream, also if some of the rows that
    ranks pull are not needed. Waits that block the thread block less than with overlap off."""

    def stuck(how: How) -> list[str]:
        runs = (run(programs, links, waits, how, None, single, out) for out in (None, half_of))
        return [text for texts in runs for text in texts]

    serial = stuck(How.SERIAL)
    return [*stuck(How.ONE_QUEUE), *(stuck(How.THREAD) if serial else ()), *serial]


def half_of(*way: object) -> bool:
    """Leaves out about half of what is pulled, the same of one cargo, round and way each time."""
    return Random(str(way)).random() < 0.5


def _slots(passes: Passes) -> dict[str, int]:
    """How many slots the group has for each use."""
    every = (b for programs in passes for program in programs for b in program.buffers.values())
    counts: dict[str, int] = {}
    for buffer in every:
        if buffer.space is Space.SLOT:
            counts[buffer.use] = max(counts.get(buffer.use, 0), buffer.count)
    return counts


def name_of(program: Program, index: int) -> str:
    """An operation's name in messages."""
    op = program.ops[index]
    names = dict.fromkeys(ref.buffer for ref in (*op.writes, *op.reads))
    kind = f"{op.link} {op.cargo} Transfer" if isinstance(op, Transfer) else type(op).__name__
    return f"rank {program.cp_rank} {program.direction} {index} {kind} ({', '.join(names)})"


@dataclass(frozen=True, slots=True)
class _Access:
    """A use of memory.

    Attributes:
        bit: a stream that knows it may use the memory.
        at: the program and the number of the operation.
    """

    ref: Ref
    writes: bool
    bit: int
    at: tuple[Program, int]

    def meets(self, other: "_Access") -> bool:
        if not (self.writes or other.writes):
            return False
        one, two = self.ref, other.ref
        if one.buffer != two.buffer:
            return True
        spans = (one.rows, two.rows), (one.heads, two.heads)
        return all(not (a and b) or max(a.start, b.start) < min(a.stop, b.stop) for a, b in spans)

    def covers(self, other: "_Access") -> bool:
        """Whether this write conflicts with everything that conflicts with the other."""
        one, two = self.ref, other.ref
        whole = one.rows is None and one.heads is None
        inside = one.buffer == two.buffer and (
            (one.rows is None or (two.rows is not None and one.rows.contains(two.rows)))
            and (one.heads is None or (two.heads is not None and one.heads.contains(two.heads)))
        )
        return whole or inside


@dataclass
class _Pull:
    """The pulled transfers of one cargo on a rank, which run in order on their own stream."""

    known: int = 0  # on that stream
    rounds: int = 0  # in total
    first: int = 0  # at the start of the pass
    drained: int = 0  # once known, all copies out of the last slot have finished
    passed: list[int] = field(default_factory=list)  # known after each barrier


class _Rank:
    """One rank's streams, pass after pass."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots, self.faults = slots, []
        self.known: dict[Hashable, int] = dict.fromkeys(Stream, 0)
        self.pulls: dict[Cargo, _Pull] = defaultdict(_Pull)
        self.history: dict[tuple, list[_Access]] = defaultdict(list)
        self.next_bit, self.turn = 1, 0

    def bit(self) -> int:
        self.next_bit <<= 1
        return self.next_bit

    def go(self, program: Program, claim: Order) -> list[tuple[int, ...]]:
        """Run one pass; returns the waits, including those for barriers of slots."""
        self.program, self.turn = program, self.turn + 1
        self.after: list[int] = []
        self.pulled = {op.cargo for op in program.ops if isinstance(op, Transfer) and op.pulled}
        self.exchanges: dict[Cargo, list[int]] = defaultdict(list)  # the pass's own, by cargo
        self.touched: set[str] = set()
        self.uses: dict[str, list[int]] = defaultdict(list)
        self.freed: set[str] = set()
        self.begin = self.known[Stream.COMPUTE]
        self.known[Stream.SIDE] |= self.begin
        for pull in self.pulls.values():
            pull.first = pull.rounds
        waits = [self._issue(i, op, claim) for i, op in enumerate(program.ops)]
        for index in claim.joins:
            self.known[Stream.COMPUTE] |= self.after[index]
        return waits

    def _fault(self, index: int, text: str) -> None:
        self.faults.append(f"{name_of(self.program, index)} {text}")

    def _issue(self, index: int, op: Op, claim: Order) -> tuple[int, ...]:
        waits = claim.waits[index]
        if waits and max(waits) >= index:
            self._fault(index, f"waits for {waits}, of which some are issued after it")
            waits = tuple(other for other in waits if other < index)
        past = self.begin if isinstance(op, Transfer) else self.known[op.stream]
        for other in waits:
            past |= self.after[other]
        slots_past, slots_waits = self._views(op)
        past |= slots_past
        issue = self._transfer if isinstance(op, Transfer) else self._local
        issue(index, op, past)
        self._parts(op, index)
        for part in claim.frees[index]:
            self._free(index, part)
        return (*waits, *slots_waits)

    def _local(self, index: int, op: Op, past: int) -> None:
        bit = self.bit()
        self.known[op.stream] = past | bit
        self.after.append(past | bit)
        for refs, writes in ((op.reads, False), (op.writes, True)):
            for ref in refs:
                self._touch(_Access(ref, writes, bit, (self.program, index)), past | bit)

    def _transfer(self, index: int, op: Transfer, past: int) -> None:
        bit = given = self.bit()
        if op.pulled:
            pull, given = self.pulls[op.cargo], self.bit()
            past |= pull.known | pull.drained
            single = self.slots[self.program.buffers[op.slot.buffer].use] == 1
            pull.known = past | bit | (given if single else 0)
            pull.passed.append(pull.known if single else past)
            pull.drained = given
            pull.rounds += 1
            self.exchanges[op.cargo].append(index)
        tells = op.sends or op.recvs  # waiting for an empty one orders nothing
        self.after.append(past | bit if tells else 0)
        for give in op.sends:
            self._touch(_Access(give.rows, False, given, (self.program, index)), past)
        for take in op.recvs:
            self._touch(_Access(take.rows, True, bit, (self.program, index)), past)

    def _views(self, op: Op) -> tuple[int, list[int]]:
        """What the first operation that uses a pulled slot knows and waits for."""
        past, waits = 0, []
        for name in [ref.buffer for ref in (*op.reads, *op.writes)] if self.pulled else ():
            buffer = self.program.buffers[name]
            pulls = buffer.space is Space.SLOT and buffer.use in self.pulled
            if not pulls or name in self.touched:
                continue
            self.touched.add(name)
            pull, back = self.pulls[buffer.use], max(1, self.slots[buffer.use] - 1)
            if pull.first + buffer.number == pull.rounds and len(pull.passed) >= back:
                past |= pull.passed[-back]
                found = self.exchanges[buffer.use][-back:][:1] if buffer.number >= back else []
                waits += [~index for index in found] if self.slots[buffer.use] == 1 else found
        return past, waits

    def _storage(self, name: str) -> tuple:
        buffer = self.program.buffers[name]
        if buffer.space in _OWN:
            return name, self.turn
        if buffer.space is Space.SLOT and buffer.use in self.pulled:
            number = self.pulls[buffer.use].first + buffer.number
            return Space.SLOT, buffer.use, number % self.slots[buffer.use]
        return buffer.storage

    def _touch(self, access: _Access, past: int) -> None:
        history = self.history[self._storage(access.ref.buffer)]
        for earlier in history:
            if not past & earlier.bit and access.meets(earlier):
                self._fault(access.at[1], f"is not ordered after {name_of(*earlier.at)}: "
                            f"{access.ref} and {earlier.ref} are the same memory")  # fmt: skip
        if access.writes:
            history[:] = [x for x in history if not (past & x.bit and access.covers(x))]
        history.append(access)

    def _parts(self, op: Op, index: int) -> None:
        """Check that parts are allocated and written on the compute stream, and never sent."""
        for refs, writes in ((op.reads, False), (op.writes, True)):
            for ref in refs:
                home = self.program.buffers[ref.buffer].space
                if isinstance(op, Transfer):
                    if home not in _CARRIED:
                        self._fault(index, f"carries {ref.buffer}, which is a {home} buffer")
                elif home is Space.TEMP and writes and op.stream is not Stream.COMPUTE:
                    self._fault(index, f"writes the part {ref.buffer} on stream {op.stream}")
                if ref.buffer in self.freed:
                    self._fault(index, f"uses {ref.buffer}, which was freed")
                self.uses[ref.buffer].append(index)

    def _free(self, index: int, part: str) -> None:
        known = self.known[Stream.COMPUTE]
        if self.program.buffers[part].space is not Space.TEMP:
            self._fault(index, f"frees {part}, which is no part")
        for use in self.uses[part]:
            if self.after[use] & ~known:
                self._fault(index, f"frees {part}, but the compute stream does not know that "
                                   f"{name_of(self.program, use)} has finished")  # fmt: skip
        self.freed.add(part)
