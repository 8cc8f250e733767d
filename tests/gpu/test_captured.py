"""Attention inside CUDA graphs: a replay computes the bits of a call.

Guards against slots that a rank refills while another still reads them, since replays follow each
other without any Python code; against memory that a graph shares with other calls; and against
inputs and boundaries that are read only once.
"""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstError, burst_attention
from megatron_burst.comm.group import symmetric_bytes
from megatron_burst.config import Force
from tests.gpu import SEVERAL, needs_gpus
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
HEADS, HEADS_KV, DIM = 8, 4, 64
ROWS = 256  # of a rank
TURNS = 200
ONE_NODE = dict(deterministic=True, nodes=1)


def gather(transfer, heads):
    """Options with a gather of so many KV heads a round."""
    force = Force(heads_per_round=heads, transfer=transfer)
    return BurstConfig(intra="gather", force=force, **ONE_NODE)


WAYS = {
    "pull": gather("pull", 1), "pull at once": gather("pull", HEADS_KV), "send": gather("send", 2),
    "a2a": BurstConfig(intra="a2a", force=Force(heads_per_round=1), **ONE_NODE),
    "ring": BurstConfig(intra="ring", **ONE_NODE),
    "nodes": BurstConfig(deterministic=True),
    "triton": BurstConfig(backend="triton", **ONE_NODE),
    "cudnn": BurstConfig(backend="cudnn", nodes=1),
    "flash": BurstConfig(backend="flash", **ONE_NODE),
}  # fmt: skip


