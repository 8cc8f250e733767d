"""How long a pass takes: runs the programs of its ranks, with GPUs and links as resources.

What waits for what is as in the engine (`schedule.order`): kernels are queued on two streams of
each rank, transfers on one for each link and cargo. A transfer begins when all who take part are
there and its ports are free. While NCCL moves something, kernels have fewer multiprocessors. The
side stream goes before the compute stream: its kernels are short and take all of the GPU.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count

from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.kernel_time import Timer
from megatron_burst.plan.op_time import OpTimer
from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import (
    Attend,
    AttendBackward,
    Op,
    Program,
    Stream,
    Transfer,
)
from megatron_burst.schedule.topology import Link


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted.

    Attributes:
        rank: of whom.
        lane: "compute", "intra" or "inter".
        what: e.g. "attention", "merge", "wait", "read".
        start: seconds since the pass began.
        stop: when it was over.
        round: how many of its kind came before, of kernels that share keys and values as one.
    """

    rank: int
    lane: str
    what: str
    start: float
    stop: float
    round: int = -1


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened in a pass.

    Attributes:
        seconds: until the last rank was done.
        spans: of all simulated ranks, in order of their start on each.
        waits: seconds that kernels of the last rank to finish waited for each link.
    """

    seconds: float
    spans: tuple[Span, ...]
    waits: tuple[tuple[Link, float], ...]

    def exposed(self, link: Link) -> float:
        """Seconds that kernels wait for a link, on the rank that is done last."""
        return dict(self.waits).get(link, 0.0)


@dataclass(frozen=True, slots=True)
class Wiring:
    """What links give to one rank while the others use them too.

    Attributes:
        hardware: the cluster's.
        inter_share: of one network card for a rank that sends between nodes.
    """

    hardware: Hardware
    inter_share: float = 1.0

    def seconds(self, link: Link, pulled: bool, num_bytes: float) -> float:
        """Time of a transfer that has its link to itself."""
        links = self.hardware.links
        if link is Link.INTER:
            return links.inter.seconds(num_bytes, self.inter_share)
        return (links.pull if pulled else links.intra).seconds(num_bytes)


@dataclass(slots=True, eq=False)
class _Part:
    """What comes over one link in a transfer."""

    link: Link
    seconds: float
    by_nccl: bool
    ports: tuple[tuple, ...]
    ends: "list[_Task]"  # whose transfers it is of
    start: float = 0.0
    stop: float = 0.0


@dataclass(slots=True, eq=False)
class _Task:
    """An operation of a rank; None: the end of its pass."""

    rank: int
    op: Op | None
    seconds: float = 0.0
    needs: int = 0  # how many must be over before it is ready
    then: "list[_Task]" = field(default_factory=list)  # who needs it
    parts: list[_Part] = field(default_factory=list)
    absent: int = 0  # of those who take part in a transfer
    tells: "list[_Task]" = field(default_factory=list)  # who waits until this end is ready
    moving: int = 0  # parts that are not over
    cause: "_Task | None" = None  # what it needed last
    ready: float = 0.0
    start: float = 0.0
    stop: float = -1.0


@dataclass(slots=True, eq=False)
class _Gpu:
    """What computes on a rank."""

    task: _Task | None = None
    left: float = 0.0  # seconds of it
    since: float = 0.0
    pace: float = 0.0
    turns: int = 0  # how often the pace has changed
    nccl: int = 0  # transfers that take multiprocessors
    side: int = 0  # kernels on the side stream


def simulate(
    programs: Mapping[int, Program], timer: Timer, wiring: Wiring, overlap: bool = True,
    with_spans: bool = True,
) -> Timeline:  # fmt: skip
    """Run the programs of all ranks, or of some that stand for all.

    Args:
        programs: by cp rank: of all ranks of a group, or of some of them where all do alike; a rank
            that is missing is taken to do what its partner does, at the same time.
        timer: how long kernels take.
        wiring: what links give.
        overlap: whether transfers run beside what follows.
        with_spans: whether to write down what happened.
    """
    queues = {rank: _queued(rank, one, timer, overlap) for rank, one in programs.items()}
    _join(programs, queues, wiring)
    _World(queues, 1 - wiring.hardware.gpu.nccl_share).run()
    last = max(queues, key=lambda rank: queues[rank][-1].stop)
    waits = dict.fromkeys(Link, 0.0)
    for link, start, stop in _waits(queues[last]):
        waits[link] += stop - start
    spans = tuple(s for tasks in queues.values() for s in _spans(tasks)) if with_spans else ()
    found = Timeline(queues[last][-1].stop, spans, tuple(waits.items()))
    for tasks in queues.values():
        for task in tasks:  # they name each other, so nothing else would free them soon
            task.then, task.tells, task.parts = [], [], []
            task.cause = None
    return found


def _queued(rank: int, program: Program, timer: Timer, overlap: bool) -> list[_Task]:
    """The operations of a rank and its end, each with what it has to follow."""
    timed, derived = OpTimer(program, timer), order(program)
    tasks: list[_Task] = []
    last: dict[Hashable, _Task] = {}  # of each queue
    for index, op in enumerate(program.ops):
        task = _Task(rank, op, 0.0 if isinstance(op, Transfer) else timed.seconds(op))
        befores = [tasks[earlier] for earlier in derived.waits[index]] if overlap else []
        queue: Hashable = (op.link, op.cargo) if isinstance(op, Transfer) else op.stream
        _follow(task, befores, last, queue if overlap else None)
        tasks.append(task)
    end = _Task(rank, None)
    befores = [tasks[earlier] for earlier in derived.joins] if overlap else []
    _follow(end, befores, last, Stream.COMPUTE if overlap else None)
    return [*tasks, end]


def _follow(task: _Task, befores: list[_Task], last: dict, queue: Hashable) -> None:
    if queue in last:
        befores.append(last[queue])
    last[queue] = task
    task.needs = len(befores)
    for before in befores:
        before.then.append(task)


def _join(
    programs: Mapping[int, Program], queues: Mapping[int, Sequence[_Task]], wiring: Wiring
) -> None:
    """Bring together who takes part in each transfer: those between two ranks match in order, and
    so do those that all ranks of a row pull."""
    meetings: dict[tuple, list[_Task]] = defaultdict(list)
    sending: dict[tuple, _Task] = {}
    taking: list[tuple[_Task, list[tuple]]] = []
    for rank, tasks in queues.items():
        turns: Counter[tuple] = Counter()
        row, _ = programs[rank].topology.coord(rank)
        for task in tasks:
            op = task.op
            if not isinstance(op, Transfer):
                continue
            if op.pulled:
                meetings[_next(turns, (row, op.link, op.cargo))].append(task)
                taking.append((task, []))
                continue
            for peer in dict.fromkeys(give.peer for give in op.gives):
                sending[_next(turns, (rank, peer, op.link, op.cargo))] = task
            peers = dict.fromkeys(take.peer for take in op.takes)
            keys = [_next(turns, (peer, rank, op.link, op.cargo)) for peer in peers]
            taking.append((task, keys))
    for together in meetings.values():
        for task in together:
            task.tells, task.absent = together, len(together)
    seconds = cache(wiring.seconds)  # transfers are of few sizes
    for task, keys in taking:
        sources = [sending[key] for key in keys if key[0] in queues]
        _meet(task, sources)
        _take(task, sources, programs[task.rank], seconds)


def _next(turns: Counter[tuple], key: tuple) -> tuple:
    turns[key] += 1
    return *key, turns[key]


def _meet(task: _Task, sources: Sequence[_Task]) -> None:
    """Let a transfer that is sent begin when its sources are ready."""
    if not task.absent:
        task.absent = 1 + len(sources)
        task.tells.append(task)
        for source in sources:
            source.tells.append(task)


def _take(
    task: _Task, sources: Sequence[_Task], program: Program, seconds: Callable[..., float]
) -> None:
    """The parts of a transfer, by link. Who passes something on is done when it has arrived."""
    op, rank = task.op, task.rank
    assert isinstance(op, Transfer)
    come: Counter[Link] = Counter()
    for take in op.takes:
        come[program.topology.link(take.peer, rank)] += program.num_bytes(take.rows)
    passes_on = op.slot is None
    for link in sorted(come, key=list(Link).index) or [op.link]:
        pulled = op.pulled and link is Link.INTRA
        out = [(source.rank, link, "out") for source in sources if passes_on]
        ends = [task, *sources] if passes_on else [task]
        time = seconds(link, pulled, come[link])
        part = _Part(link, time, bool(time) and not pulled, ((rank, link, "in"), *out), ends)
        task.parts.append(part)
        for one in ends:
            one.moving += 1


class _World:
    """GPUs, ports and what happens next."""

    def __init__(self, queues: Mapping[int, Sequence[_Task]], slow: float) -> None:
        self._queues, self._slow = queues, slow
        self._gpus = {rank: _Gpu() for rank in queues}
        self._ports: dict[tuple, float] = defaultdict(float)
        self._events: list[tuple] = []
        self._numbers = count()

    def run(self) -> None:
        """Until nothing happens any more."""
        begins = [task for tasks in self._queues.values() for task in tasks if not task.needs]
        for task in begins:
            self._ready(task, 0.0)
        while self._events:
            now, _, happen, what = heappop(self._events)
            happen(*what, now)
        assert all(tasks[-1].stop >= 0 for tasks in self._queues.values()), "a rank waits for ever"

    def _at(self, time: float, happen: Callable, *what: object) -> None:
        heappush(self._events, (time, next(self._numbers), happen, what))

    def _ready(self, task: _Task, now: float) -> None:
        task.ready = now
        if task.op is None:
            task.start = now
            self._over(task, now)
        elif isinstance(task.op, Transfer):
            for other in task.tells:
                other.absent -= 1
                if not other.absent:
                    self._move(other, now)
        else:
            self._compute(self._gpus[task.rank], task, now)

    def _over(self, task: _Task, now: float) -> None:
        task.stop = now
        for other in task.then:
            other.needs -= 1
            if not other.needs:
                other.cause = task
                self._ready(other, now)

    def _compute(self, gpu: _Gpu, task: _Task, now: float) -> None:
        task.start = now
        assert task.op is not None and not isinstance(task.op, Transfer)
        if task.op.stream is Stream.COMPUTE:
            gpu.task, gpu.left, gpu.since, gpu.pace = task, task.seconds, now, 0.0
        else:
            gpu.side += 1
            self._at(now + task.seconds, self._side_over, gpu, task)
        self._pace(gpu, now)

    def _pace(self, gpu: _Gpu, now: float) -> None:
        """Go on with a kernel as fast as what runs beside it allows."""
        if gpu.task is None:
            return
        gpu.left -= (now - gpu.since) * gpu.pace
        gpu.since, gpu.turns = now, gpu.turns + 1
        gpu.pace = 0.0 if gpu.side else self._slow if gpu.nccl else 1.0
        if gpu.pace:
            self._at(now + gpu.left / gpu.pace, self._kernel_over, gpu, gpu.turns)

    def _kernel_over(self, gpu: _Gpu, turn: int, now: float) -> None:
        if turn == gpu.turns and gpu.task:
            task, gpu.task = gpu.task, None
            self._over(task, now)

    def _side_over(self, gpu: _Gpu, task: _Task, now: float) -> None:
        gpu.side -= 1
        self._pace(gpu, now)
        self._over(task, now)

    def _move(self, task: _Task, now: float) -> None:
        """Begin a transfer whose ranks are all there; a port serves whoever came first."""
        task.start = now
        for part in task.parts:
            part.start = max(now, *(self._ports[port] for port in part.ports))
            part.stop = part.start + part.seconds
            for port in part.ports:
                self._ports[port] = part.stop
            if part.by_nccl:
                self._at(part.start, self._nccl, self._gpus[task.rank], 1)
            self._at(part.stop, self._part_over, task.rank, part)

    def _nccl(self, gpu: _Gpu, more: int, now: float) -> None:
        before, gpu.nccl = gpu.nccl, gpu.nccl + more
        if not before or not gpu.nccl:
            self._pace(gpu, now)

    def _part_over(self, rank: int, part: _Part, now: float) -> None:
        if part.by_nccl:
            self._nccl(self._gpus[rank], -1, now)
        for task in part.ends:
            task.moving -= 1
            if not task.moving:
                self._over(task, now)


def _waits(tasks: Sequence[_Task]) -> Iterator[tuple[Link, float, float]]:
    """When the compute stream of a rank waits for links: traced back from each kernel that starts
    late through what it needed last."""
    since = 0.0
    for task in tasks:
        if task.op is not None and getattr(task.op, "stream", None) is not Stream.COMPUTE:
            continue
        until, cause = task.start, task.cause
        while cause and until > since:
            if isinstance(cause.op, Transfer):
                for part in sorted(cause.parts, key=lambda one: -one.stop):
                    begin = max(cause.ready, since)
                    others = (one.stop for one in cause.parts if one.stop < part.stop)
                    begin = max(begin, *others, begin)
                    if until > begin:
                        yield part.link, begin, until
                        until = begin
            until = min(until, cause.ready)
            cause = cause.cause
        since = task.stop


_NAMES = {"Merge": "merge", "Add": "merge", "Fill": "merge"}


def _spans(tasks: Sequence[_Task]) -> Iterator[Span]:
    """What a rank did, and what its kernels waited for."""
    found, rank, rounds = [], tasks[0].rank, Counter[object]()
    keys = None
    for task in tasks:
        op = task.op
        if isinstance(op, Transfer):
            rounds[op.link, op.cargo] += 1
            found += [
                Span(rank, str(p.link), str(op.cargo), p.start, p.stop, rounds[op.link, op.cargo])
                for p in task.parts
                if p.stop > p.start
            ]
        elif isinstance(op, Attend | AttendBackward):
            rounds["keys"] += op.kv.buffer != keys
            keys = op.kv.buffer
            found.append(Span(rank, "compute", "attention", task.start, task.stop, rounds["keys"]))
        elif op is not None and op.stream is Stream.COMPUTE and task.stop > task.start:
            what = _NAMES.get(type(op).__name__, "copy")
            found.append(Span(rank, "compute", what, task.start, task.stop))
    found += [Span(rank, "compute", f"wait for {link}", a, b) for link, a, b in _waits(tasks)]
    yield from sorted(found, key=lambda span: span.start)
