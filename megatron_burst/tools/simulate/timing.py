"""How long a pass takes: simulates the programs of its ranks, with GPUs and links as resources.

Waits are as in the engine (`schedule.order`): kernels are queued on two streams of each rank,
transfers on one per link and cargo. A transfer starts when all participants are ready and its ports
are free. During NCCL transfers, kernels have fewer multiprocessors. Kernels on the side stream only
copy and add; they run beside those of the compute stream, as measured all-to-alls do.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from megatron_burst.schedule.program import Attend, AttendBackward, Program, Stream, Transfer
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.simulate.kernels import Timer
from megatron_burst.tools.simulate.tasks import Part, Task, join, queued


@dataclass(frozen=True, slots=True)
class Span:
    """An interval."""

    rank: int
    lane: str  # "compute", "intra" or "inter"
    what: str  # e.g. "attention", "merge", "wait for inter", "read"
    start: float  # seconds since the pass began
    stop: float
    round: int = -1  # how many of its kind came before; kernels on the same keys count once


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened in a pass."""

    seconds: float  # until the last rank was done
    spans: tuple[Span, ...]  # of all simulated ranks, in order of their start on each
    waits: tuple[tuple[Link, float], ...]  # of kernels on the last rank to finish, by link

    def exposed(self, link: Link) -> float:
        """Seconds that kernels wait for a link, on the rank that finishes last."""
        return dict(self.waits).get(link, 0.0)


@dataclass(slots=True, eq=False)
class _Gpu:
    """What a rank's GPU computes."""

    task: Task | None = None
    left: float = 0.0  # seconds of it
    since: float = 0.0
    pace: float = 0.0
    turns: int = 0  # how often the pace has changed
    nccl: int = 0  # transfers that take multiprocessors


def simulate(
    programs: Mapping[int, Program], timer: Timer, inter_share: float = 1.0, overlap: bool = True,
    with_spans: bool = True,
) -> Timeline:  # fmt: skip
    """Simulate the programs of all ranks, or of some that represent all.

    Args:
        programs: by cp rank: of all ranks of a group, or of some if all do the same; a missing rank
            is assumed to do what its partner does, at the same time.
        inter_share: share of a network card for a rank that sends between nodes.
        overlap: whether transfers overlap with what follows.
    """
    queues = {rank: queued(rank, one, timer, overlap) for rank, one in programs.items()}
    join(programs, queues, timer.hardware, inter_share)
    _World(queues, 1 - timer.hardware.gpu.nccl_share).run()
    last = max(queues, key=lambda rank: queues[rank][-1].stop)
    waits = dict.fromkeys(Link, 0.0)
    for link, start, stop in _waits(queues[last]):
        waits[link] += stop - start
    spans = tuple(s for tasks in queues.values() for s in _spans(tasks)) if with_spans else ()
    timeline = Timeline(queues[last][-1].stop, spans, tuple(waits.items()))
    for tasks in queues.values():
        for task in tasks:  # they reference each other, so nothing else would free them soon
            task.then, task.tells, task.parts, task.cause = [], [], [], None
    return timeline


class _World:
    """GPUs, ports and the event queue."""

    def __init__(self, queues: Mapping[int, Sequence[Task]], slow: float) -> None:
        self._queues, self._slow = queues, slow
        self._gpus = {rank: _Gpu() for rank in queues}
        self._ports: dict[tuple, float] = defaultdict(float)
        self._events: list[tuple] = []
        self._numbers = count()

    def run(self) -> None:
        """Run until no events are left."""
        begins = [task for tasks in self._queues.values() for task in tasks if not task.needs]
        for task in begins:
            self._ready(task, 0.0)
        while self._events:
            now, _, happen, what = heappop(self._events)
            happen(*what, now)
        assert all(tasks[-1].stop >= 0 for tasks in self._queues.values()), "a rank waits forever"

    def _at(self, time: float, happen: Callable, *what: object) -> None:
        heappush(self._events, (time, next(self._numbers), happen, what))

    def _ready(self, task: Task, now: float) -> None:
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

    def _over(self, task: Task, now: float) -> None:
        task.stop = now
        for other in task.then:
            other.needs -= 1
            if not other.needs:
                other.cause = task
                self._ready(other, now)

    def _compute(self, gpu: _Gpu, task: Task, now: float) -> None:
        task.start = now
        assert task.op is not None and not isinstance(task.op, Transfer)
        if task.op.stream is Stream.COMPUTE:
            gpu.task, gpu.left, gpu.since, gpu.pace = task, task.seconds, now, 0.0
            self._pace(gpu, now)
        else:
            self._at(now + task.seconds, self._over, task)

    def _pace(self, gpu: _Gpu, now: float) -> None:
        """Continue a kernel at the speed that concurrent work allows."""
        if gpu.task is None:
            return
        gpu.left -= (now - gpu.since) * gpu.pace
        gpu.since, gpu.turns = now, gpu.turns + 1
        gpu.pace = self._slow if gpu.nccl else 1.0
        self._at(now + gpu.left / gpu.pace, self._kernel_over, gpu, gpu.turns)

    def _kernel_over(self, gpu: _Gpu, turn: int, now: float) -> None:
        if turn == gpu.turns and gpu.task:
            task, gpu.task = gpu.task, None
            self._over(task, now)

    def _move(self, task: Task, now: float) -> None:
        """Start a transfer whose ranks are all ready; ports serve first come, first served."""
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

    def _part_over(self, rank: int, part: Part, now: float) -> None:
        if part.by_nccl:
            self._nccl(self._gpus[rank], -1, now)
        for task in part.ends:
            task.moving -= 1
            if not task.moving:
                self._over(task, now)


def _waits(tasks: Sequence[Task]) -> Iterator[tuple[Link, float, float]]:
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


def _spans(tasks: Sequence[Task]) -> Iterator[Span]:
    """A rank's spans, and its kernels' waits."""
    spans, rank, rounds = [], tasks[0].rank, Counter[object]()
    keys = None
    for task in tasks:
        op = task.op
        if isinstance(op, Transfer):
            rounds[op.link, op.cargo] += 1
            spans += [
                Span(rank, str(p.link), str(op.cargo), p.start, p.stop, rounds[op.link, op.cargo])
                for p in task.parts
                if p.stop > p.start
            ]
        elif isinstance(op, Attend | AttendBackward):
            rounds["keys"] += op.kv.buffer != keys
            keys = op.kv.buffer
            spans.append(Span(rank, "compute", "attention", task.start, task.stop, rounds["keys"]))
        elif op is not None and op.stream is Stream.COMPUTE and task.stop > task.start:
            what = _NAMES.get(type(op).__name__, "copy")
            spans.append(Span(rank, "compute", what, task.start, task.stop))
    spans += [Span(rank, "compute", f"wait for {link}", a, b) for link, a, b in _waits(tasks)]
    yield from sorted(spans, key=lambda span: span.start)
