"""How long a pass takes: runs its operations with compute and each link as resources.

Every rank has its own clock. A transfer starts when both ends have posted it and their ports are
free, and runs beside kernels; while NCCL moves it, kernels have fewer multiprocessors. A rank
waits only where its schedule waits.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.operations import Compute, Op, Post, Wait
from megatron_burst.plan.topology import Link


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted.

    Attributes:
        rank: of whom.
        lane: "compute", "intra" or "inter".
        what: e.g. "attention", "merge", "wait", "read".
        start: seconds since the pass began.
        stop: when it was over.
        round: to which it belongs; -1 where that does not matter.
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
        inter_share: of one network card for a rank that sends between hosts.
    """

    hardware: Hardware
    inter_share: float = 1.0

    def seconds(self, link: Link, pulled: bool, num_bytes: float) -> float:
        """Time of a transfer that has its link to itself."""
        links = self.hardware.links
        if link is Link.INTER:
            return links.inter.seconds(num_bytes, self.inter_share)
        return (links.pull if pulled else links.intra).seconds(num_bytes)


def simulate(
    programmes: Mapping[int, Sequence[Op]], wiring: Wiring, with_spans: bool = True
) -> Timeline:
    """Run the operations of all ranks, or of some that stand for all.

    Args:
        programmes: operations by cp rank: all ranks of a group, or some of them where all do alike;
            a rank that is missing is taken to do what its partner does, at the same time.
        wiring: what links give.
        with_spans: whether to write down what happened.
    """
    world = _World(programmes, wiring, with_spans)
    for ops in zip(*programmes.values(), strict=True):
        world.run(dict(zip(programmes, ops, strict=True)))
    last = max(world.clock, key=world.clock.__getitem__)
    waits = tuple((link, world.waits[last, link]) for link in Link)
    return Timeline(world.clock[last], tuple(world.spans), waits)


class _World:
    """Clocks, ports and transfers of a simulation."""

    def __init__(
        self, programmes: Mapping[int, Sequence[Op]], wiring: Wiring, with_spans: bool
    ) -> None:
        self.clock = dict.fromkeys(programmes, 0.0)
        self.spans: list[Span] = []
        self._with_spans = with_spans
        self.waits: dict[tuple[int, Link], float] = defaultdict(float)
        self._slow = 1 - wiring.hardware.gpu.nccl_share
        self._seconds = cache(wiring.seconds)  # transfers are of few sizes
        self._port: dict[tuple[int, Link, str], float] = defaultdict(float)
        self._done: dict[tuple, tuple[float, Link]] = {}
        self._by_nccl: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def run(self, ops: Mapping[int, Op]) -> None:
        """The next operation of every rank; all are of one kind."""
        first = next(iter(ops.values()))
        if isinstance(first, Post):
            self._transfer(cast("Mapping[int, Post]", ops))
            return
        for rank, op in ops.items():
            if isinstance(op, Wait):
                self._wait(rank, op)
            elif isinstance(op, Compute):
                self._compute(rank, op)

    def _write(self, *span: Any) -> None:
        if self._with_spans:
            self.spans.append(Span(*span))

    def _compute(self, rank: int, op: Compute) -> None:
        for what, seconds in op.parts:
            if seconds:
                start = self.clock[rank]
                self.clock[rank] = self._stretched(rank, start, seconds)
                self._write(rank, "compute", what, start, self.clock[rank], op.round)

    def _stretched(self, rank: int, start: float, seconds: float) -> float:
        """When kernels are done that start now, slower while NCCL has some multiprocessors."""
        slow = self._slow
        now, left = start, seconds
        busy = self._by_nccl[rank] = [b for b in self._by_nccl[rank] if b[1] > start]
        for begin, end in sorted(busy):
            if now + left <= begin:
                break
            free = max(0.0, begin - now)
            now, left = now + free, left - free
            shared = max(0.0, min(left, (end - now) * slow))
            now, left = now + shared / slow, left - shared
        return now + left

    def _wait(self, rank: int, op: Wait) -> None:
        until, link = self._done[rank, op.key]
        now = self.clock[rank]
        if until > now:
            self._write(rank, "compute", f"wait for {link}", now, until)
            self.waits[rank, link] += until - now
            self.clock[rank] = until

    def _transfer(self, ops: Mapping[int, Post]) -> None:
        ready = {rank: self._ready(rank, op) for rank, op in ops.items()}
        came: dict[int | None, tuple[float, float]]
        came = {rank: self._receive(rank, op, ready) for rank, op in ops.items()}
        for rank, op in ops.items():
            start, stop = came[rank]
            sent = came.get(op.dest, came[rank])[1]  # who is not simulated does as this one
            self._done[rank, op.key] = max(stop, sent), op.link
            if stop > start:
                if not op.pulled:
                    self._by_nccl[rank].append((start, stop))
                what, round_ = _name(op.key)
                self._write(rank, str(op.link), what, start, stop, round_)

    def _ready(self, rank: int, op: Post) -> float:
        """When a rank has reached a transfer and what the transfer comes after is over."""
        return max([self.clock[rank], *(self._done[rank, key][0] for key in op.after)])

    def _receive(self, rank: int, op: Post, ready: Mapping[int, float]) -> tuple[float, float]:
        """When a transfer to a rank starts and stops; who is not simulated is ready with it."""
        sources = (op.ranks or ready) if op.source is None else (op.source,)
        ports: list[tuple[int, Link, str]] = [(rank, op.link, "in")]
        if op.source is not None and op.source in ready:
            ports.append((op.source, op.link, "out"))
        free = [self._port[port] for port in ports]
        start = max([ready[rank], *(ready[one] for one in sources if one in ready), *free])
        stop = start + self._seconds(op.link, op.pulled, op.num_bytes)
        for port in ports:
            self._port[port] = stop
        return start, stop


def _name(key: tuple) -> tuple[str, int]:
    """What a transfer is called in pictures, and its round."""
    if isinstance(key[0], int):
        return str(key[2]), key[0]
    return {"there": "read", "back": "grad"}.get(key[0], key[0]), key[1]
