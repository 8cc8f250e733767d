"""Ranks as threads of one process, joined by hops that show a missing wait.

A receive buffer is full of NaN from its post to its wait, and what is sent is read when the
receiver waits: who computes too early gets NaN, who overwrites too early sends the wrong thing.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import Queue
from random import Random

import torch

from megatron_burst.comm.aside import Aside
from megatron_burst.comm.slots import PulledSlots, SentSlots
from megatron_burst.plan.slots import pulled_count, sent_count

_TIMEOUT_S = 30


class Wire:
    """The hops between simulated ranks, and memory that all of them can read."""

    def __init__(self, cp_size, in_turns=False):
        self._queues, self._lock = {}, threading.Lock()
        self.cp_size, self.memory = cp_size, {}
        self._barriers = {}
        self.turn = threading.Lock() if in_turns else None

    @contextmanager
    def resting(self):
        """While a rank waits for others they may run."""
        if self.turn:
            self.turn.release()
        try:
            yield
        finally:
            if self.turn:
                self.turn.acquire()

    def barrier(self, *key):
        with self._lock:
            barrier = self._barriers.setdefault(key, threading.Barrier(self.cp_size))
        with self.resting():
            barrier.wait(_TIMEOUT_S)

    def queue(self, *key) -> Queue:
        with self._lock:
            return self._queues.setdefault(key, Queue())


class SimulatedCarrier:
    """One rank's end of the wire; counts the bytes that it sends."""

    def __init__(self, wire, cp_rank, seed=0, pulls=False):
        self.cp_rank, self.sent_bytes = cp_rank, 0
        self._wire, self._delay = wire, Random(1000 * seed + cp_rank)
        self._pulls, self._pulled = pulls, {}

    def buffers(self, cargo, count, num_bytes, device):
        options = {"dtype": torch.uint8, "device": device}
        return [torch.full((num_bytes,), 255, **options) for _ in range(count)]

    def slots(self, cargo, rounds, num_bytes, device):
        if not self._pulls:
            count = sent_count(rounds)
            exchange = partial(self.exchange, cargo)
            return SentSlots(self.buffers(cargo, count, num_bytes, device), exchange)
        old = self._pulled.get(cargo)
        if old is None or old.slot_bytes < num_bytes:
            self._pulled[cargo] = self._make_pulled(cargo, rounds, num_bytes, device)
        return self._pulled[cargo].begin()

    def _make_pulled(self, cargo, rounds, num_bytes, device):
        count = 1 if self._pulls == "one slot" else pulled_count(cargo, rounds, num_bytes)
        numbers, ranks = range(count), range(self._wire.cp_size)
        own = self.buffers(cargo, len(numbers), num_bytes, device)
        self._wire.memory |= {(cargo, number, self.cp_rank): own[number] for number in numbers}
        self._wire.barrier(cargo, "made")
        buffers = [
            {rank: self._wire.memory[cargo, number, rank] for rank in ranks} for number in numbers
        ]
        self._wire.barrier(cargo, "taken")
        barriers = [partial(self._barrier, cargo, number) for number in numbers]
        return CountedSlots(self, buffers, barriers)

    def _barrier(self, *key):
        self._wire.barrier(*key)
        time.sleep(self._delay.random() * 1e-3)  # others may be far ahead when this one reads

    def beside(self, device):
        return Aside(None)

    def exchange(self, cargo, sends, recvs):
        time.sleep(self._delay.random() * 1e-3)
        taken = []
        for peer, send in sends:
            self.sent_bytes += send.numel() * send.itemsize
            taken.append(threading.Event())
            self._wire.queue(cargo, self.cp_rank, peer).put((send, taken[-1]))
        for _, recv in recvs:
            recv.fill_(255 if recv.dtype is torch.uint8 else float("nan"))
        inboxes = [(self._wire.queue(cargo, peer, self.cp_rank), recv) for peer, recv in recvs]
        return SimulatedExchange(self._wire, inboxes, taken)

    def start(self, hop, send, recv):
        time.sleep(self._delay.random() * 1e-3)  # ranks must not have to run in step
        self.sent_bytes += send.numel()
        recv.fill_(255)  # NaN in every floating dtype
        parcel = (send, taken := threading.Event())
        self._wire.queue(hop.ring, hop.cargo, self.cp_rank, hop.dest).put(parcel)
        inbox = self._wire.queue(hop.ring, hop.cargo, hop.source, self.cp_rank)
        return SimulatedExchange(self._wire, [(inbox, recv)], [taken])


class CountedSlots(PulledSlots):
    """Counts what others take as sent."""

    def __init__(self, carrier, buffers, barriers):
        super().__init__(buffers, barriers, carrier.cp_rank, None)
        self._carrier = carrier

    def exchange(self, index, view, gives, takes):
        self._carrier.sent_bytes += sum(view[give.rows].nbytes for give in gives)
        return super().exchange(index, view, gives, takes)


class SimulatedExchange:
    """Several messages under way; those between two ranks arrive in the order of their posts."""

    def __init__(self, wire, inboxes, taken):
        self._wire, self._inboxes, self._taken = wire, inboxes, taken

    def wait(self):
        for inbox, recv in self._inboxes:
            with self._wire.resting():
                data, taken = inbox.get(timeout=_TIMEOUT_S)
            recv.copy_(data)
            taken.set()
        for taken in self._taken:
            with self._wire.resting():
                assert taken.wait(_TIMEOUT_S), "nobody took what was sent"


def run_simulated(function, cp_size, seed=0, pulls=False, in_turns=False):
    """Run `function(cp_rank, carrier)` for all ranks; returns results and carriers.

    `pulls`: whether ranks read each other's slots; "one slot": as if slots were large.
    In turns, one rank at a time runs until it waits: for compilers that are not for threads.
    """
    wire = Wire(cp_size, in_turns)
    carriers = [SimulatedCarrier(wire, rank, seed, pulls) for rank in range(cp_size)]

    def run(rank):
        with wire.turn or nullcontext():
            return function(rank, carriers[rank])

    with ThreadPoolExecutor(cp_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(cp_size)]
        return [future.result(2 * _TIMEOUT_S) for future in futures], carriers
