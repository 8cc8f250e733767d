"""Programs of ranks as tasks that wait for each other, and the ranks in each transfer."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from megatron_burst.schedule.order import order
from megatron_burst.schedule.program import Op, Program, Stream, Transfer
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import Hardware
from megatron_burst.tools.simulate.kernels import OpTimer, Timer


@dataclass(slots=True, eq=False)
class Part:
    """What arrives over one link in a transfer."""

    link: Link
    seconds: float
    by_nccl: bool
    ports: tuple[tuple, ...]
    ends: "list[Task]"  # of the transfers it belongs to
    start: float = 0.0
    stop: float = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """An operation of a rank; None: the end of its pass."""

    rank: int
    op: Op | None
    seconds: float = 0.0
    needs: int = 0  # how many tasks must finish before it is ready
    then: "list[Task]" = field(default_factory=list)  # who needs it
    parts: list[Part] = field(default_factory=list)
    absent: int = 0  # participants of a transfer that are not ready
    tells: "list[Task]" = field(default_factory=list)  # ends that wait until this one is ready
    moving: int = 0  # unfinished parts
    cause: "Task | None" = None  # the last task it waited for
    ready: float = 0.0
    start: float = 0.0
    stop: float = -1.0


def queued(rank: int, program: Program, timer: Timer, overlap: bool) -> list[Task]:
    """The operations of a rank and its end, each with its dependencies."""
    timed, derived = OpTimer(program, timer), order(program)
    tasks: list[Task] = []
    last: dict[Hashable, Task] = {}  # of each queue
    for index, op in enumerate(program.ops):
        task = Task(rank, op, 0.0 if isinstance(op, Transfer) else timed.seconds(op))
        befores = [tasks[earlier] for earlier in derived.waits[index]] if overlap else []
        queue: Hashable = (op.link, op.cargo) if isinstance(op, Transfer) else op.stream
        _follow(task, befores, last, queue if overlap else None)
        tasks.append(task)
    end = Task(rank, None)
    befores = [tasks[earlier] for earlier in derived.joins] if overlap else []
    _follow(end, befores, last, Stream.COMPUTE if overlap else None)
    return [*tasks, end]


def _follow(task: Task, befores: list[Task], last: dict, queue: Hashable) -> None:
    if queue in last:
        befores.append(last[queue])
    last[queue] = task
    task.needs = len(befores)
    for before in befores:
        before.then.append(task)


def join(
    programs: Mapping[int, Program], queues: Mapping[int, Sequence[Task]], hardware: Hardware,
    inter_share: float,
) -> None:  # fmt: skip
    """Match the ends of each transfer, in order: of two ranks, or of a row whose ranks all pull."""
    meetings: dict[tuple, list[Task]] = defaultdict(list)
    sending: dict[tuple, Task] = {}
    taking: list[tuple[Task, list[tuple]]] = []
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
            for peer in dict.fromkeys(give.peer for give in op.sends):
                sending[_next(turns, (rank, peer, op.link, op.cargo))] = task
            peers = dict.fromkeys(take.peer for take in op.recvs)
            keys = [_next(turns, (peer, rank, op.link, op.cargo)) for peer in peers]
            taking.append((task, keys))
    for together in meetings.values():
        for task in together:
            task.tells, task.absent = together, len(together)

    @cache  # transfers have few sizes
    def seconds(link: Link, pulled: bool, num_bytes: float) -> float:
        if link is Link.INTER:
            return hardware.links.inter.seconds(num_bytes, inter_share)
        return (hardware.links.pull if pulled else hardware.links.intra).seconds(num_bytes)

    for task, keys in taking:
        sources = [sending[key] for key in keys if key[0] in queues]
        _meet(task, sources)
        _take(task, sources, programs[task.rank], seconds)


def _next(turns: Counter[tuple], key: tuple) -> tuple:
    turns[key] += 1
    return *key, turns[key]


def _meet(task: Task, sources: Sequence[Task]) -> None:
    """Let a transfer that is sent begin when its sources are ready."""
    if not task.absent:
        task.absent = 1 + len(sources)
        task.tells.append(task)
        for source in sources:
            source.tells.append(task)


def _take(
    task: Task, sources: Sequence[Task], program: Program, seconds: Callable[..., float]
) -> None:
    """The parts of a transfer, by link. A sender is done when its data has arrived."""
    op, rank = task.op, task.rank
    assert isinstance(op, Transfer)
    arrivals: Counter[Link] = Counter()
    for take in op.recvs:
        arrivals[program.topology.link(take.peer, rank)] += program.num_bytes(take.rows)
    passes_on = op.slot is None
    for link in sorted(arrivals, key=list(Link).index) or [op.link]:
        pulled = op.pulled and link is Link.INTRA
        out = [(source.rank, link, "out") for source in sources if passes_on]
        ends = [task, *sources] if passes_on else [task]
        time = seconds(link, pulled, arrivals[link])
        part = Part(link, time, bool(time) and not pulled, ((rank, link, "in"), *out), ends)
        task.parts.append(part)
        for one in ends:
            one.moving += 1
