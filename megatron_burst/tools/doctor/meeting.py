"""Who is there: what launchers tell a rank, and the store where ranks meet, which unlike a
collective can say who is missing."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count, product
from threading import Timer

import torch.distributed as dist

from megatron_burst.errors import BurstError
from megatron_burst.tools.doctor.report import Check, fail, ok
from megatron_burst.tools.world import late

_PORTS = range(20000, 30000)  # for srun, which names none
_LAST_WORD_S = 3.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str  # where ranks meet
    port: int
    joins: bool = False  # somebody else (torchrun's agent) keeps the store
    nodes: tuple[str, ...] = ()  # node names in order, where the launcher knows them

    def node_of(self, rank: int) -> str:
        """What is known of the node where a rank should be."""
        node = rank // self.local_size
        return self.nodes[node] if node < len(self.nodes) else f"node {node}"


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """The launch by torchrun and its like, or by srun; None if there is none.

    torchrun's variables count before Slurm's: it may itself have been started by srun.

    Raises:
        BurstError: if a variable is missing or no number.
    """

    def number(name: str, default: int | None = None) -> int:
        text = environ.get(name, "" if default is None else str(default))
        if not text.isdigit():
            raise BurstError(
                f"doctor: {name} must be a number, because ranks find each other by it; got "
                f"{text!r}; start it with torchrun or srun, or unset RANK to check only this "
                "machine"
            )
        return int(text)

    if "RANK" in environ:
        size, address = number("WORLD_SIZE"), environ.get("MASTER_ADDR", "localhost")
        local = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", size)
        joins = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Launch(number("RANK"), size, *local, address, number("MASTER_PORT"), joins)
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= environ.keys():
        return None
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    size = number("SLURM_STEP_NUM_TASKS")
    per_node = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    usual_port = _PORTS[number("SLURM_JOB_ID", 0) % len(_PORTS)]
    return Launch(
        number("SLURM_PROCID"), size, number("SLURM_LOCALID", 0),
        int(per_node[0]) if per_node else max(1, size // max(1, len(nodes))),
        environ.get("MASTER_ADDR") or next(iter(nodes), "localhost"),
        number("MASTER_PORT", usual_port), nodes=nodes,
    )  # fmt: skip


def expand_nodes(text: str) -> tuple[str, ...]:
    """The node names of a Slurm list such as "gpu[01-03,7],login"."""

    def choices(place: int, piece: str) -> list[str]:
        if place % 2 == 0:  # outside of brackets
            return [piece]
        spans = [one.partition("-") for one in piece.split(",")]
        return [f"{number:0{len(first)}d}" for first, _, last in spans
                for number in range(int(first), int(last or first) + 1)]  # fmt: skip

    return tuple(
        "".join(name)
        for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
        for name in product(*map(choices, count(), re.split(r"[\[\]]", part)))
    )


@dataclass(slots=True)
class Meeting:
    """The ranks that came, and the store where they meet."""

    launch: Launch
    store: dist.Store
    timeout_s: float  # for each step
    present: tuple[int, ...] = ()  # global ranks that came in time; the same on all of them

    def post(self, topic: str, value: object) -> None:
        """Say something under a topic: data that JSON holds, so that reading it runs no code."""
        self.store.set(f"doctor/{topic}/{self.launch.rank}", json.dumps(value))

    def collect(self, topic: str, ranks: Sequence[int], patience: float = 1.0) -> dict[int, object]:
        """What ranks said under a topic; those that said nothing in time are not in it."""
        keys = {rank: f"doctor/{topic}/{rank}" for rank in sorted(ranks)}
        missing = late(self.store, keys, patience * self.timeout_s)
        there = {rank: key for rank, key in keys.items() if rank not in missing}
        return {rank: json.loads(self.store.get(key)) for rank, key in there.items()}

    def share(self, topic: str, value: object) -> dict[int, object]:
        """What all that are present say under a topic."""
        self.post(topic, value)
        return self.collect(topic, self.present)

    def part(self, verdict: bool) -> bool:
        """End together: rank 0's verdict on all; it stays until the others have read it."""
        if self.launch.rank == 0:
            self.post("verdict", verdict)
            self.collect("bye", [rank for rank in self.present if rank])
            return verdict
        found = self.collect("verdict", [0])
        self.post("bye", True)
        return bool(found.get(0, True))  # no word from rank 0 breaks a run

    def attendance(self) -> Check:
        """Who is missing, and where they should be."""
        launch = self.launch
        missing = [rank for rank in range(launch.size) if rank not in self.present]
        if not missing:
            return ok("attendance", f"all {launch.size} ranks are there")
        nodes = ", ".join(sorted({launch.node_of(rank) for rank in missing}))
        what = f"ranks {missing} of {launch.size} did not come within {self.timeout_s:g} s"
        change = f"see that {nodes} runs them and reaches {launch.address}:{launch.port}"
        return fail("attendance", what, change, nodes)


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
            "doctor: every rank must reach the store of rank 0, because ranks meet there; got "
            f"no connection to {launch.address}:{launch.port} from rank {launch.rank} "
            f"({str(error).splitlines()[0][:160]}); check that rank 0 runs, that other nodes "
            "can reach MASTER_ADDR, and that no firewall blocks the port"
        ) from None


