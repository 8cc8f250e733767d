"""burst_attention on NCCL: the same schedules, with overlapping kernels and transfers.

Guards against transfers read before they arrive or overwritten in flight, wrong communicators, and
low-precision intermediate sums: errors are compared with one GPU's run of the same backend.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from tests.gpu import SEVERAL, needs_gpus
from tests.options import burst_config
from tests.oracle import rows_of, truth_of
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


def errors(rank, world, dtype, heads, tokens):
    """Relative errors of (out, dq, dk, dv) over the whole sequence for every nodes x circulate."""
    generator = torch.Generator("cuda").manual_seed(7)
    sizes = [(heads[0], 64), (heads[1], 64), (heads[1], 64), (heads[0], 64)]
    tensors = [
        torch.randn(2, tokens, *x, generator=generator, device="cuda").to(dtype) for x in sizes
    ]
    truth = truth_of(tensors, 0.125, causal=True)
    rows = rows_of(Layout.ZIGZAG, rank, world, tokens // world).cuda()

    def run(rows, config, group=None):
        q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])
        out = burst_attention(q, k, v, group=group, config=config)
        return [out, *torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])]

    found = {"alone": alone(run, truth, BurstConfig())}
    for nodes in (h for h in (1, 2, 4) if world % h == 0):
        for circulate in ("kv", "q"):
            config = BurstConfig(nodes=nodes, force=Force(circulate=circulate))
            for _ in range(3):  # buffers are used again; a race shows as a difference
                key, got = (nodes, circulate), run(rows, config)
                found[key] = max(found.get(key, (0,)), relative(got, truth, rows))
    return found


def relative(got, truth, rows):
    """Relative errors over the whole sequence, from results of which each rank has some rows."""
    wrong = squares(got, [whole[:, rows] for whole in truth])
    dist.all_reduce(wrong)
    return tuple((wrong / squares(truth)).sqrt().tolist())


def squares(tensors, others=None):
    pairs = zip(tensors, others or [0] * len(tensors), strict=True)
    return torch.stack([((a.double() - b) ** 2).sum() for a, b in pairs])


def alone(run, truth, config):
    """Relative errors of one rank with all rows; `run`: (rows, config, group) -> results."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    got = run(slice(None), config, groups[dist.get_rank()])
    return tuple((squares(got, truth) / squares(truth)).sqrt().tolist())


@pytest.mark.parametrize(
    "dtype, heads, connections",
    [
        (torch.bfloat16, (8, 8), "1"),
        (torch.bfloat16, (8, 2), "1"),
        (torch.bfloat16, (8, 2), "8"),
        (torch.bfloat16, (8, 2), "32"),
        (torch.float32, (8, 2), "1"),
    ],
)
def test_errors_are_at_most_twice_one_gpus(dtype, heads, connections):
    settings = {
        "backend": "nccl",
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": connections},
        "timeout_s": 300,
    }
    tokens = 4096 if dtype is torch.bfloat16 else 1024
    found = run_ranks(errors, SEVERAL, SEVERAL, dtype, heads, tokens, **settings)[0]
    single = found.pop("alone")
    for (nodes, circulate), several in found.items():
        print(f"{dtype} heads {heads} ranks {SEVERAL} nodes {nodes} {circulate}: {several}")
        for error, bar in zip(several, single, strict=True):
            assert error <= 2 * bar, (SEVERAL, nodes, circulate, several, single)


def many_calls_without_a_sync(rank, world, options):
    """Sixteen forward and backward passes in a row: buffers are reused in GPU stream order."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 2048, 8, 128, device="cuda").bfloat16() for _ in range(3))
    config = burst_config(**options)
    results = []
    for _ in range(16):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = burst_attention(*leaves, config=config)
        out.square().sum().backward()
        results.append([out.detach(), leaves[1].grad])  # flash's dq is not deterministic
    first = results[0]
    return max(
        float((a - b).abs().max())
        for other in results[1:]
        for a, b in zip(other, first, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 2, "circulate": "q"},
        {"intra": "gather", "heads_per_round": 3, "transfer": "pull", "nodes": 1},
        {"intra": "gather", "heads_per_round": 8, "transfer": "pull", "nodes": 1},
        {"intra": "gather", "heads_per_round": 3, "transfer": "send", "nodes": 1},
    ],
    ids=str,
)
def test_back_to_back_calls_give_the_same_results(options):
    for difference in run_ranks(
        many_calls_without_a_sync, SEVERAL, SEVERAL, options, backend="nccl"
    ):
        assert difference == 0


def two_on_one_gpu(rank):
    torch.cuda.set_device(0)
    q, k, v = (torch.randn(1, 64, 8, 64, device="cuda").bfloat16() for _ in range(3))
    with pytest.raises(BurstError) as error:
        burst_attention(q, k, v)
    return str(error.value)


@needs_gpus(2)  # with one, NCCL is told that they are on different nodes
def test_ranks_that_share_a_gpu_are_refused_on_all():
    for sentence in run_ranks(two_on_one_gpu, 2, backend="nccl", fresh=True):
        assert "got cp ranks [0, 1] on GPU" in sentence


def on_another_device(rank):
    q, k, v = (torch.randn(1, 64, 8, 64, device=f"cuda:{1 - rank}").bfloat16() for _ in range(3))
    with pytest.raises(BurstError) as error:
        burst_attention(q, k, v)
    return str(error.value)


@needs_gpus(2)
def test_tensors_on_another_device_than_the_current_one_are_refused():
    for rank, sentence in enumerate(run_ranks(on_another_device, 2, backend="nccl")):
        assert f"got cuda:{1 - rank} while cuda:{rank} is current" in sentence
