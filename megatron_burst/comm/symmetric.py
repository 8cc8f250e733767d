"""Slots in torch's symmetric memory, read by copy engine (not on the reading path)."""

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import _symmetric_memory as symmetric_memory

from megatron_burst.comm.pulled import PulledSlots
from megatron_burst.comm.store import PREFIX, WHO, StoreConsensus
from megatron_burst.comm.transport import BufferSize, Placement
from megatron_burst.errors import BurstError
from megatron_burst.schedule.spec import Cargo

_KEY = re.compile(r"(.*?)/(\d+)((?:/\d+)?)")  # of a rendezvous: kind, number, rank
_FAILURES = (RuntimeError, AttributeError, ImportError)  # raised by various versions of torch


class Numbered(dist.Store):
    """A store under whose keys the ranks of one group meet.

    torch numbers the keys of a rendezvous by a counter of the process (`StoreExchange`, in
    CUDASymmetricMemoryUtils.hpp). Ranks that met different numbers of times before, in other
    groups, would wait for each other's keys until the time-out. Here keys count from the begin of
    the group's own rendezvous.

    Args:
        store: of the group.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._rounds, self._first = store, 0, 0

    def begin(self) -> None:
        """Another rendezvous of the group begins."""
        self._rounds, self._first = self._rounds + 1, -1

    def _own(self, key: str) -> str:
        match = _KEY.fullmatch(key)
        if match is None:  # of a torch that numbers nothing
            return f"{PREFIX}/{key}/{self._rounds}"
        kind, number, rank = match.groups()
        if self._first < 0:
            self._first = int(number)
        return f"{PREFIX}/{kind}/{self._rounds}/{int(number) - self._first}{rank}"

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = () if timeout is None else (timeout,)
        self._store.wait([self._own(key) for key in keys], *limit)


class SymmetricError(BurstError):
    """A rank has too little memory for slots that others read; raised on all ranks of its node.

    Attributes:
        reason: what went wrong.
    """

    def __init__(self, num_bytes: int, reason: str) -> None:
        self.reason = f"no {num_bytes / 2**20:.1f} MiB of symmetric memory on {reason}"
        super().__init__(
            "burst attention: with transfer=pull, each rank must allocate memory that the other "
            f"ranks of its node can read, because they copy from it; got {self.reason}; free "
            "memory, or pass --burst-tune force.transfer=send or auto"
        )


class SymmetricPool:
    """The symmetric buffers of a group, allocated by all its ranks together when a `BufferSize`
    changes, so in the same pass on all of them, whatever its stream.

    Args:
        group: the ranks that read each other's memory; on one node.
        cp_ranks: their cp ranks, by rank in the group.
        cp_rank: this rank.
        consensus: of these ranks only: other nodes may have slots of other sizes, so they need not
            grow when these do.
    """

    def __init__(
        self, group: dist.ProcessGroup, cp_ranks: Sequence[int], cp_rank: int,
        consensus: StoreConsensus,
    ) -> None:  # fmt: skip
        self._numbered = Numbered(group.get_group_store())
        # torch's rendezvous finds the store by this name, as long as a group of that name is alive;
        # it needs no backend, and ranks may have different names
        self._name = f"{PREFIX}-{uuid4().hex}"
        self._registered = dist.ProcessGroup(self._numbered, group.rank(), group.size())
        c10d._register_process_group(self._name, self._registered)
        weakref.finalize(self, c10d._unregister_process_group, self._name).atexit = False
        self._cp_ranks, self._cp_rank = cp_ranks, cp_rank
        self._consensus = consensus
        self._slots: dict[Cargo, PulledSlots] = {}
        self._of_graphs: defaultdict[Cargo, list[PulledSlots]] = defaultdict(list)
        self._sizes: defaultdict[Cargo, BufferSize] = defaultdict(BufferSize)

    @property
    def num_bytes(self) -> int:
        """Device memory of this rank's buffers, not counted by the caching allocator."""
        slots = chain(self._slots.values(), *self._of_graphs.values())
        return sum(len(each) * each.slot_bytes for each in slots)

    def slots(self, cargo: Cargo, count: int, num_bytes: int, placement: Placement) -> PulledSlots:
        """At least `count` slots of at least `num_bytes`; the same ones if they suffice.

        Raises:
            SymmetricError: on all ranks of the group, if one has too little memory.
        """
        largest, device = self._sizes[cargo], placement.device
        if not largest.changes(count, num_bytes) and cargo in self._slots:
            return self._slots[cargo].begin()
        count, num_bytes = largest.size
        self._wait_for_all(device)
        self._slots.pop(cargo, None)
        own, reason = self._allocate(count, num_bytes, device)
        # other ranks would hang in the rendezvous if one cannot allocate
        if reason := next(filter(None, self._consensus.all_gather(reason, WHO)), None):
            del self._sizes[cargo]  # what the next call needs may fit
            raise SymmetricError(count * num_bytes, reason)
        self._slots[cargo] = self._rendezvous_all(own)
        return self._slots[cargo].begin()

    def slots_of_graphs(
        self, cargo: Cargo, count: int, num_bytes: int, launch: Callable[..., None]
    ) -> PulledSlots | None:
        """Slots for a call that a CUDA graph captures, behind a barrier, which `launch` calls; None
        if too few or too small ones are there.

        Graphs number rounds from 0 in each replay, but other calls number them on. So the slots of
        the latest call become those of all graphs for good, and the next call allocates others.
        """
        own, latest = self._of_graphs[cargo], self._slots.get(cargo)
        large = [slots for slots in own if slots.suffices(count, num_bytes)]
        if not large and latest is not None and latest.suffices(count, num_bytes):
            own.append(self._slots.pop(cargo))
            large = [latest]
        return large[0].in_graph(launch) if large else None

    @torch.inference_mode(False)  # kept: training after an evaluation writes to them
    def _allocate(
        self, count: int, num_bytes: int, device: torch.device
    ) -> tuple[list[Tensor], str]:
        """This rank's buffers, or none and the reason if memory is short; not collective."""
        reason = ""
        for _ in range(2):
            try:
                return [
                    symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
                    for _ in range(count)
                ], ""
            except _FAILURES as error:
                reason = f"cp rank {self._cp_rank}: {str(error).splitlines()[0]}"
            torch.cuda.empty_cache()  # frees what torch's allocator caches
        return [], reason

    @torch.inference_mode(False)
    def _rendezvous_all(self, own: Sequence[Tensor]) -> PulledSlots:
        """Slots from the buffers of all ranks; each must have allocated its own."""
        handles = [self._rendezvous(buffer) for buffer in own]
        of_all = [
            {
                cp_rank: handle.get_buffer(position, tuple(buffer.shape), torch.uint8)
                for position, cp_rank in enumerate(self._cp_ranks)
            }
            for handle, buffer in zip(handles, own, strict=True)
        ]
        # waiting longer than NCCL would is an error instead of a hang
        patience = int(self._consensus.timeout_s * 1000)
        barriers = [partial(handle.barrier, timeout_ms=patience) for handle in handles]
        return PulledSlots(of_all, barriers, self._cp_rank)

    def _rendezvous(self, buffer: Tensor) -> Any:
        self._numbered.begin()
        return symmetric_memory.rendezvous(buffer, self._name)

    def _wait_for_all(self, device: torch.device) -> None:
        """Wait until no rank reads memory that is about to be freed."""
        torch.cuda.synchronize(device)
        self._consensus.all_gather("symmetric memory", WHO)

    def release(self) -> None:
        """Free the memory, except of graphs; all ranks call it together."""
        if self._slots:
            self._wait_for_all(torch.device("cuda", torch.cuda.current_device()))
            self._slots.clear()
            self._sizes.clear()

    def refusal(self, all_nodes: StoreConsensus) -> str | None:
        """Why ranks of some node cannot read each other's memory, or None; all ranks call it
        together.

        `all_nodes`: the consensus of all nodes' ranks.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        own, reason = self._allocate(1, 1 << 12, device)
        failure = next(filter(None, all_nodes.all_gather(reason, WHO)), None)
        if failure is None:
            try:
                self._rendezvous_all(own)
            except _FAILURES as error:
                reason = str(error).splitlines()[0]
            failure = next(filter(None, all_nodes.all_gather(reason, WHO)), None)
        return failure