def draw(seed, rows=ROWS):
    """q, k, v and dout of this rank."""
    generator = torch.Generator("cuda").manual_seed(100 * seed + dist.get_rank())
    shapes = [(1, rows, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
    make = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    return [make(shape) for shape in shapes]


def both_passes(tensors, **options):
    """The results of a call and its gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    results = burst_attention(*leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    grads = torch.autograd.grad(results[0], leaves, tensors[3])
    return [x.detach() for x in results] + [*grads]


class Graph:
    """Both passes of a call in one graph, which reads `tensors` in each replay."""

    def __init__(self, tensors, **options):
        self.tensors = [x.clone() for x in tensors]
        call = partial(both_passes, self.tensors, **options)
        call()
        torch.cuda.synchronize()
        self.graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        with torch.cuda.graph(self.graph):
            self.results = call()
        self.num_bytes = torch.cuda.memory_reserved() - before

    def __call__(self, tensors):
        for own, new in zip(self.tensors, tensors, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.results


def differ(results, expected):
    """The number of tensors with other bits, on the GPU."""
    pairs = zip(results, expected, strict=True)
    return sum((a.flatten() != b.flatten()).any() for a, b in pairs)


def delay(turns):
    """Let one rank, drawn at random, be late."""
    if turns.random() < 0.2 and turns.randrange(dist.get_world_size()) == dist.get_rank():
        torch.cuda._sleep(5_000_000)


def replayed(rank, way, layout="zigzag"):
    """How many results of replays back to back, with inputs in turns, have other bits."""
    options, turns = dict(config=WAYS[way], layout=layout), random.Random(3)
    draws = [draw(seed) for seed in range(2)]
    expected = [both_passes(tensors, **options) for tensors in draws]
    graph = Graph(draws[0], **options)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(TURNS):
        delay(turns)
        wrong += differ(graph(draws[turn % 2]), expected[turn % 2])
    print(f"{way}: the graph has {graph.num_bytes / 2**20:.1f} MiB, slots "
          f"{symmetric_bytes(dist.group.WORLD) / 2**20:.1f} MiB")  # fmt: skip
    return int(wrong), [bool(x.isfinite().all()) for x in expected[0]]


@pytest.mark.parametrize("way", WAYS)
def test_replays_back_to_back_have_the_bits_of_calls(way):
    for wrong, finite in run_ranks(replayed, SEVERAL, way, backend="nccl", timeout_s=300):
        assert wrong == 0 and all(finite)


@pytest.mark.parametrize(
    "world, way, layout",
    [(4, "pull", "zigzag"), (4, "a2a", "zigzag"), (4, "pull", "contiguous"),
     (SEVERAL, "pull", "contiguous")],
)  # fmt: skip
def test_so_they_have_on_other_ranks_and_rows(world, way, layout):
    """In contiguous layouts ranks have other programs."""
    for wrong, _ in run_ranks(replayed, world, way, layout, backend="nccl", timeout_s=300):
        assert wrong == 0


def replayed_between_nodes(rank):
    return replayed(rank, "nodes")


def test_so_they_have_between_nodes():
    for wrong, _ in run_ranks(replayed_between_nodes, 4, backend="nccl", timeout_s=300, nodes=2):
        assert wrong == 0


def mixed(rank):
    """Two graphs and calls of three lengths in any order, the longest of which has slots grow."""
    config, turns = WAYS["pull"], random.Random(5)
    draws = {rows: draw(rows, rows) for rows in (ROWS, 2 * ROWS, 4 * ROWS)}
    call = partial(both_passes, config=config)
    expected = {rows: call(draws[rows]) for rows in (ROWS, 2 * ROWS)}
    graphs = {rows: Graph(draws[rows], config=config) for rows in expected}
    expected[4 * ROWS] = call(draws[4 * ROWS])
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(TURNS):
        delay(turns)
        rows = turns.choice([*draws])
        run = graphs.get(rows) if turns.random() < 0.6 else None
        wrong += differ((run or call)(draws[rows]), expected[rows])
    return int(wrong)


def test_graphs_and_calls_in_any_order_disturb_none_of_each_other():
    for wrong in run_ranks(mixed, SEVERAL, backend="nccl", timeout_s=300):
        assert wrong == 0


EDGES = (
    [0, 64, 192, 320, 512], [0, 128, 128, 256, 512], [0, 256, 320, 512, 512],
    [0, 64, 128, 192, 384],
)  # fmt: skip


def packed(rank, layout):
    """Boundaries that change between replays, of a fixed number of documents."""
    tensors, edges = draw(1), [torch.tensor(x, device="cuda", dtype=torch.int32) for x in EDGES]
    if layout == "zigzag-documents":  # fills the sample
        edges = edges[:3]
    options = dict(config=BurstConfig(**ONE_NODE), layout=layout, max_seqlen=ROWS * 2)
    run = partial(both_passes, tensors, **options)
    expected = [run(cu_seqlens=x) for x in edges]
    starts = edges[0].clone()
    graph = Graph(tensors, cu_seqlens=starts, **options)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(40):
        starts.copy_(edges[turn % len(edges)])
        wrong += differ(graph(tensors), expected[turn % len(edges)])
    return int(wrong), int(differ(expected[0], expected[1]))


@pytest.mark.parametrize("layout", ["zigzag", "zigzag-documents"])
def test_each_replay_reads_the_boundaries_again(layout):
    for wrong, others in run_ranks(packed, 2, layout, backend="nccl", timeout_s=300):
        assert wrong == 0 and others >= 4


def with_extras(rank):
    """Sinks, the log-sum-exp and the largest scores, of rows first."""
    shape = (ROWS, 1, HEADS, DIM)
    tensors = [x.transpose(0, 1).contiguous() for x in draw(2)]
    sink = torch.linspace(-1, 1, HEADS, device="cuda")
    options = dict(sink=sink, return_lse=True, return_max_logit=True, qkv_format="sbhd",
                   config=BurstConfig(**ONE_NODE))  # fmt: skip
    expected = both_passes(tensors, **options)
    graph = Graph([torch.randn_like(x) for x in tensors], **options)
    assert expected[0].shape == shape
    return int(differ(graph(tensors), expected))


def test_what_a_call_also_returns_is_computed_again():
    assert run_ranks(with_extras, 2, backend="nccl", timeout_s=300) == [0, 0]


def forward_alone(rank):
    """The backward of a captured forward, by autograd, between other calls."""
    config, tensors = WAYS["pull"], draw(3)
    expected = both_passes(tensors, config=config)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = burst_attention(*leaves, config=config)
    wrong = 0
    for _ in range(3):
        graph.replay()
        grads = torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)
        wrong += differ([out, *grads], expected) + differ(
            both_passes(tensors, config=config), expected
        )
    return int(wrong)


def test_the_backward_of_a_captured_forward_need_not_be_captured():
    assert run_ranks(forward_alone, SEVERAL, backend="nccl", timeout_s=300) == [0] * SEVERAL


def compiled(rank):
    """A compiled call in a graph."""
    config, tensors = WAYS["pull"], draw(4)
    expected = both_passes(tensors, config=config)
    call = torch.compile(partial(burst_attention, config=config), fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    run = lambda: torch.autograd.grad(call(*leaves), leaves, tensors[3])  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = run()
    graph.replay()
    return int(differ(grads, expected[1:]))


def test_a_graph_may_hold_compiled_calls():
    found = run_ranks(compiled, SEVERAL, backend="nccl", timeout_s=300, fresh=True)
    assert found == [0] * SEVERAL


class Block(torch.nn.Module):
    """Attention between two linear layers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        width = HEADS * DIM
        self.before = torch.nn.Linear(width, (HEADS + 2 * HEADS_KV) * DIM)
        self.behind = torch.nn.Linear(width, width)

    def forward(self, x):
        heads = self.before(x).unflatten(-1, (-1, DIM)).split((HEADS, HEADS_KV, HEADS_KV), 2)
        return x + self.behind(burst_attention(*heads, config=WAYS["pull"]).flatten(2))


def blocks_of(inputs, captured):
    """Outputs and gradients of two blocks over a few steps."""
    blocks = [Block(seed).cuda().bfloat16() for seed in (1, 2)]
    parameters = [p for block in blocks for p in block.parameters()]
    run = blocks
    if captured:
        samples = tuple((torch.randn_like(inputs[0]).requires_grad_(),) for _ in blocks)
        run = torch.cuda.make_graphed_callables(tuple(blocks), samples)
    results = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        out = run[1](run[0](leaf))
        grads = torch.autograd.grad(out.square().sum(), [leaf, *parameters])
        results += [out.detach().clone(), *(grad.clone() for grad in grads)]
    return results


def graphed_blocks(rank):
    torch.manual_seed(rank)
    inputs = torch.randn(4, 1, ROWS, HEADS * DIM, device="cuda").bfloat16().unbind()
    return int(differ(blocks_of(inputs, True), blocks_of(inputs, False)))


def test_graphed_layers_train_as_others_do():
    """With torch.cuda.make_graphed_callables, as Megatron and TransformerEngine capture layers."""
    assert run_ranks(graphed_blocks, SEVERAL, backend="nccl", timeout_s=300, fresh=True) == (
        [0] * SEVERAL
    )


def refusals(rank):
    """The sentence of each call that is not captured; later calls are unaffected."""
    q, k, v, _ = draw(1)
    on_cpu = torch.tensor([0, 2 * ROWS])
    slices = torch.tensor([[0, 2 * ROWS, 0, 2 * ROWS, 1]])
    calls = {
        "must have run once": dict(softmax_scale=0.7),
        "keep must be off": dict(config=BurstConfig(keep="all")),
        "check must be off": dict(config=BurstConfig(check=10**6)),
        "nan_guard must be off": dict(config=BurstConfig(nan_guard=True)),
        "must be on the GPU": dict(cu_seqlens=on_cpu, max_seqlen=2 * ROWS),
        "max_seqlen must be passed": dict(cu_seqlens=on_cpu.cuda()),
        "the backend must not be reference": dict(
            cu_seqlens=on_cpu.cuda(), max_seqlen=2 * ROWS, config=BurstConfig(backend="reference")
        ),
        "slices and prefix_tree": dict(slices=slices),
    }  # fmt: skip
    sentences = {}
    for words, options in calls.items():
        expected = None if "softmax_scale" in options else burst_attention(q, k, v, **options)
        with pytest.raises(BurstError) as refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            burst_attention(q, k, v, **options)
        sentences[words] = str(refused.value)
        if expected is not None:
            assert torch.equal(burst_attention(q, k, v, **options), expected), words
    return sentences


def test_what_no_graph_can_hold_is_refused():
    for sentences in run_ranks(refusals, 2, backend="nccl", timeout_s=300, fresh=True):
        assert len(sentences) == 8
        for words, sentence in sentences.items():
            assert words in sentence
