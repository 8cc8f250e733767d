"""Slots that other ranks read: none may be refilled while a slow rank still reads it."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from megatron_burst.comm import group as state
from megatron_burst.comm.group import GroupMemory
from megatron_burst.comm.pulled import PulledSlots
from megatron_burst.comm.transport import (
    DONE,
    BufferSize,
    FlatBuffers,
    OneQueue,
    Placement,
    Queues,
    SentSlots,
)
from megatron_burst.schedule.spec import Cargo, pulled_count


def run_two_ranks(num_slots, calls, rounds):
    """What each rank reads in each round of several calls; rank 0 copies long after the barrier."""
    memory = [
        {rank: torch.zeros(64, dtype=torch.uint8) for rank in (0, 1)} for _ in range(num_slots)
    ]
    barriers = [Barrier(2) for _ in range(num_slots)]

    def run(rank):
        def slowly(barrier):
            barrier.wait(10)
            time.sleep(0.02 if rank == 0 else 0)

        waits = [lambda barrier=barrier: slowly(barrier) for barrier in barriers]
        slots, taken = PulledSlots(memory, waits, rank), []
        queues = OneQueue(Placement(torch.device("cpu")))
        for call in range(calls):
            slots.begin()
            for index in range(rounds):
                slots.open(index, None)
                view = slots.flat(index)[: (2 + rank) * 16].view(torch.float32).view(-1, 4)
                view.fill_(100 * call + 10 * index + rank)
                target = torch.zeros(1, 4)
                ends = slots.prepare(index, view, (), [(1 - rank, slice(1, 2))])
                slots.transfer(index, ends, [target], queues).wait(None)
                taken.append(target[0, 0].item())
        return taken

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


@pytest.mark.parametrize(("num_bytes", "tokens"), [(1 << 10, 256), (1 << 30, 1 << 16)])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("cargo", list(Cargo))
def test_what_is_taken_is_of_the_same_round_of_the_same_call(cargo, rounds, num_bytes, tokens):
    taken = run_two_ranks(pulled_count(cargo, rounds, num_bytes, tokens), 4, rounds)
    for rank in (0, 1):
        expected = [100 * c + 10 * i + 1 - rank for c in range(4) for i in range(rounds)]
        assert taken[rank] == expected


def test_sent_slots_are_as_many_as_the_program_takes_in_turn():
    """The program's waits are derived for that number; an earlier call may have had more."""
    memory = FlatBuffers([torch.tensor([number], dtype=torch.uint8) for number in range(3)])
    slots = SentSlots(memory, 2, lambda sends, recvs: DONE)
    assert [slots.flat(index).item() for index in range(5)] == [0, 1, 0, 1, 0]


def test_what_is_held_grows_at_once_and_shrinks_to_what_the_latest_passes_need():
    held = BufferSize()
    assert held.changes(2, 100) and not held.changes(1, 50)
    assert held.changes(1, 300) and held.size == (2, 300)
    changes = [held.changes(1, (40, 60)[number % 2]) for number in range(600)]
    assert sum(changes) == 1 and held.size == (1, 60)
    assert not any(held.changes(1, (31, 60)[number % 2]) for number in range(600))
    assert not any(held.changes(1, 31) for number in range(600))  # more than half of it


def test_after_buffers_that_were_too_large_smaller_ones_are_allocated(monkeypatch):
    def limited(count, device, allocate=state._bytes):
        if count > 100:
            raise RuntimeError("out of memory")
        return allocate(count, device)

    monkeypatch.setattr(state, "_bytes", limited)
    memory, where = GroupMemory(), Placement(torch.device("cpu"))
    memory.buffers("use", 1, 50, where)
    with pytest.raises(RuntimeError):
        memory.buffers("use", 1, 200, where)
    assert memory.buffers("use", 1, 80, where).flats[0].numel() == 80


def test_one_slot_with_one_barrier_would_not_do(monkeypatch):
    """Shows that the test above can fail: a slot that is refilled at once is read too late."""
    monkeypatch.setattr(PulledSlots, "__len__", lambda slots: 2)
    assert run_two_ranks(1, 4, 1)[0] != [100 * call + 1 for call in range(4)]


class Line:
    """Queues of a GPU, as what they are told in order."""

    def __init__(self):
        self.name, self.said = None, []
        self.stream = "a stream"

    def switch(self, name):
        self.name = name

    def record(self, reuse=None):
        self.said.append((self.name, "mark"))
        return SimpleNamespace(wait=lambda stream: self.said.append((stream, "waits")))


@pytest.mark.parametrize("count", [1, 2])
def test_kernels_that_hide_copies_are_launched_before_the_barrier_behind_these(count):
    """With a single queue for launches what is launched after that barrier waits for the copies."""
    line = Line()
    memory = [{rank: torch.zeros(64, dtype=torch.uint8) for rank in (0, 1)} for _ in range(count)]
    slots = PulledSlots(memory, [lambda: line.said.append((line.name, "barrier"))] * count, 0)

    def round_of(index, takes):
        slots.open(index, "kernels")
        view = slots.flat(index).view(-1, 4)
        line.switch("copies")
        targets = [torch.zeros(1, 4, dtype=torch.uint8) for _ in takes]
        copied = slots.transfer(index, slots.prepare(index, view, (), takes), targets, line)
        line.switch(None)
        line.said.append((None, "kernel"))
        copied.wait("kernels")
        copied.wait("others")
        assert line.name is None

    freed, copied = [("copies", "barrier"), ("copies", "mark")], ("copies", "mark")
    hidden, waits = (None, "kernel"), [("kernels", "waits"), ("others", "waits")]
    round_of(0, [(1, slice(1, 2))])
    if count == 2:
        assert line.said == [*freed, copied, hidden, *waits]
        return
    assert line.said == [("copies", "barrier"), copied, hidden, waits[0], *freed, waits[1]]
    line.said.clear()
    round_of(1, [])  # its rows are for other ranks only, which need not wait for its kernels
    assert line.said == [waits[0], ("copies", "barrier"), copied, *freed, hidden, *waits]


def test_a_mark_of_a_call_with_one_queue_is_not_recorded_again(monkeypatch):
    """Calls with and without overlap share slots, and thus the marks in them."""

    class Event:
        def record(self, stream):
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    queues = object.__new__(Queues)
    queues.stream = "caller's"
    first = queues.record(DONE)
    assert isinstance(first, Event) and first.stream == "caller's"
    assert queues.record(first) is first and queues.record() is not first
