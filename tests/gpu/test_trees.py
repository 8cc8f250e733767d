"""Prefix trees on NCCL, against each path from a root as its own document.

Guards against misread segments, slices of rows that a kernel writes past, and results of one depth
that overwrite another's. The reference is the same kernel on one GPU with repeated prompts.
"""

import pytest
import torch

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from tests.gpu import needs_gpus
from tests.gpu.test_nccl import alone, relative
from tests.options import burst_config
from tests.oracle import rows_of, seen_by, truth_of
from tests.ranks import run_ranks
from tests.sampling import crossed

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
TOKENS, DIM, MASK = 2048, 128, Mask(right=0, documents=True)
TREES = {  # parents, and where segments begin; each sample's last row belongs to none
    "star": ((-1, 0, 0, 0, 0), (0, 1001, 1002, 1300, 1555, 2047)),
    "two prompts": ((-1, 0, 0, -1, 3, 3), (0, 400, 700, 1000, 1500, 1900, 2047)),
    "nested": (
        (-1, 0, 1, 1, 0, 4, 4, 6, 6),
        (0, 500, 800, 900, 1100, 1300, 1300, 1700, 1900, 2047),
    ),
}
WAYS = ({}, {"intra": "ring"}, {"intra": "gather", "heads_per_round": 1}, {"intra": "a2a"})


def paths(parents, edges):
    """Rows of each leaf and its ancestors, paths concatenated; where paths begin."""
    rows, starts = [], [0]
    for leaf in set(range(len(parents))) - set(parents):
        path, segment = [], leaf
        while segment >= 0:
            path[:0] = range(edges[segment], edges[segment + 1])
            segment = parents[segment]
        rows += path
        starts.append(len(rows))
    return torch.tensor(rows, device="cuda"), torch.tensor(starts, dtype=torch.int32, device="cuda")


def repeated(tensors, tree, config, group):
    """(out, dq, dk, dv) of the sample with each prompt computed once per answer."""
    rows, starts = paths(*tree)
    first = torch.full((TOKENS,), len(rows), device="cuda")
    first.scatter_reduce_(0, rows, torch.arange(len(rows), device="cuda"), "amin")
    there = first < len(rows)
    leaves = [x.float().requires_grad_() for x in tensors[:3]]  # copies are summed in float32
    out = burst_attention(
        *(x[:, rows].bfloat16() for x in leaves), cu_seqlens=starts, config=config, group=group
    )
    out = torch.where(there.view(1, -1, 1, 1), out[:, first.clamp(max=len(rows) - 1)], 0)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def errors(rank, world, nodes, name, heads, backend):
    """Relative errors of (out, dq, dk, dv) by mode, over the whole sample."""
    parents, edges = TREES[name]
    generator = torch.Generator("cuda").manual_seed(7)
    tensors = [
        torch.randn(1, TOKENS, h, DIM, generator=generator, device="cuda").bfloat16()
        for h in (heads[0], heads[1], heads[1], heads[0])
    ]
    seen = seen_by(MASK, edges, TOKENS, parents).cuda()
    truth = truth_of(tensors, DIM**-0.5, seen=seen)

    def bar(_rows, config, group):
        return repeated(tensors, (parents, edges), config, group)

    def run(rows, config, layout="zigzag", starts_on="cpu"):
        q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])
        out = burst_attention(
            q, k, v, cu_seqlens=torch.tensor(edges, device=starts_on), prefix_tree=parents,
            layout=layout, config=config,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])]

    found = {"alone": alone(bar, truth, BurstConfig(backend=backend))}
    for way in WAYS:
        config = burst_config(nodes=nodes, backend=backend, **way)
        for layout, starts_on in (("zigzag", "cpu"), ("contiguous", "cuda")):
            rows = rows_of(Layout(layout), rank, world, TOKENS // world).cuda()
            for turn in range(3):  # buffers are used again; a race shows as a difference
                if turn == rank:
                    torch.cuda._sleep(20_000_000)  # ranks must not have to run in step
                got = relative(run(rows, config, layout, starts_on), truth, rows)
                key = f"{way} {layout}"
                found[key] = max(found.get(key, (0,)), got)
    return found


PLACES = [(2, 1, "auto"), (4, 2, "auto"), (2, 2, "flash"), (2, 2, "auto"), (4, 2, "triton"),
          (2, 1, "flash"), (4, 2, "flash"), (2, 1, "triton"), (2, 2, "triton")]  # fmt: skip


@pytest.mark.parametrize(("name", "world", "nodes", "backend"), crossed(TREES, PLACES, 2))
def test_errors_are_at_most_twice_those_of_one_gpu_that_repeats_prompts(
    name, world, nodes, backend
):
    heads = (16, 2) if nodes == 1 else (8, 4)
    settings = {"backend": "nccl", "timeout_s": 300, "nodes": nodes}
    found = run_ranks(errors, world, world, nodes, name, heads, backend, **settings)[0]
    single = found.pop("alone")
    print(f"{name} {backend} 1 rank, prompts repeated: {single}")
    assert len(found) == 2 * len(WAYS)
    for way, several in found.items():
        print(f"{name} {backend} {world} ranks, {nodes} nodes, {way}: {several}")
        for error, bar in zip(several, single, strict=True):
            assert error <= 2 * bar and bar < 1e-2, (way, several, single)


def same_bits(rank):
    """Whether two calls give the same gradients, where that was asked for."""
    parents, edges = TREES["nested"]
    rows = rows_of(Layout.ZIGZAG, rank, 2, TOKENS // 2)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (
        torch.randn(1, TOKENS, 8, DIM, generator=generator)[:, rows].cuda().bfloat16()
        for _ in range(4)
    )
    starts, config = torch.tensor(edges), BurstConfig(deterministic=True)
    found = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = burst_attention(*leaves, cu_seqlens=starts, prefix_tree=parents, config=config)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_deterministic_gradients_have_the_same_bits_twice():
    assert all(run_ranks(same_bits, 2, backend="nccl", timeout_s=300))
