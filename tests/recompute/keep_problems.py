"""10,000 problems of what to keep beside attention's results, and what the best of all ways saves.

`python -m tests.recompute.keep_problems` writes the answers again, in some minutes: only where the
rules of `recompute/auto/budget.py` change, never because a search does.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np

from megatron_burst.rates import Rates
from megatron_burst.recompute.auto import budget
from megatron_burst.recompute.auto.budget import (
    WHOLE,
    KeepProblem,
    ModuleCost,
    Placed,
    choose_modules,
)

COUNT = 10_000
ANSWERS = Path(__file__).with_name("keep_answers.npz")
_GIB = 1 << 30
_RATES = Rates(host_gbs=25.0)


@dataclass(frozen=True)
class Drawn:
    """Arguments of `choose_modules`."""

    problem: KeepProblem
    modules: tuple[ModuleCost, ...]
    budget_bytes: float
    host_bytes: float

    def choose(self) -> tuple[int, float]:
        """Waits and seconds that the choice saves."""
        chosen = choose_modules(
            self.problem, self.modules, self.budget_bytes, self.host_bytes, _RATES
        )
        whole, waits = chosen.get(WHOLE, Placed()).device, any(x.waits for x in self.modules)
        layers = [(x, chosen.get(x.name, Placed())) for x in self.modules]
        saved = sum((x.flops * (each.device + each.host) for x, each in layers), 0)
        count = sum(each.device + each.host for x, each in layers if x.waits)
        seconds = _RATES.matmul_s(saved) + whole * self.problem.whole_s
        return (count + whole * waits if chosen else 0), seconds

    def best(self) -> tuple[int, float]:
        """The same, if all ways are tried."""
        with mock.patch.object(budget, "_best_beside", every_way):
            return self.choose()


def drawn(seed: int) -> Drawn:
    """A problem of 2 to 7 modules; only `random()` is drawn from, which no release of Python
    changes."""
    random = Random(seed).random

    def between(low: float, high: float) -> float:
        return low * (high / low) ** random()

    def among(*values: float) -> float:
        return values[int(random() * len(values))]

    layers, flying = 1 + int(40 * random()), among(1.0, 1.0, 2.5, 4.0)
    size = int(between(0.1, 2) * _GIB)
    waiting = among(0.0, 0.0, 0.2)  # share of the modules
    modules = tuple(
        ModuleCost(
            f"module {at}", own := int(size * between(1 / 16, 4)),
            int(own / _GIB * between(0.5, 50) * 1e12), random() < waiting,
        )
        for at in range(2 + seed % 6)
    )  # fmt: skip
    bytes_, seconds = (
        sum(x.num_bytes for x in modules), _RATES.matmul_s(sum(x.flops for x in modules)),
    )  # fmt: skip
    forward_s, every = size / 1e9 / _RATES.host_gbs * between(0.1, 10), bytes_ * layers * flying
    problem = KeepProblem(
        layers, flying, size, int(among(4096, 1 << 20)), forward_s=forward_s,
        turn_s=among(0, forward_s, 9 * forward_s),
        whole_bytes=int(among(0, 1) * (size + bytes_ * between(1, 2))),
        whole_s=seconds * between(1, 1.5), free_bytes=among(inf, inf, bytes_ * random(), 0.0),
        never_whole=min(layers, int(among(0, 0, 0, 2))),
    )  # fmt: skip
    room = among(between(0.01, 1.1), random()) * every
    return Drawn(problem, modules, size * layers * flying + room, among(0, 1, 3) * random() * every)


def every_way(problem, whole, modules, spare, rates):
    """`budget._best_beside` by trying all ways: `budget._placed`, of all of them at once."""
    size_of = [module.num_bytes for module in modules]
    layers, flying = problem.layers - whole, problem.in_flight
    ways = np.indices((3,) * len(modules)).reshape(len(modules), -1)
    count = ways.shape[1]
    left, host, free = (
        np.full(count, some) for some in (*spare, 0.0 if whole else problem.free_bytes)
    )

    def at_peak(device, there):
        fetches = (there > 0) & ((device + there) * flying > 1)
        return np.maximum(0.0, device * flying - 1) + fetches

    found = []
    for size, way in zip(size_of, ways, strict=True):
        room = left - np.maximum(0.0, size - free)
        fitting = np.where(room >= 0, (room / size + 1) // flying, 0)
        most = np.minimum(layers, fitting)
        device = np.where(way == 0, most, np.minimum(most, 1))
        offloads = (way == 1) & (device > 0) & (size * at_peak(device, 1) <= room)
        there = np.where(offloads, np.maximum(np.minimum(layers - device, host // size), 0), 0)
        left = np.where(device > 0, room - size * at_peak(device, there), left)
        free = np.where(device > 0, np.maximum(0.0, free - size), free)
        host = host - there * size
        found.append((device, there))
    waits, flops = np.zeros((2, count))
    for module, (device, there) in zip(modules, found, strict=True):
        more = np.where(device > 0, np.maximum(left, 0) // (module.num_bytes * flying), 0)
        more = np.minimum(more, layers - device - there)
        left = left - more * module.num_bytes * flying
        device += more
        waits += module.waits * (device + there)
        flops += module.flops * (device + there)
    best = np.lexsort((-flops, -waits))[0]
    return [
        (module, Placed(int(device[best]), int(there[best])))
        for module, (device, there) in zip(modules, found, strict=True)
    ]


def answers() -> np.ndarray:
    """Waits and seconds by seed: [COUNT, 2]."""
    with np.load(ANSWERS) as found:
        return np.stack((found["waits"], found["seconds"]), axis=1)


def write() -> None:
    waits, seconds = zip(*(drawn(seed).best() for seed in range(COUNT)), strict=True)
    np.savez_compressed(ANSWERS, waits=np.uint16(waits), seconds=np.float32(seconds))


if __name__ == "__main__":
    write()
