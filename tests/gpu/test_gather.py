"""Gather on NCCL with every available kernel: exact, in order, bitwise reproducible.

Guards against keys read before they arrive, buffers released too early, missing stream waits, and
backends that break their contract; errors are relative to the same kernel's on one GPU.
"""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig, Force
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import Problem
from megatron_burst.schedule.layout import Layout
from tests.gpu import GPUS, SEVERAL, needs_gpus
from tests.gpu.test_nccl import alone, relative
from tests.options import burst_config
from tests.oracle import rows_of, truth_of
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
SHAPES = {  # query heads, KV heads, head dimension
    "MHA": (8, 8, 64), "GQA": (8, 2, 128), "MQA": (8, 1, 64), "narrow": (8, 2, 16),
}  # fmt: skip


def kernels():
    """Backends that work with bf16 on this machine's GPUs."""
    if not GPUS:
        return []
    problem = problem_for((8, 8, 64))
    named = backends().items()
    able = [name for name, b in named if not (b.capability.refusal(problem) or b.missing())]
    return [name for name in able if name != "reference"]


def problem_for(shape):
    """The backend's problem for (query heads, KV heads, head dimension)."""
    return Problem(
        "cuda", torch.bfloat16, shape[2], shape[2], grouped=shape[0] != shape[1],
        arch=torch.cuda.get_device_capability()[0],
    )  # fmt: skip


def problem_of(heads, tokens, dim):
    """Whole-sequence q, k, v and dout in bf16, and (out, dq, dk, dv) in float64."""
    generator = torch.Generator("cuda").manual_seed(7)
    sizes = [(heads[0], dim), (heads[1], dim), (heads[1], dim), (heads[0], dim)]
    tensors = [
        torch.randn(2, tokens, *x, generator=generator, device="cuda").bfloat16() for x in sizes
    ]
    return tensors, truth_of(tensors, dim**-0.5, causal=True)


def run(tensors, rows, config, group=None):
    q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])
    out = burst_attention(q, k, v, group=group, config=config)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])]


def errors(rank, world, backend, shape):
    """Relative errors of (out, dq, dk, dv) by mode and heads per round, over the whole sequence."""
    heads, dim = shape[:2], shape[2]
    tensors, truth = problem_of(heads, 2048, dim)
    rows = rows_of(Layout.ZIGZAG, rank, world, 2048 // world).cuda()
    found = {"alone": alone(partial(run, tensors), truth, BurstConfig(backend=backend))}
    several = sorted({1, max(heads[1] // 2, 1), heads[1]})
    for transfer, heads_per_round in product(("pull", "send"), several):
        config = BurstConfig(
            intra="gather", backend=backend, nodes=1,
            force=Force(heads_per_round=heads_per_round, transfer=transfer),
        )  # fmt: skip
        way = f"{transfer} {heads_per_round}"
        for turn in range(4):  # buffers are used again; a race shows as a difference
            if turn == rank:
                torch.cuda._sleep(20_000_000)  # ranks must not have to run in step
            got = relative(run(tensors, rows, config), truth, rows)
            found[way] = max(found.get(way, (0,)), got)
    config = BurstConfig(intra="a2a", force=Force(heads_per_round=1), backend=backend, nodes=1)
    for _ in range(3):
        got = relative(run(tensors, rows, config), truth, rows)
        found["a2a"] = max(found.get("a2a", (0,)), got)
    config = BurstConfig(intra="ring", backend=backend, nodes=1)
    found["ring"] = relative(run(tensors, rows, config), truth, rows)
    return found


@pytest.mark.parametrize("shape", ["GQA", "narrow", *whole("MHA", "MQA")])
@pytest.mark.parametrize("backend", kernels() or ["none"])
def test_errors_are_at_most_twice_one_gpus(backend, shape):
    if backends()[backend].capability.refusal(problem_for(SHAPES[shape])):
        pytest.skip(f"{backend} does not do {SHAPES[shape]}")
    compare(SEVERAL, backend, shape)


@pytest.mark.parametrize("shape", ["GQA", "MQA", *whole("MHA", "narrow")])
def test_so_they_are_on_four_ranks(shape):
    compare(4, "auto", shape)


def compare(world, backend, shape):
    """Errors on so many ranks of one node next to those of one rank."""
    args = (world, backend, SHAPES[shape])
    found = run_ranks(errors, world, *args, backend="nccl", timeout_s=300)[0]
    single = found.pop("alone")
    print(f"{backend} {shape} 1 rank: {single}")
    for way, several in found.items():
        print(f"{backend} {shape} {world} ranks {way}: {several}")
        for error, bar in zip(several, single, strict=True):
            assert error <= 2 * bar and bar < 1e-2, (world, way, several, single)


def twice(rank, world, backend, intra, transfer):
    """Whether two runs, with other work in between, are bitwise equal."""
    tensors, _ = problem_of((8, 2), 2048, 64)
    rows = rows_of(Layout.ZIGZAG, rank, world, 2048 // world).cuda()
    rounds = {"heads_per_round": 1, "transfer": transfer} if intra == "gather" else {}
    config = burst_config(intra=intra, backend=backend, deterministic=True, nodes=1, **rounds)
    first = run(tensors, rows, config)
    torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
    if rank == 0:
        torch.cuda._sleep(50_000_000)  # ranks must not have to run in step
    same = [torch.equal(a, b) for a, b in zip(first, run(tensors, rows, config), strict=True)]
    dist.barrier()
    return same


@pytest.mark.parametrize(
    "intra, transfer", [("gather", "pull"), ("gather", "send"), ("ring", "send")]
)
@pytest.mark.parametrize(
    "backend", [name for name in kernels() if backends()[name].capability.deterministic] or ["none"]
)
def test_deterministic_means_the_same_bits_twice(backend, intra, transfer):
    settings = {"backend": "nccl", "timeout_s": 300}
    for same in run_ranks(twice, SEVERAL, SEVERAL, backend, intra, transfer, **settings):
        assert same == [True] * 4
