"""The processes that measure together: time, memory and agreement of calls that all make."""

import gc
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from time import monotonic, perf_counter, sleep

import torch
import torch.distributed as dist

from megatron_burst.comm.nodes import my_location, nvlink_domains
from megatron_burst.errors import BurstError
from megatron_burst.tools.terminal import Progress, shown

_PATIENCE = timedelta(minutes=10)  # ranks wait this long while one computes alone
_FAILED_PATIENCE = timedelta(minutes=2)  # one that failed waits this long for the others
_POLL_S = 0.05  # many ranks ask one store
_HEAD_START_CYCLES = 20_000_000  # about 10 ms


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of the run."""

    rank: int
    size: int
    device: torch.device
    nodes: int  # NVLink domains
    machines: int  # fewer where nodes are pretended
    control: dist.ProcessGroup  # gloo: messages between ranks bypass the device's streams
    progress: Progress = field(default_factory=Progress)  # silent unless a command shows it
    reports: Iterator[int] = field(default_factory=count)  # numbers of attempts

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of the attention that is measured."""
        return dist.group.WORLD

    def gather(self, value: object) -> list:
        """Everyone's value, in rank order."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def decide[T](self, value: T) -> T:
        """Rank 0's answer, for all."""
        answer = [value]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        return answer[0]

    def refuse_together(self, check: Callable[[], None]) -> None:
        """Have all ranks refuse what rank 0 refuses, such as the file that it writes.

        Raises:
            BurstError: rank 0's, on all ranks.
        """
        refusal = None
        if self.rank == 0:
            try:
                check()
            except BurstError as error:
                refusal = str(error)
        if refusal := self.decide(refusal):
            raise BurstError(refusal)

    def barrier(self) -> None:
        """Wait for all processes, not for their devices."""
        dist.barrier(self.control)

    def synchronize(self) -> None:
        """Wait for this process's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def started(who: str, device: str | None, nodes: int | None = None) -> Iterator[World]:
    """The world under torchrun, or of one process alone; ends its process groups.

    Without a device it takes GPUs where there are any. `nodes`: that this machine pretends to be,
    of contiguous ranks, connected by sockets.

    Raises:
        BurstError: if there are no GPUs though asked for, or the nodes do not divide the ranks.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BurstError(
            f"{who}: --device cuda must find a GPU, because kernels run there; got none that "
            "torch can use; pass --device cpu to try it out"
        )
    launched = "RANK" in os.environ  # torchrun and Megatron's launchers set it
    if nodes is not None:
        size = int(os.environ["WORLD_SIZE"]) if launched else 1
        node = int(os.environ.get("RANK", 0)) // _ranks_of_a_node(who, size, nodes)
        os.environ["NCCL_HOSTID"] = f"pretended-{node}"  # before NCCL starts
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    alone = {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_PATIENCE, **alone)
    stuck = device == "cuda"  # after a failure, kernels may wait forever for another rank's
    try:
        with shown(dist.get_rank()) as progress:
            yield replace(world_of(device), progress=progress)
        stuck = False
    finally:
        if not stuck:
            dist.destroy_process_group()


def _ranks_of_a_node(who: str, size: int, nodes: int) -> int:
    """Ranks of each pretended node; they are contiguous."""
    if size % nodes:
        divisors = " or ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise BurstError(
            f"{who}: --nodes must divide the number of ranks, because each emulated node has "
            f"equally many; got {nodes} nodes and {size} rank{'s' * (size > 1)}; choose "
            f"{divisors}, or start more ranks with torchrun"
        )
    return size // nodes


def world_of(device: str) -> World:
    """The world of an initialised default process group; all ranks call it together."""
    control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, (my_location(), platform.node()), group=control)
    index = torch.cuda.current_device() if device == "cuda" else None
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=torch.device(device, index),
        nodes=len(set(nvlink_domains([location for location, _ in places]))),
        machines=len({machine for _, machine in places}),
        control=control,
    )


def timed_ms(run: Callable[[], object], world: World) -> float:
    """Milliseconds that one call takes on this rank; all ranks start together.

    On GPUs the CPU runs ahead, as it does in training, so what it does before a kernel counts only
    where the GPU has to wait for it: the GPU spins, then waits for the others, then starts.
    """
    world.barrier()
    if world.device.type == "cpu":
        start = perf_counter()
        run()
        return (perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    dist.all_reduce(torch.zeros(1, device=world.device), group=world.group)
    first.record()
    run()
    last.record()
    world.synchronize()
    return first.elapsed_time(last)


def attempt(action: Callable[[], object], world: World) -> str | None:
    """Why an action failed, in one line, or None; the same on all ranks.

    Raises:
        BurstError: if it failed on some ranks only. If others are still in the action after two
            minutes, a rank that failed raises alone, which ends the run.
    """
    try:
        action()
        failure = None
    except Exception as error:  # any error of a peer becomes a row with its reason
        kind = "" if isinstance(error, BurstError) else f"{type(error).__name__}: "
        failure = (kind + " ".join(str(error).split()))[:400]
    failures = _reports(world, failure)
    failed = [rank for rank, reason in enumerate(failures) if reason is not None]
    if failed and len(failed) < world.size:
        raise _failed_alone(f"ranks {failed} of {world.size} only", failures[failed[0]])
    if not failed:
        world.synchronize()
    return failures[0]


def _reports(world: World, failure: str | None) -> list[str | None]:
    """Every rank's failure, in rank order. Goes through the store, where a rank that never comes
    is noticed: in a rank's own time, with a BurstError."""
    store, number = world.control.get_group_store(), next(world.reports)
    keys = {rank: f"report {number} of {rank}" for rank in range(world.size)}
    store.set(keys[world.rank], failure or "")
    patience = _PATIENCE if failure is None else _FAILED_PATIENCE
    if missing := late(store, keys, patience.total_seconds()):
        silent = f"ranks {missing} said nothing for {patience / timedelta(minutes=1):g} minutes"
        raise _failed_alone(f"rank {world.rank}, while {silent}", failure or "perhaps theirs")
    return [store.get(key).decode() or None for key in keys.values()]


def late(store: dist.Store, keys: Mapping[int, str], seconds: float) -> list[int]:
    """Ranks whose keys are not in the store after so many seconds. Polls: a wait would block the
    store for other threads."""
    end, missing = monotonic() + seconds, list(keys)
    while missing := [rank for rank in missing if not store.check([keys[rank]])]:
        if monotonic() > end:
            break
        sleep(_POLL_S)
    return missing


def _failed_alone(where: str, failure: str) -> BurstError:
    return BurstError(
        "benchmarks: an implementation must run or fail on all ranks, because otherwise ranks wait "
        f"in its collectives; got a failure on {where}: {failure}; leave that implementation or "
        "size out"
    )


def clean_up(world: World) -> None:
    """Collect reference cycles left by failed calls, and free unused memory."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
