"""Ranks as threads of one process, joined by hops that show a missing wait.

A receive buffer is full of NaN from its post to its wait, and what is sent is read when the
receiver waits: who computes too early gets NaN, who overwrites too early sends the wrong thing.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from random import Random

import torch

_TIMEOUT_S = 30


class Wire:
    """The hops between simulated ranks."""

    def __init__(self):
        self._queues, self._lock = {}, threading.Lock()

    def queue(self, *key) -> Queue:
        with self._lock:
            return self._queues.setdefault(key, Queue())


class SimulatedCarrier:
    """One rank's end of the wire; counts the bytes that it sends."""

    def __init__(self, wire, cp_rank, seed=0):
        self.cp_rank, self.sent_bytes = cp_rank, 0
        self._wire, self._delay = wire, Random(1000 * seed + cp_rank)

    def buffers(self, cargo, count, num_bytes, device):
        return [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(count)]

    def exchange(self, cargo, sends, recvs):
        time.sleep(self._delay.random() * 1e-3)
        taken = []
        for peer, send in sends:
            self.sent_bytes += send.numel() * send.itemsize
            taken.append(threading.Event())
            self._wire.queue(cargo, self.cp_rank, peer).put((send, taken[-1]))
        for _, recv in recvs:
            recv.fill_(float("nan"))
        inboxes = [(self._wire.queue(cargo, peer, self.cp_rank), recv) for peer, recv in recvs]
        return SimulatedExchange(inboxes, taken)

    def start(self, hop, send, recv):
        time.sleep(self._delay.random() * 1e-3)  # ranks must not have to run in step
        self.sent_bytes += send.numel()
        recv.fill_(255)  # NaN in every floating dtype
        parcel = (send, taken := threading.Event())
        self._wire.queue(hop.ring, hop.cargo, self.cp_rank, hop.dest).put(parcel)
        inbox = self._wire.queue(hop.ring, hop.cargo, hop.source, self.cp_rank)
        return SimulatedTransfer(inbox, recv, taken)


class SimulatedExchange:
    """Several messages under way; those between two ranks arrive in the order of their posts."""

    def __init__(self, inboxes, taken):
        self._inboxes, self._taken = inboxes, taken

    def wait(self):
        for inbox, recv in self._inboxes:
            data, taken = inbox.get(timeout=_TIMEOUT_S)
            recv.copy_(data)
            taken.set()
        for taken in self._taken:
            assert taken.wait(_TIMEOUT_S), "nobody took what was sent"


class SimulatedTransfer:
    """A hop under way."""

    def __init__(self, inbox, recv, taken):
        self._inbox, self._recv, self._taken = inbox, recv, taken

    def wait(self):
        data, taken = self._inbox.get(timeout=_TIMEOUT_S)
        self._recv.copy_(data)
        taken.set()
        assert self._taken.wait(_TIMEOUT_S), "nobody took what was sent"


def run_simulated(function, cp_size, seed=0):
    """Run `function(cp_rank, carrier)` for all ranks; returns results and carriers."""
    wire = Wire()
    carriers = [SimulatedCarrier(wire, rank, seed) for rank in range(cp_size)]
    with ThreadPoolExecutor(cp_size) as pool:
        futures = [pool.submit(function, rank, carriers[rank]) for rank in range(cp_size)]
        return [future.result(2 * _TIMEOUT_S) for future in futures], carriers
