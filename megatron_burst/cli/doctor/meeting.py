"""Who is there: ranks meet in a store, which unlike a collective can say who is missing."""

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Timer

import torch.distributed as dist

from megatron_burst.cli.doctor.launched import Launch
from megatron_burst.cli.doctor.report import Check, fail, ok
from megatron_burst.errors import BurstError

_POLL_S = 0.05
_LAST_WORD_S = 3.0


@dataclass(slots=True)
class Meeting:
    """The ranks that came, and the store where they meet."""

    launch: Launch
    store: dist.Store
    timeout_s: float  # for each step
    present: tuple[int, ...] = ()  # global ranks that came in time; the same on all of them

    @property
    def leads(self) -> bool:
        """Whether this rank says what was found."""
        return self.launch.rank == 0

    def post(self, topic: str, value: object) -> None:
        """Say something under a topic."""
        self.store.set(_key(topic, self.launch.rank), pickle.dumps(value))

    def collect(self, topic: str, ranks: Sequence[int]) -> dict[int, object]:
        """What ranks said under a topic; those that said nothing in time are not in it."""
        deadline, found = time.monotonic() + self.timeout_s, {}
        while True:
            for rank in ranks:
                if rank not in found and self.store.check([_key(topic, rank)]):
                    found[rank] = pickle.loads(self.store.get(_key(topic, rank)))
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return dict(sorted(found.items()))
            time.sleep(_POLL_S)

    def share(self, topic: str, value: object) -> dict[int, object]:
        """What all that are present say under a topic."""
        self.post(topic, value)
        return self.collect(topic, self.present)

    def part(self, verdict: bool | None) -> bool:
        """End together: rank 0's verdict on all; it stays until the others have read it."""
        if self.leads:
            self.store.set(_key("verdict", 0), pickle.dumps(verdict))
            self.collect("bye", [rank for rank in self.present if rank])
            return bool(verdict)
        found = self.collect("verdict", [0])
        self.post("bye", True)
        return bool(found.get(0, True))  # no word from rank 0 breaks a run


def _key(topic: str, rank: int) -> str:
    return f"doctor/{topic}/{rank}"


def open_store(launch: Launch, timeout_s: float) -> dist.Store:
    """The job's store, made by rank 0 unless a launcher keeps one.

    Raises:
        BurstError: if it cannot be reached.
    """
    try:
        keeps, patience = launch.rank == 0 and not launch.joins, timedelta(seconds=timeout_s)
        return dist.TCPStore(
            launch.address, launch.port, is_master=keeps, timeout=patience, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:  # DistNetworkError and others are sub-classes
        raise BurstError(
            "doctor: every rank must reach the store of rank 0, because ranks find each other "
            f"there; got no connection to {launch.address}:{launch.port} from rank {launch.rank} "
            f"({str(error).splitlines()[0][:160]}); see that rank 0 runs, that MASTER_ADDR is an "
            "address of its node that others reach, and that no firewall closes the port"
        ) from None


def meet(launch: Launch, store: dist.Store, timeout_s: float, mine: object) -> tuple[Meeting, dict]:
    """Wait for everybody; what each said of itself, this rank `mine`.

    Raises:
        BurstError: if this rank came too late, or rank 0 did not come.
    """
    meeting = Meeting(launch, store, timeout_s)
    meeting.post("here", mine)
    if meeting.leads:
        here = meeting.collect("here", range(launch.size))
        store.set(_key("present", 0), pickle.dumps([*here]))
    patient = Meeting(launch, store, 2 * timeout_s)  # rank 0 may have come last
    present = patient.collect("present", [0]).get(0)
    if present is None or launch.rank not in present:
        why = "rank 0 never said who is there" if present is None else "this rank came too late"
        raise BurstError(
            f"doctor: all ranks must come within {timeout_s:g} s, because they check each other; "
            f"got rank {launch.rank} alone: {why}; start them together, or raise --timeout-s"
        )
    meeting.present = tuple(present)
    return meeting, meeting.collect("here", present)


def check_attendance(meeting: Meeting) -> Check:
    """Who is missing, and where they should be."""
    launch = meeting.launch
    missing = [rank for rank in range(launch.size) if rank not in meeting.present]
    if not missing:
        return ok("attendance", f"all {launch.size} ranks are there")
    nodes = sorted({launch.node_of(rank) for rank in missing})
    what = f"ranks {missing} of {launch.size} did not come within {meeting.timeout_s:g} s"
    change = f"see that {', '.join(nodes)} runs them and reaches {launch.address}:{launch.port}"
    return fail("attendance", what, change, ", ".join(nodes))


@dataclass
class Watch:
    """Ends the process if a stage hangs; rank 0 first gives up with a check of who is late.

    A collective that waits for a lost rank cannot be called off; on GPUs it blocks for minutes.
    """

    meeting: Meeting
    stage: str
    limit_s: float
    give_up: Callable[[Check], None]

    def __enter__(self) -> None:
        self.timer = Timer(self.limit_s, self._expire)
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, RuntimeError):  # a peer is gone; the others still wait for theirs
            self.meeting.post(f"failed {self.stage}", str(error).splitlines()[0][:200])
            self.timer.join()
        self.timer.cancel()
        if kind is None:
            self.meeting.post(f"done {self.stage}", True)

    def _expire(self) -> None:
        launch = self.meeting.launch
        try:
            # the main thread may hold the other connection's lock
            store = open_store(replace(launch, joins=True), self.meeting.timeout_s)
            if self.meeting.leads:
                self.give_up(self._failure(Meeting(launch, store, 1.0, self.meeting.present)))
                sys.stdout.flush()
            else:
                time.sleep(_LAST_WORD_S)  # rank 0 keeps the store and has the floor
        finally:
            os._exit(1)

    def _failure(self, asked: Meeting) -> Check:
        done = asked.collect(f"done {self.stage}", asked.present)
        late = [rank for rank in asked.present if rank not in done]
        asked.timeout_s = 0.0
        reasons = asked.collect(f"failed {self.stage}", late)
        what = f"ranks {late} did not finish {self.stage} within {self.limit_s:g} s"
        what += "".join(f"; rank {rank}: {reason}" for rank, reason in reasons.items())
        stuck = [rank for rank in late if rank not in reasons]
        nodes = sorted({asked.launch.node_of(rank) for rank in stuck or late})
        change = f"look at the links and logs of {', '.join(nodes)}, with NCCL_DEBUG=INFO"
        return fail("time-out", what, change, f"ranks {late}")