def meet(launch: Launch, store: dist.Store, timeout_s: float, mine: object) -> tuple[Meeting, dict]:
    """Wait for everybody; what each said of itself, this rank `mine`.

    Raises:
        BurstError: if this rank came too late, or rank 0 did not come.
    """
    meeting = Meeting(launch, store, timeout_s)
    meeting.post("here", mine)
    if launch.rank == 0:
        meeting.post("present", tuple(meeting.collect("here", range(launch.size))))
    # rank 0 may have come last
    meeting.present = tuple(meeting.collect("present", [0], patience=2.0).get(0, ()))
    if launch.rank not in meeting.present:
        raise BurstError(
            f"doctor: all ranks must arrive within {timeout_s:g} s, because they check each "
            f"other; got rank {launch.rank} beside {len(meeting.present)} that rank 0 has seen; "
            "start them together, or raise --timeout-s"
        )
    return meeting, meeting.collect("here", meeting.present)


@contextmanager
def watched(meeting: Meeting, stage: str, give_up: Callable[[Check], None]) -> Iterator[None]:
    """Ends the process if a stage takes too long; rank 0 first gives up with a check of who is
    late. A collective that waits for a lost rank cannot be called off; on GPUs it blocks for
    minutes."""

    def expire() -> None:
        try:
            # the main thread may hold the other connection's lock
            store = open_store(replace(meeting.launch, joins=True), meeting.timeout_s)
            if meeting.launch.rank == 0:
                asked = Meeting(meeting.launch, store, 1.0, meeting.present)
                give_up(_failure(asked, stage, meeting.timeout_s))
                sys.stdout.flush()
            else:
                time.sleep(_LAST_WORD_S)  # rank 0 keeps the store and has the floor
        finally:
            os._exit(1)

    timer = Timer(meeting.timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:  # a peer is gone; the others still wait for theirs
        meeting.post(f"failed {stage}", str(error).splitlines()[0][:200])
        timer.join()
    finally:
        timer.cancel()
    meeting.post(f"done {stage}", True)


def _failure(asked: Meeting, stage: str, limit_s: float) -> Check:
    done = asked.collect(f"done {stage}", asked.present)
    late = [rank for rank in asked.present if rank not in done]
    reasons = asked.collect(f"failed {stage}", late, patience=0.0)
    what = f"ranks {late} did not finish {stage} within {limit_s:g} s"
    what += "".join(f"; rank {rank}: {reason}" for rank, reason in reasons.items())
    stuck = [rank for rank in late if rank not in reasons]
    nodes = ", ".join(sorted({asked.launch.node_of(rank) for rank in stuck or late}))
    change = f"look at the links and logs of {nodes}, with NCCL_DEBUG=INFO"
    return fail("time-out", what, change, f"ranks {late}")
