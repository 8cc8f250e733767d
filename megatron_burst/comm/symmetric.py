"""Slots in torch's symmetric memory: GPUs of one node read each other's, by copy engine."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from megatron_burst.comm.carrier import PulledSlots, Where
from megatron_burst.comm.watch import WHO, Board
from megatron_burst.errors import BurstError
from megatron_burst.schedule.call import Cargo

_FAILURES = (RuntimeError, AttributeError, ImportError)  # torch's, of this or that version


class SymmetricError(BurstError):
    """A rank has no room for memory that others can read; raised on all ranks of its node.

    Attributes:
        reason: what was got.
    """

    def __init__(self, num_bytes: int, reason: str) -> None:
        self.reason = f"{num_bytes / 2**20:.1f} MiB of symmetric memory failed on {reason}"
        super().__init__(
            f"{WHO}: to pull, each rank must allocate memory that the other ranks of its node "
            f"can read, because they copy from it; got {self.reason}; free some, or pass "
            "--burst-tune transfer=send or transfer=auto"
        )


class SymmetricPool:
    """The symmetric buffers of a group, made at first use by all its ranks together, and grown.

    Args:
        group: the ranks that read each other's memory; on one node.
        cp_ranks: their cp ranks, by rank in the group.
        cp_rank: this rank.
        board: where these ranks agree, without those of other nodes: theirs may have slots of
            other sizes, so they need not grow when these do.
    """

    def __init__(
        self, group: dist.ProcessGroup, cp_ranks: Sequence[int], cp_rank: int, board: Board
    ) -> None:
        self._group_name = group.group_name  # the group itself must not live on for us
        self._cp_ranks, self._cp_rank = cp_ranks, cp_rank
        self._board = board
        self._slots: dict[tuple, PulledSlots] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of this rank's buffers, none of the caching allocator's."""
        return sum(len(slots) * slots.slot_bytes for slots in self._slots.values())

    def slots(self, cargo: Cargo, count: int, num_bytes: int, where: Where) -> PulledSlots:
        """At least so many slots of at least so many bytes; the same ones if it can.

        Raises:
            SymmetricError: on all ranks of the group, if one has no room.
        """
        key, device = (cargo, where.stream), where.device
        old = self._slots.get(key)
        if old and len(old) >= count and old.slot_bytes >= num_bytes:
            return old.begin()
        if old:
            count, num_bytes = max(count, len(old)), max(num_bytes, old.slot_bytes)
        self._wait_for_all(device)
        self._slots.pop(key, None)
        del old
        own, reason = self._allocate(count, num_bytes, device)
        # whoever has room would wait in the rendezvous for a rank that has none
        if reason := next(filter(None, self._board.share(reason, WHO)), None):
            raise SymmetricError(count * num_bytes, reason)
        self._slots[key] = self._meet(own)
        return self._slots[key].begin()

    @torch.inference_mode(False)  # they stay, and training after an evaluation writes to them
    def _allocate(
        self, count: int, num_bytes: int, device: torch.device
    ) -> tuple[list[Tensor], str]:
        """Buffers of this rank, none with the reason if it has no room; without the other ranks."""
        reason = ""
        for _ in range(2):
            try:
                return [
                    symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
                    for _ in range(count)
                ], ""
            except _FAILURES as error:
                reason = f"cp rank {self._cp_rank}: {str(error).splitlines()[0]}"
            torch.cuda.empty_cache()  # what torch's own allocator has and does not use
        return [], reason

    @torch.inference_mode(False)
    def _meet(self, own: Sequence[Tensor]) -> PulledSlots:
        """Slots out of the buffers of all ranks; each must have its own by now."""
        handles = [symmetric_memory.rendezvous(buffer, self._group_name) for buffer in own]
        of_all = [
            {
                cp_rank: handle.get_buffer(position, tuple(buffer.shape), torch.uint8)
                for position, cp_rank in enumerate(self._cp_ranks)
            }
            for handle, buffer in zip(handles, own, strict=True)
        ]
        # a rank that waits longer than NCCL would ends with an error, instead of for ever
        patience = int(self._board.timeout_s * 1000)
        barriers = [partial(handle.barrier, timeout_ms=patience) for handle in handles]
        return PulledSlots(of_all, barriers, self._cp_rank)

    def _wait_for_all(self, device: torch.device) -> None:
        """No rank may still read what is to be given back."""
        torch.cuda.synchronize(device)
        self._board.share("symmetric memory", WHO)

    def release(self) -> None:
        """Give the memory back; all ranks together."""
        if self._slots:
            self._wait_for_all(torch.device("cuda", torch.cuda.current_device()))
            self._slots.clear()

    def refusal(self, everyone: Board) -> str | None:
        """Why ranks cannot read each other's memory on some node, or None; all ranks together.

        `everyone`: where the ranks of all nodes agree.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        own, reason = self._allocate(1, 1 << 12, device)
        found = next(filter(None, everyone.share(reason, WHO)), None)
        if found is None:
            try:
                self._meet(own)
            except _FAILURES as error:
                reason = str(error).splitlines()[0]
            found = next(filter(None, everyone.share(reason, WHO)), None)
        return found
