"""Modes over several nodes on NCCL: nodes are simulated, including sockets between them.

Guards against pieces used before they arrive or overwritten in flight, streams that do not wait for
each other, and low-precision sums in return transfers: errors are relative to the same kernel's on
one GPU.
"""

from functools import partial

import pytest
import torch

from megatron_burst.config import BurstConfig
from megatron_burst.kernels.backends import backends
from megatron_burst.schedule.layout import Layout
from tests.gpu import GPUS, RANKS, SEVERAL, needs_gpus
from tests.gpu.test_gather import kernels, problem_for, problem_of, run
from tests.gpu.test_nccl import alone, relative
from tests.options import burst_config
from tests.oracle import rows_of
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
SHAPES = {
    "MHA": (8, 8, 64),
    "GQA": (8, 4, 128),
    "MQA": (8, 1, 64),
}  # query heads, KV heads, head dimension
INSIDE = [
    {"intra": intra, "circulate": circulate}
    for intra in ("ring", "gather")
    for circulate in ("kv", "q")
]
WAYS = [
    {},
    *INSIDE,
    {"intra": "gather", "circulate": "q", "transfer": "send"},
    {"intra": "gather", "pieces": False},
    {"intra": "gather", "resend": "always"},
    {"intra": "gather", "resend": "never"},
    {"intra": "gather", "overlap": False},
    {"inter": "a2a"},
    {"flat": True},
]

SIZES = (4, 2), (2, 2), (4, 4)  # ranks and nodes
PLACES = [  # shape, connections to the GPU, sizes
    *(("GQA", "1", size) for size in SIZES), ("MQA", "1", (2, 2)),
    ("GQA", "8", SIZES[0] if GPUS >= 4 else (2, 2)),
    *whole(*((shape, "1", size) for shape in ("MHA", "MQA") for size in SIZES
             if (shape, size) != ("MQA", (2, 2))),
           ("MHA", "8", (2, 2)), ("MQA", "8", (2, 2))),
]  # fmt: skip


def errors(rank, world, nodes, shape, ways, backend="auto"):
    """Relative errors of (out, dq, dk, dv) by mode, over the whole sequence."""
    tensors, truth = problem_of(shape[:2], 2048, shape[2])
    rows = rows_of(Layout.ZIGZAG, rank, world, 2048 // world).cuda()
    found = {"alone": alone(partial(run, tensors), truth, BurstConfig(backend=backend))}
    for way in ways:
        cut = {"heads_per_round": 1} if way.get("intra") in ("gather", "a2a") else {}
        if not way.get("pieces", True):
            cut = {}
        config = burst_config(nodes=nodes, backend=backend, **cut, **way)
        worst = (0,)
        for turn in range(world):  # buffers are used again; a race shows as a difference
            if turn == rank:
                torch.cuda._sleep(20_000_000)  # ranks must not have to run in step
            worst = max(worst, relative(run(tensors, rows, config), truth, rows))
        found[str(way)] = worst
    return found


@pytest.mark.parametrize(("shape", "connections", "size"), PLACES)
def test_errors_are_at_most_twice_one_gpus(shape, connections, size):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    settings = {"backend": "nccl", "timeout_s": 300, "environment": environment}
    compare((size,), SHAPES[shape], WAYS, settings)


@pytest.mark.parametrize("shape", ["GQA", *whole("MHA", "MQA")])
@pytest.mark.parametrize("backend", kernels() or ["none"])
def test_so_they_are_with_every_kernel(backend, shape):
    if backends()[backend].capability.refusal(problem_for(SHAPES[shape])):
        pytest.skip(f"{backend} does not do {SHAPES[shape]}")
    settings = {"backend": "nccl", "timeout_s": 300}
    places = ((4, 2),) if GPUS >= 4 else ((2, 2),)
    compare(places, SHAPES[shape], [*INSIDE, {"inter": "a2a"}, {"flat": True}], settings, backend)


def compare(places, shape, ways, settings, backend="auto"):
    """Print and return errors on these ranks and nodes next to those of one GPU."""
    for world, nodes in places:
        if world > RANKS:
            continue
        args = (world, nodes, shape, ways, backend)
        found = run_ranks(errors, world, *args, nodes=nodes, **settings)[0]
        single = found.pop("alone")
        print(f"{backend} {shape} 1 rank: {single}")
        for way, several in found.items():
            print(f"{backend} {shape} {world} ranks {nodes} nodes {way}: {several}")
            for error, bar in zip(several, single, strict=True):
                assert error <= 2 * bar and bar < 1e-2, (world, nodes, way, several, single)


def many_calls(rank, world, options):
    """Sixteen passes in a row without synchronization: the largest difference between them."""
    torch.manual_seed(rank)
    tensors = [torch.randn(1, 2048, 8, 128, device="cuda").bfloat16() for _ in range(4)]
    config = burst_config(nodes=2, deterministic=True, **options)
    results = [run(tensors, slice(None), config) for _ in range(16)]
    return max(
        float((a - b).abs().max())
        for other in results[1:]
        for a, b in zip(other, results[0], strict=True)
    )


@pytest.mark.parametrize("circulate", ["kv", "q"])
def test_back_to_back_calls_give_the_same_bits(circulate):
    options = {"intra": "gather", "heads_per_round": 3, "circulate": circulate}
    settings = {"backend": "nccl", "timeout_s": 300}
    for difference in run_ranks(many_calls, SEVERAL, SEVERAL, options, nodes=2, **settings):
        assert difference == 0
