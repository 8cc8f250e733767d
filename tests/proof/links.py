"""Checks that transfers of ranks match, and that no rank waits forever.

Messages between two ranks on one communicator (a link and a cargo) match in the order of issue, as
in NCCL and gloo. Then the programs are run with queues that keep their order. A transfer starts
after the previous one of its communicator, and completes once all its partners have started. What a
waiting operation blocks depends on the machine (`How`).

A pulled transfer begins with a barrier of its row. With a single slot another one follows, once
something waits for the copies, or at once on a rank that copies nothing. It is an event of its own
here, numbered ~n for transfer n. Transfers may also be left out where a rank needs none of their
rows, which masks that are known when a pass runs decide (`left_out`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_burst.schedule.mask import Span
from megatron_burst.schedule.program import Program, Recv, Ref, Send, Transfer
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link

At = tuple[int, int]  # rank, and number of the operation
LeftOut = Callable[[Cargo, int, int, int], bool]  # of a cargo, its round, from and to a rank


class How(StrEnum):
    """What a waiting operation blocks."""

    STREAMS = "with a queue for each stream"
    ONE_QUEUE = "with one hardware queue"  # all streams' later operations
    THREAD = "with waits that block the thread"  # gloo
    SERIAL = "with every transfer waited for at once"  # overlap is off


@dataclass
class Links:
    """Which transfers match in a pass.

    Attributes:
        partners: for each transfer, those that complete together with it, itself included.
        sources: for each transfer, who sends what it receives.
        faults: mismatches.
    """

    partners: dict[At, set[At]] = field(default_factory=lambda: defaultdict(set))
    sources: dict[At, list[tuple[At, Recv]]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)


def meet(programs: Sequence[Program]) -> Links:
    """The partners of all transfers of a pass."""
    links, sent, taken = Links(), defaultdict(list), defaultdict(list)
    rows: dict[tuple, dict[int, At]] = defaultdict(dict)
    for program in programs:
        rounds: dict[Cargo, int] = defaultdict(int)
        for index, op in enumerate(program.ops):
            if not isinstance(op, Transfer):
                continue
            at, key = (program.cp_rank, index), (op.link, op.cargo)
            links.partners[at].add(at)
            if op.pulled:
                key = (*key, rounds[op.cargo])
                rounds[op.cargo] += 1
                row, _ = program.topology.coord(program.cp_rank)
                rows[row, *key][program.cp_rank] = at
                links.faults += _slot_faults(program, index, key[-1])
            for give in op.sends:
                sent[*key, program.cp_rank, give.peer].append((at, give))
            for take in op.recvs:
                taken[*key, take.peer, program.cp_rank].append((at, take))
    _match(programs, links, sent, taken)
    for (row, *key), found in rows.items():
        if missing := set(programs[0].topology.grid[row]) - found.keys():
            links.faults.append(f"{_of(key)}: ranks {sorted(missing)} do not reach its barrier")
        for at in found.values():
            links.partners[at] |= set(found.values())
    return links


def _of(key: Sequence) -> str:
    return f"{key[0]} {key[1]} transfer" + (f" {key[2]}" if len(key) > 2 else "")


def _slot_faults(program: Program, index: int, count: int) -> list[str]:
    """Faults of slots: pulled transfer n must use slot n, whose barrier it passes."""
    slot = program.ops[index].slot
    number = program.buffers[slot.buffer].number if slot else None
    if number == count:
        return []
    return [f"rank {program.cp_rank} {index}: exchange {count} has slot {slot}, number {number}"]


def _match(programs: Sequence[Program], links: Links, sent: Mapping, taken: Mapping) -> None:
    """Pair sends from one rank to another with the receives there, in order."""
    for key in dict.fromkeys((*sent, *taken)):
        *kind, source, target = key
        gives, takes = sent.get(key, []), taken.get(key, [])
        if len(gives) != len(takes):
            links.faults.append(f"{_of(kind)}: rank {source} gives rank {target} {len(gives)} "
                                f"messages, which takes {len(takes)}")  # fmt: skip
        if source == target or not _joined(programs[0], kind[0], source, target):
            links.faults.append(f"{_of(kind)}: no communicator joins ranks {source} and {target}")
        for number, ((here, give), (there, take)) in enumerate(zip(gives, takes, strict=False)):
            if fault := _difference(programs[source], give, programs[target], take):
                links.faults.append(f"{_of(kind)}, message {number} from rank {source} ({here[1]}) "
                                    f"to rank {target} ({there[1]}): {fault}")  # fmt: skip
            links.partners[here].add(there)
            links.partners[there].add(here)
            links.sources[there].append((here, take))


def _joined(program: Program, link: Link, one: int, other: int) -> bool:
    """Whether ranks are in the same row, or column."""
    which = 0 if link is Link.INTRA else 1
    return program.topology.coord(one)[which] == program.topology.coord(other)[which]


def _difference(source: Program, give: Send, target: Program, take: Recv) -> str:
    """How a message differs from what is expected."""
    mine, theirs = _region(source, give.rows), _region(source, take.remote_rows)
    if mine != theirs:
        return f"gives {mine} where {theirs} is expected"
    if source.num_bytes(give.rows) != target.num_bytes(take.rows):
        return f"{source.num_bytes(give.rows)} bytes for {target.num_bytes(take.rows)}"
    if give.needed_by != take.needed_by:
        return f"is for {give.needed_by} there and {take.needed_by} here"
    one, other = source.buffers[give.rows.buffer], target.buffers[take.rows.buffer]
    if (one.fields, one.interleaved) != (other.fields, other.interleaved):
        return f"{one.name} and {other.name} have other fields"
    for program, ref in ((source, give.rows), (target, take.rows)):
        _, rows, heads = _region(program, ref)
        if heads or not (one.interleaved or rows == (0, program.buffers[ref.buffer].rows)):
            return f"{ref} is not one range of bytes"
    return ""


def _region(program: Program, ref: Ref) -> tuple[str, tuple[int, int], Span | None]:
    """Buffer, rows and heads, with explicit rows."""
    if ref.buffer not in program.buffers:
        return ref.buffer, (-1, -1), None
    rows = ref.rows or Span(0, program.buffers[ref.buffer].rows)
    return ref.buffer, (rows.start, rows.stop), ref.heads


def run(
    programs: Sequence[Program], links: Links, waits: Sequence, how: How, values=None,
    single: Container[str] = (), left_out: LeftOut | None = None,
) -> list[str]:  # fmt: skip
    """Run a pass; returns the operations that wait forever.

    Args:
        programs: of all ranks.
        links: which transfers match.
        waits: by rank and operation, what it waits for.
        how: what a waiting operation blocks.
        values: computes what runs, if given.
        single: uses that have a single slot.
        left_out: whether pulled rows are not needed; default: all are.
    """
    return _Run(programs, links, waits, how, values, single, left_out).stuck()


class _Run:
    def __init__(
        self, programs: Sequence[Program], links: Links, waits: Sequence, how: How, values,
        single: Container[str], left_out: LeftOut | None,
    ) -> None:  # fmt: skip
        self.programs, self.partners, self.waits, self.how = programs, links.partners, waits, how
        self.values, self.launched, self.moved = values, set(), True
        self.single, self.left_out = single, left_out
        self.done: list[set[int]] = [set() for _ in programs]
        # transfers all of whose partners have been launched: then the copies are done
        self.met: list[set[int]] = [set() for _ in programs]
        self.last: dict[tuple, int] = {}  # by rank and communicator, the last one launched
        self.queues = [queue for program in programs for queue in self._queues(program)]
        if values:
            values.begin(programs, links)

    def _queues(self, program: Program) -> list[tuple[int, deque[int]]]:
        queues: dict[Hashable, deque[int]] = defaultdict(deque)
        for index in self._issued(program):
            op = program.ops[max(index, ~index)]
            own = (op.link, op.cargo) if isinstance(op, Transfer) else op.stream
            queues[own if self.how is How.STREAMS else 0].append(index)
        return [(program.cp_rank, queue) for queue in queues.values()]

    def _issued(self, program: Program) -> Iterator[int]:
        """Operations and second barriers in the order in which a rank issues them."""
        due: list[int] = []
        for index, op in enumerate(program.ops):
            waited = self.waits[program.cp_rank][index]
            yield from (~other for other in due if other in waited)
            due = [other for other in due if other not in waited]
            yield index
            if self._frees(program, op):
                copies = any(not self._is_left_out(program, index, end) for end in op.recvs)
                if copies and self._overlaps:
                    due.append(index)
                else:
                    yield ~index
        yield from (~other for other in due)

    @property
    def _overlaps(self) -> bool:
        return self.how in (How.STREAMS, How.ONE_QUEUE)

    def _frees(self, program: Program, op: object) -> bool:
        pulls = isinstance(op, Transfer) and op.pulled
        return pulls and program.buffers[op.slot.buffer].use in self.single

    def _is_left_out(self, program: Program, index: int, end: Send | Recv) -> bool:
        op, here = program.ops[index], program.cp_rank
        if self.left_out is None or not op.pulled:
            return False
        way = (end.peer, here) if isinstance(end, Recv) else (here, end.peer)
        return self.left_out(op.cargo, program.buffers[op.slot.buffer].number, *way)

    def stuck(self) -> list[str]:
        while self.moved:
            self.moved = False
            for rank, queue in self.queues:
                while queue and self._passes(rank, queue[0]):
                    queue.popleft()
                    self.moved = True
        heads = [f"rank {rank} {self._named(rank, queue[0])}"
                 for rank, queue in self.queues if queue]  # fmt: skip
        heads += [f"rank {rank} {index} Transfer, launched" for rank, index in sorted(self.launched)
                  if index not in self.done[rank]]  # fmt: skip
        return [f"{self.how} nothing goes on: {'; '.join(heads)}"] if heads else []

    def _named(self, rank: int, index: int) -> str:
        kind = type(self.programs[rank].ops[max(index, ~index)]).__name__
        return f"{index} {kind}" if index >= 0 else f"barrier behind {~index} {kind}"

    def _passes(self, rank: int, index: int) -> bool:
        """Whether the operation at the head of a queue unblocks it."""
        if index < 0:
            return self._frees_slot(rank, index)
        op, done = self.programs[rank].ops[index], self.done[rank]
        if not done.issuperset(self.waits[rank][index]):
            return False
        if not isinstance(op, Transfer):
            done.add(index)
            if self.values:
                self.values.compute(rank, index)
            return True
        if (rank, index) not in self.launched and not self._launch(rank, index, op):
            return False
        # of a single slot, kernels are launched before the barrier that waits for the copies
        late = self._overlaps and self._frees(self.programs[rank], op)
        pulls = op.pulled and self.how is not How.STREAMS and not late
        return index in done or not (self.how is How.SERIAL or pulls)

    def _frees_slot(self, rank: int, index: int) -> bool:
        """Launch the barrier behind a transfer's copies, whose number is ~index."""
        if ~index not in self.met[rank]:
            return False
        if (rank, index) not in self.launched:
            self.launched.add((rank, index))
            self.moved = True
            row = {(other, ~number) for other, number in self.partners[rank, ~index]}
            if row <= self.launched:
                for other, number in row:
                    self.done[other].add(number)
        return self.how is How.ONE_QUEUE or index in self.done[rank]

    def _launch(self, rank: int, index: int, op: Transfer) -> bool:
        key = rank, op.link, op.cargo, op.pulled
        before = self.last.get(key)
        if self.how is not How.THREAD and before is not None and not self._over(rank, before):
            return False
        self.last[key], self.moved = index, True
        self.launched.add((rank, index))
        program = self.programs[rank]
        if all(self._is_left_out(program, index, end) for end in (*op.sends, *op.recvs)):
            self.done[rank].add(index)  # what waits for it need not wait for its barriers
        if self.values:
            self.values.give(rank, index)
        for at in self.partners[rank, index]:
            if at in self.launched and self.partners[at] <= self.launched:
                self.done[at[0]].add(at[1])
                self.met[at[0]].add(at[1])
        if self.values:
            for at in sorted(self.partners[rank, index]):
                if at[1] in self.done[at[0]]:
                    self.values.take(*at)
        return True

    def _over(self, rank: int, index: int) -> bool:
        """Whether the next transfer of the same communicator may begin."""
        frees = self._frees(self.programs[rank], self.programs[rank].ops[index])
        return index in self.met[rank] and (not frees or ~index in self.done[rank])
