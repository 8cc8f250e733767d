"""CUDA graphs of what surrounds attention and loss, with burst in between; and Megatron's graphs.

Megatron's graphs hold MLPs, MoE routers, attention, or whole layers. Losses equal those of a run
without graphs, to a bf16 rounding. What graphs of attention compute is tested in
`test_captured.py`.

Guards against a graph whose input or output moves, and a capture that would run other ranks'
transfers once and never again.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_burst import BurstConfig, BurstError, burst_attention, linear_cross_entropy
from tests.gpu import GPUS, needs_gpus, needs_transformer_engine
from tests.ranks import run_ranks
from tests.sampling import whole

HEADS, DIM, TOKENS = 4, 64, 512
WIDTH = HEADS * DIM
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]


def attention(x):
    """Attention of a shard [1, tokens, 3 h d]."""
    config = BurstConfig(deterministic=True)  # compared bitwise
    return burst_attention(*x.unflatten(-1, (3, HEADS, DIM)).unbind(2), config=config).flatten(2)


def parts():
    """Layers before and after attention."""
    torch.manual_seed(3)
    before, behind = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    return before.cuda().bfloat16(), behind.cuda().bfloat16()


def steps(before, behind, inputs):
    """Outputs and gradients of a few steps."""
    found = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        out = behind(attention(before(leaf)))
        out.square().sum().backward()
        found += [out.detach().clone(), leaf.grad.clone()]
    return found


def around(rank):
    """Whether layers in graphs around attention match those without graphs bitwise."""
    inputs = torch.randn(3, 1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16).unbind()
    plain = steps(*parts(), inputs)
    before, behind = parts()
    samples = ((torch.randn_like(inputs[0]).requires_grad_(),) for _ in range(2))
    graphed = steps(*torch.cuda.make_graphed_callables((before, behind), tuple(samples)), inputs)
    return [torch.equal(*both) for both in zip(plain, graphed, strict=True)]


def inside(rank):
    """The message where the loss is captured; later calls are unaffected."""
    x = torch.randn(1, TOKENS, 3 * WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 3 * WIDTH, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(1, TOKENS, device="cuda", dtype=torch.long)
    expected = linear_cross_entropy(x, weight, labels)
    with pytest.raises(BurstError) as refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_cross_entropy(x, weight, labels)
    assert torch.equal(linear_cross_entropy(x, weight, labels), expected)
    return str(refused.value)


class Slow(torch.nn.Module):
    """Takes longer than the thread that watches passes sleeps."""

    def forward(self, x):
        time.sleep(1.5)
        return x + 1


def for_seconds(rank):
    """What a graph that was captured for seconds computes, after a pass."""
    attention(torch.randn(1, TOKENS, 3 * WIDTH, device="cuda", dtype=torch.bfloat16))
    ones = torch.ones(4, device="cuda")
    graphed = torch.cuda.make_graphed_callables(Slow(), (ones.clone(),), num_warmup_iters=1)
    return graphed(ones).tolist()


WORLD = min(GPUS, 2)


def test_layers_around_attention_are_captured():
    for equal in run_ranks(around, WORLD, backend="nccl", timeout_s=300, fresh=True):
        assert all(equal), equal


def test_a_pass_that_is_watched_disturbs_no_capture():
    for found in run_ranks(for_seconds, WORLD, backend="nccl", timeout_s=300, fresh=True):
        assert found == [2.0] * 4


def test_the_loss_itself_is_refused():
    for sentence in run_ranks(inside, WORLD, backend="nccl", timeout_s=300, fresh=True):
        assert "must not be captured in a CUDA graph" in sentence


SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
FLAGS = f"""
--num-layers 2 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 256
--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 1e-3
--min-lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --bf16
--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 1 --eval-interval 1000
--num-workers 0 --split 98,1,1 --transformer-impl transformer_engine
--no-gradient-accumulation-fusion
--context-parallel-impl burst --context-parallel-size {WORLD}
""".split()


def losses_of(folder, *flags):
    """Losses per step of a Megatron run with extra flags."""
    folder.mkdir()
    log = folder / "steps.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD}", "-m", "megatron_burst", SCRIPT, *FLAGS]
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # as Megatron requires
    done = subprocess.run(
        [*map(str, command), *flags, "--step-log", str(log)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line)["lm loss"] for line in log.read_text().splitlines()]


EXPERTS = """
--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256
""".split()
CAPTURED = {  # the implementation, what it captures (nothing: layers), and flags of both runs
    "MLPs": ("transformer_engine", ["mlp"], []),
    "attention": ("transformer_engine", ["attn"], []),
    "layers": ("local", [], ["--te-rng-tracker"]),
    "routers": ("local", ["moe_router"], EXPERTS),
}


@needs_transformer_engine()
@pytest.mark.parametrize("part", ["MLPs", "attention", "layers", *whole("routers")])
def test_megatrons_graphs_change_nothing(part, tmp_path):
    impl, modules, flags = CAPTURED[part]
    graphs = ["--cuda-graph-impl", impl, *(["--cuda-graph-modules", *modules] if modules else [])]
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(losses_of, tmp_path / name, *flags, *more)
                for name, more in {"plain": (), "graphed": graphs}.items()]  # fmt: skip
        plain, graphed = (run.result() for run in runs)
    assert len(plain) == len(graphed) == 6
    assert graphed == pytest.approx(plain, rel=2**-8)
