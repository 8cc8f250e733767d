"""Slots that other ranks of the node read directly, of GPUs alone (not on the reading path)."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_burst.comm.transport import Handle, OneQueue, Queues, SlotRows, Views


class PulledSlots(Views):
    """Slots that other ranks read directly.

    Flow control is one barrier per round, after the kernels that fill the slot and before the
    copies that read it, all on the current stream. A slot may be overwritten once the barrier of a
    later round has shown that all copies out of it are done; so there is one slot more than rounds
    in flight, and numbering continues from call to call. A single slot has no later round to rely
    on, and needs a second barrier after the copies. It is issued once something waits for them: on
    a GPU with a single queue for launches, as Megatron has it (CUDA_DEVICE_MAX_CONNECTIONS=1),
    kernels launched after that barrier would wait for the copies, although they may hide them.

    Args:
        buffers: for each slot, flat bytes of every rank by cp rank.
        barriers: for each slot, makes the current stream wait for those of all other ranks.
        cp_rank: this rank.
    """

    def __init__(
        self, buffers: Sequence[Mapping[int, Tensor]], barriers: Sequence[Callable[[], None]],
        cp_rank: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self._buffers, self._barriers, self._cp_rank = buffers, barriers, cp_rank
        self._rounds = self._first = 0  # in total, and at the start of this call
        # by slot, the event after its last round's barrier, which frees another slot
        self._passed: list[Handle | None] = [None] * len(buffers)
        self._copied: Copied | None = None  # of a single slot, the last round

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def slot_bytes(self) -> int:
        return self._buffers[0][self._cp_rank].numel()

    def suffices(self, count: int, num_bytes: int) -> bool:
        """Whether there are so many, and of this size."""
        return len(self) >= count and self.slot_bytes >= num_bytes

    def in_graph(self, launch: Callable[[Callable[[], None]], None]) -> "PulledSlots":
        """The same slots for one call that a CUDA graph captures, behind a barrier: the call may
        write to all of them, as all ranks have finished the call before it. `launch` calls a
        barrier."""
        barriers = [partial(launch, barrier) for barrier in self._barriers]
        barriers[0]()
        return PulledSlots(self._buffers, barriers, self._cp_rank)

    def begin(self) -> "PulledSlots":
        """Count rounds from here: a new call. One that failed may have left a barrier to issue."""
        if self._copied is not None:
            current = torch.cuda.current_stream()
            self._copied.free_slot()
            torch.cuda.set_stream(current)
        self._first = self._rounds
        return self

    def views(self, program: object, slot: int = 0) -> dict[Hashable, Any]:
        """See `Views`; one set for each slot that a call may begin with."""
        return super().views(program, self._number(slot))

    def _number(self, index: int) -> int:
        return (self._first + index) % len(self._buffers)

    def open(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """As `SentSlots.open`."""
        # of the round that was as many rounds ago as there are other slots: of a single slot, 1
        passed = self._passed[self._number(index + 1)]
        if passed is not None and self._first + index == self._rounds:
            passed.wait(stream)

    def flat(self, index: int) -> Tensor:
        """As `SentSlots.flat`."""
        return self._buffers[self._number(index)][self._cp_rank]

    def prepare(self, index: int, view: Tensor, sends: SlotRows, recvs: SlotRows) -> "Pulls":
        """As `SentSlots.prepare`."""
        of_rank, width = self._buffers[self._number(index)], prod(view.shape[1:])
        # the other rank's slot may have more rows than this one's, of the same width
        return Pulls([
            of_rank[peer].view(view.dtype)[: rows.stop * width].view(-1, *view.shape[1:])[rows]
            for peer, rows in recvs
        ])  # fmt: skip

    def transfer(
        self, index: int, pulls: "Pulls", targets: Sequence[Tensor], queues: OneQueue | Queues
    ) -> Handle:
        """As `SentSlots.transfer`."""
        number = self._number(index)
        self._barriers[number]()
        if len(self) > 1:
            self._passed[number] = queues.record(self._passed[number])
        for target, source in zip(targets, pulls.sources, strict=True):
            target.copy_(source, non_blocking=True)
        done = pulls.done = queues.record(pulls.done)
        self._rounds += 1
        if len(self) > 1:
            return done
        self._copied = copied = Copied(done, partial(self._free, queues, queues.name))
        if queues.stream is None or not targets:  # nothing hides them; there are none
            copied.free_slot()
        return copied

    def _free(self, queues: OneQueue | Queues, name: Hashable | None) -> None:
        """Issue the barrier behind the copies out of a single slot, on the queue of that name."""
        self._copied, before = None, queues.name
        queues.switch(name)
        self._barriers[0]()
        self._passed[0] = queues.record(self._passed[0])
        queues.switch(before)


@dataclass(slots=True)
class Copied:
    """A handle of the copies out of a single slot, which is freed once something waits for it."""

    done: Handle
    free: Callable[[], None] | None  # once; then forgotten, as a log holds handles

    def free_slot(self) -> None:
        if self.free is not None:
            free, self.free = self.free, None
            free()

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        self.done.wait(stream)
        self.free_slot()

    def query(self) -> bool:
        """As torch's events."""
        return self.done.query()


@dataclass(slots=True)
class Pulls:
    """What a prepared round copies, and the event of its last copy."""

    sources: Sequence[Tensor]  # rows of other ranks' slots
    done: Handle | None = None  # to be reused
