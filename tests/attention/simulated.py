"""Ranks as threads of one process, joined by transfers that expose a missing wait.

A receive buffer holds NaN from its post until it is waited for, and sent data is read only then:
reading too early gives NaN, overwriting too early sends the wrong data.
"""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from random import Random

import torch

from megatron_burst.comm.pulled import PulledSlots
from megatron_burst.comm.transport import FlatBuffers, OneQueue, Placement, SentSlots
from megatron_burst.schedule.topology import Link

_TIMEOUT_S = 120  # only what never comes waits so long, also on a busy machine


class Letter:
    """A message from one rank to another, delivered once both have posted it."""

    def __init__(self):
        self.both, self._ends, self._lock, self._over = (
            threading.Event(),
            {},
            threading.Lock(),
            False,
        )

    def post(self, end, tensor):
        with self._lock:
            self._ends[end] = tensor
            if len(self._ends) == 2:
                self.both.set()

    def deliver(self):
        with self._lock:
            if not self._over:
                self._ends["recv"].copy_(self._ends["send"])
                self._over = True


class Wire:
    """What joins simulated ranks: messages, barriers and shared memory."""

    def __init__(self, cp_size, timeout_s=_TIMEOUT_S):
        self.letters, self._lock = {}, threading.Lock()
        self.cp_size, self.memory, self.timeout_s = cp_size, {}, timeout_s
        self._barriers = {}
        # one rank runs until it waits: threads that compete for the interpreter take twice as long
        self.turn = threading.Lock()

    @contextmanager
    def resting(self):
        """Lets the others run while a rank waits for them."""
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def barrier(self, *key):
        with self._lock:
            barrier = self._barriers.setdefault(key, threading.Barrier(self.cp_size))
        with self.resting():
            barrier.wait(self.timeout_s)

    def letter(self, *key) -> Letter:
        with self._lock:
            return self.letters.setdefault(key, Letter())


class SimulatedCarrier:
    """One rank's end of the wire; counts the bytes it sends."""

    overlaps = True

    def __init__(self, wire, cp_rank, seed=0, pulls=False):
        self.cp_rank, self.sent_bytes = cp_rank, 0
        self._wire, self._delay = wire, Random(1000 * seed + cp_rank)
        self._pulls, self._pulled, self._posted = pulls, {}, Counter()
        self._kept = {}

    def queues(self, device):
        return OneQueue(Placement(device))

    def run(self, program, unit, over, waits):
        pass

    def buffers(self, use, count, num_bytes, where):
        """The same buffers in every call, as from a communicator, but filled with NaN at its
        start."""
        memory = self._kept.get(use)
        if memory is None or memory.flats[0].numel() < num_bytes:
            memory = self._kept[use] = FlatBuffers([])
        size = memory.flats[0].numel() if memory.flats else num_bytes
        while len(memory.flats) < count:
            memory.flats.append(self._room(size, where.device))
        for flat in memory.flats:
            flat.fill_(255)
        return memory

    def kept(self):
        """This rank's buffers, by use."""
        slots = [[of_rank[self.cp_rank] for of_rank in x._buffers] for x in self._pulled.values()]
        return [*(memory.flats for memory in self._kept.values()), *slots]

    def _room(self, num_bytes, device):
        return torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)

    def slots(self, cargo, count, num_bytes, where):
        if not self._pulls:
            memory = self.buffers(cargo, count, num_bytes, where)
            return SentSlots(memory, count, partial(self.send, Link.INTRA, cargo))
        old = self._pulled.get(cargo)
        if old is None or old.slot_bytes < num_bytes or len(old) < count:
            self._pulled[cargo] = self._make_pulled(cargo, count, num_bytes, where.device)
        return self._pulled[cargo].begin()

    def _make_pulled(self, cargo, count, num_bytes, device):
        numbers, ranks = range(count), range(self._wire.cp_size)
        own = [self._room(num_bytes, device) for _ in numbers]
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
        self._rest()  # others may be far ahead when this one reads

    def _rest(self):
        with self._wire.resting():
            time.sleep(self._delay.random() * 2e-4)

    def send(self, link, cargo, sends, recvs):
        self._rest()  # ranks need not run in lockstep
        self.sent_bytes += sum(x.nbytes for _, x in sends)
        for _, x in recvs:
            x.fill_(255 if x.dtype is torch.uint8 else float("nan"))
        letters = [self._post("send", (link, cargo, self.cp_rank, peer), x) for peer, x in sends]
        letters += [self._post("recv", (link, cargo, peer, self.cp_rank), x) for peer, x in recvs]
        return SimulatedTransfer(self._wire, letters)

    def _post(self, end, way, tensor):
        self._posted[end, way] += 1
        letter = self._wire.letter(*way, self._posted[end, way])
        letter.post(end, tensor)
        return letter


class CountedSlots(PulledSlots):
    """Counts what others read as sent."""

    def __init__(self, carrier, buffers, barriers):
        super().__init__(buffers, barriers, carrier.cp_rank)
        self._carrier, self._given = carrier, {}

    def prepare(self, index, view, gives, takes):
        found = super().prepare(index, view, gives, takes)
        self._given[id(found)] = found, sum(view[rows].nbytes for _, rows in gives)
        return found

    def transfer(self, index, ends, *args):
        self._carrier.sent_bytes += self._given[id(ends)][1]
        return super().transfer(index, ends, *args)


class SimulatedTransfer:
    """Messages in flight; those between two ranks match in the order of their posts."""

    def __init__(self, wire, letters):
        self._wire, self._letters = wire, letters

    def wait(self, stream):
        for letter in self._letters:
            with self._wire.resting():
                posted = letter.both.wait(self._wire.timeout_s)
                assert posted, "the other rank never posted it"
            letter.deliver()


def run_simulated(function, cp_size, seed=0, pulls=False, timeout_s=_TIMEOUT_S):
    """Run `function(cp_rank, carrier)` on all ranks; return results and carriers. `pulls`: whether
    ranks read each other's slots."""
    wire = Wire(cp_size, timeout_s)
    carriers = [SimulatedCarrier(wire, rank, seed, pulls) for rank in range(cp_size)]

    def run(rank):
        with wire.turn:
            return function(rank, carriers[rank])

    with ThreadPoolExecutor(cp_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(cp_size)]
        return [future.result(2 * timeout_s) for future in futures], carriers
