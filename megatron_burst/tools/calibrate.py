"""Measures the machine at hand: kernels and links, into a `Calibration`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic

import torch

from megatron_burst.comm.nodes import my_location, topology_of_locations
from megatron_burst.schedule.topology import Link
from megatron_burst.tools.hardware import Calibration, KernelRow, LinkRow
from megatron_burst.tools.speeds import Attention, Mover, Run, host_copies, matmul, rank_ms
from megatron_burst.tools.world import World, clean_up

_HEAD_DIMS = (64, 128)
_NOTHING = 64  # bytes of a message that takes as long as an empty one


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes measured on a kind of device."""

    dtype: torch.dtype  # of products and attention
    matmul: int  # width of a square matrix
    attention: tuple[tuple[int, int, int], ...]  # tokens with query and KV heads
    messages: tuple[int, ...]  # bytes


_SIZES = {
    "cuda": Sizes(
        torch.bfloat16,
        8192,
        ((2 << 10, 32, 8), (8 << 10, 32, 8), (32 << 10, 32, 8), (128 << 10, 8, 2)),
        (1 << 20, 8 << 20, 64 << 20, 256 << 20),
    ),
    "cpu": Sizes(torch.float32, 256, ((128, 2, 1), (512, 2, 1)), (16 << 10, 1 << 20)),
}


def calibrate(
    world: World, name: str | None, budget_s: float, say: Callable[[str], None]
) -> Calibration:
    """Measure, all ranks together; returns the same on all ranks.

    After `budget_s` seconds nothing new is started; `say` takes lines on rank 0. Without a name,
    the machine gets its GPU's.
    """
    run = _Run(world, _SIZES[world.device.type], monotonic() + budget_s)
    tell = say if world.rank == 0 else lambda text: None
    tell("measuring kernels and links")
    mover = Mover(world, topology_of_locations(world.gather(my_location())))
    gpu, memory_gib = _device(world.device)
    product, flops = matmul(world, run.sizes.matmul, run.sizes.dtype)
    rate = flops / max(rank_ms(product, world)) / 1e9
    links = tuple(run.links(mover))
    kernels = tuple(run.kernels())
    world.progress.end()
    if run.left_out:
        tell(f"time was up; not measured: {', '.join(run.left_out)}")
    return Calibration(name or gpu, gpu, _rounded(memory_gib), _rounded(rate), kernels, links)


@dataclass(slots=True)
class _Run:
    world: World
    sizes: Sizes
    deadline: float
    left_out: list[str] = field(default_factory=list)

    def kernels(self) -> Iterator[KernelRow]:
        for dim in _HEAD_DIMS:
            for seq, *heads in self.sizes.attention:
                if not self._starts(f"attention of {seq} tokens, head dimension {dim}"):
                    continue
                call = Attention.drawn(self.world, seq, tuple(heads), dim, self.sizes.dtype)
                passes = {"forward": (call.forward, 1.0), "backward": (call.backward(), 2.5)}
                for direction, (run, factor) in passes.items():
                    ms = max(rank_ms(run, self.world, reps=3))
                    tflops = _rounded(factor * call.forward_flops / ms / 1e9)
                    name = call.backend.capability.name
                    yield KernelRow(name, direction, dim, seq, tflops)
                del call, passes, run
                clean_up(self.world)

    def links(self, mover: Mover) -> Iterator[LinkRow]:
        for link in Link:
            if mover.rings[link]:
                yield from self._speeds(link.value, lambda n, link=link: (mover.shift(link, n),))
        if mover.rings[Link.INTRA] and (read := mover.puller(max(self.sizes.messages))):
            yield from self._speeds("copy_engine", lambda n: (read(n),))
        yield from self._speeds("host", lambda n: host_copies(self.world, n))

    def _speeds(self, kind: str, make: Callable[[int], tuple[Run, ...]]) -> Iterator[LinkRow]:
        if not self._starts(f"link {kind}"):
            return
        latency_us = 1e3 * self._slowest_ms(make(_NOTHING))
        for num_bytes in self.sizes.messages:
            ms = self._slowest_ms(make(num_bytes))
            speed = _rounded(num_bytes / ms / 1e6)
            yield LinkRow(kind, num_bytes, speed, _rounded(latency_us))
        clean_up(self.world)

    def _slowest_ms(self, runs: tuple[Run, ...]) -> float:
        return max(max(rank_ms(run, self.world)) for run in runs)

    def _starts(self, what: str) -> bool:
        """Whether there is time for it; if so, reports it."""
        late = self.world.decide(monotonic() > self.deadline)
        if late:
            self.left_out.append(what)
        else:
            self.world.progress.now(what)
        return not late


def _device(device: torch.device) -> tuple[str, float]:
    """Name and memory in GiB of a rank's device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory / 2**30
    return "CPU", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _rounded(figure: float) -> float:
    """Round to a measurement's significant digits."""
    return float(f"{figure:.4g}")
