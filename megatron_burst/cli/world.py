"""The processes that measure together, and their device."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_burst.cli.terminal import Progress, shown
from megatron_burst.comm.nodes import my_home, nvlink_domains
from megatron_burst.errors import BurstError

_PATIENCE = timedelta(minutes=10)  # ranks wait this long while one computes alone


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of the run."""

    rank: int
    size: int
    device: torch.device
    nodes: int  # NVLink domains
    machines: int  # fewer where nodes are pretended
    control: dist.ProcessGroup  # gloo: what ranks tell each other passes by the device's streams
    progress: Progress = field(default_factory=Progress)  # silent unless a command shows it

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
        """Have all refuse what rank 0 refuses of its own, such as the file that it writes.

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

    Args:
        who: refuses.
        device: "cuda", "cpu"; None takes GPUs where there are any.
        nodes: that this machine pretends to be, of contiguous ranks: with sockets between them.

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
    stuck = device == "cuda"  # after a failure kernels may wait forever for another rank's
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
            f"{who}: --nodes must divide the ranks of the run, because each pretended node has "
            f"equally many; got {nodes} nodes and {size} rank{'s' * (size > 1)}; choose "
            f"{divisors}, or start more ranks with torchrun"
        )
    return size // nodes


def world_of(device: str) -> World:
    """The world of an initialised default process group; all ranks call it together."""
    control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    homes = [None] * dist.get_world_size()
    dist.all_gather_object(homes, (my_home(), platform.node()), group=control)
    index = torch.cuda.current_device() if device == "cuda" else None
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=torch.device(device, index),
        nodes=len(set(nvlink_domains([home for home, _ in homes]))),
        machines=len({machine for _, machine in homes}),
        control=control,
    )
