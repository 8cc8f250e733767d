"""What launchers tell a rank, and a store where ranks meet, which can say who is missing."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_burst.errors import BurstError
from megatron_burst.tools.world import late

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


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


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """The launch by torchrun and its like, or by srun; None if there is none.

    torchrun's variables count before Slurm's: it may itself have been started by srun.

    Raises:
        BurstError: if a variable is missing or no number.
    """

    def number(name: str, default: int | None = None) -> int:
        text = environ.get(name, "" if default is None else str(default))
        if not (digits := re.match(r"\d+", text)):  # Slurm's tasks of nodes are such as 8(x2)
            raise BurstError(
                f"doctor: {name} must be a number, because ranks find each other by it; got "
                f"{text!r}; start it with torchrun, or with srun after export MASTER_ADDR=... "
                "MASTER_PORT=..., or unset RANK to check only this machine"
            )
        return int(digits[0])

    by_torchrun = "RANK" in environ
    if not by_torchrun and not {*_SRUN[:2]} <= environ.keys():
        return None
    rank, size, local_rank, local_size = _TORCHRUN if by_torchrun else _SRUN
    return Launch(
        number(rank), number(size), number(local_rank, 0), number(local_size, number(size)),
        environ.get("MASTER_ADDR", "localhost"), number("MASTER_PORT"),
        joins=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks tell each other something, and notice who does not."""

    launch: Launch
    store: dist.Store
    timeout_s: float  # for each step

    def post(self, topic: str, value: object) -> None:
        """Say something under a topic: data that JSON holds, so that reading it runs no code."""
        self.store.set(f"doctor/{topic}/{self.launch.rank}", json.dumps(value))

    def collect(self, topic: str, ranks: Iterable[int], patience: float = 1.0) -> dict[int, Any]:
        """What ranks said under a topic; those that said nothing in time are not in it."""
        keys = {rank: f"doctor/{topic}/{rank}" for rank in ranks}
        missing = late(self.store, keys, patience * self.timeout_s)
        there = {rank: key for rank, key in keys.items() if rank not in missing}
        return {rank: json.loads(self.store.get(key)) for rank, key in there.items()}

    def gather(self, topic: str, value: object, patience: float = 1.0) -> dict[int, Any]:
        """What ranks say under a topic, this rank `value`; rank 0 tells all who spoke in time."""
        self.post(topic, value)
        if self.launch.rank == 0:
            present = self.collect(topic, range(self.launch.size), patience)
            self.post(f"{topic} by", [*present])
        present = self.collect(f"{topic} by", [0], patience + 1).get(0, [])  # rank 0 may come last
        return self.collect(topic, present)

    def part(self, ranks: Iterable[int]) -> None:
        """End together: after rank 0, which keeps the store until these have heard of it."""
        if self.launch.rank:
            self.collect("end", [0], patience=2.0)
        self.post("end", True)
        if self.launch.rank == 0:
            self.collect("end", ranks)


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
