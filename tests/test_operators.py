"""Attention and the loss as operators of torch's compiler: a compiled model stays one graph, with
the results and gradients of eager calls.

Guards against a graph break, an output that is a view of an input, a fake that promises other
shapes or strides than the operator returns, options that the graph forgets, and compiled code that
another process would read from disk with other options.
"""

from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, BurstError, burst_attention, linear_cross_entropy, operators
from megatron_burst.config import Force
from megatron_burst.loss import operators as loss_operators
from tests.ranks import run_ranks

# Otherwise a first compilation tries what vectors the CPU has, which takes 15 s.
torch._inductor.config.cpp.vec_isa_ok = False
torch._inductor.config.compile_threads = 1
TOKENS, HEADS, DIMS = 16, (4, 2), (8, 6)
EDGES = torch.tensor([0, 5, 12, 16])
CASES = {  # options, and how q, k and v lie
    "dense": ({}, "bshd"),
    "of a configuration": ({"config": BurstConfig(intra="ring", force=Force(grad_wire="input"))},
                           "bshd"),
    "full": ({"causal": False, "softmax_scale": 0.3}, "sbhd"),
    "a window": ({"window": (3, 0), "return_lse": True}, "sbhd"),
    "packed": ({"cu_seqlens": EDGES, "max_seqlen": 7, "return_lse": True}, "thd"),
    "a tree": ({"cu_seqlens": EDGES, "prefix_tree": [-1, 0, 0]}, "bshd"),
    "a tree in a tensor": ({"cu_seqlens": EDGES, "prefix_tree": torch.tensor([-1, 0, 0])}, "bshd"),
    "slices": ({"slices": torch.tensor([(0, 16, 0, 16, 1)])}, "bshd"),
    "sinks, capped": ({"softcap": 1.5, "return_max_logit": True}, "bshd"),
    "the layout of documents": ({"cu_seqlens": torch.tensor([0, 4, 16]),
                                 "layout": "zigzag-documents"}, "bshd"),
}  # fmt: skip
NAMES = [*CASES]


def inputs(layout, ranks=1):
    """Leaves q, k, v of a rank, the same on all, and sinks."""
    torch.manual_seed(2)
    rows = TOKENS // ranks
    shape = {"bshd": (1, rows), "sbhd": (rows, 2), "thd": (rows,)}[layout]
    sizes = (HEADS[0], DIMS[0]), (HEADS[1], DIMS[0]), (HEADS[1], DIMS[1])
    leaves = [torch.randn(*shape, *size) for size in sizes]
    return [x.requires_grad_() for x in (*leaves, torch.randn(HEADS[0]))]


def layer(options, layout, q, k, v, sink):
    """Something to compile before and after attention."""
    options = options | {"qkv_format": layout, "sink": sink if "softcap" in options else None}
    results = burst_attention(q * 1.5, k.tanh(), v, **options)
    results = results if isinstance(results, tuple) else (results,)
    return results[0].sin(), *results[1:]


def results_of(call, leaves):
    """Outputs, and gradients of all leaves that have one."""
    outs = call(*leaves)
    grads = torch.autograd.grad(outs[0].square().sum(), leaves, allow_unused=True)
    return [*(x.detach() for x in outs), *(x for x in grads if x is not None)]


def differences(rank, ranks, names, backend):
    """By case, the largest difference between compiled and eager, and how many graphs there are."""
    report = {}
    for name in names:
        torch._dynamo.reset()
        counters.clear()
        options, layout = CASES[name]
        call = partial(layer, options, layout)
        leaves = inputs(layout, ranks)
        eager = results_of(call, leaves)
        compiled = results_of(torch.compile(call, backend=backend, fullgraph=True), leaves)
        pairs = zip(eager, compiled, strict=True)
        report[name] = (
            max(float((a - b).abs().max()) for a, b in pairs), counters["stats"]["unique_graphs"],
        )  # fmt: skip
    return report


def test_a_compiled_call_is_one_graph_with_the_results_of_an_eager_one():
    """Packed by torch's own code generator."""
    generated = differences(0, 1, ["packed"], "inductor")
    for name, got in (*differences(0, 1, NAMES, "aot_eager").items(), *generated.items()):
        assert got[0] <= 2e-6 and got[1] == 1, (name, got)


@pytest.mark.parametrize("ranks", [2, 4])
def test_also_on_several_ranks(ranks):
    """Where transfers are in the operator, and backward sends again what an eager call keeps."""
    names = NAMES if ranks == 2 else ["of a configuration", "packed", "a tree"]
    for report in run_ranks(differences, ranks, ranks, names, "aot_eager"):
        assert len(report) == len(names)
        for name, (difference, graphs) in report.items():
            assert difference <= 2e-6 and graphs == 1, (name, difference, graphs)


OPTIONS = repr((
    (True, None, None, 0.0, "zigzag", "bshd", True), None, None, (True, True), "a version",
))  # fmt: skip
SETTINGS = dict(
    sequence_parallel=False, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    softcap=0.0, logit_scale=1.0, return_lse=False, grads="auto", keep_logits=True,
    supervised="all", invariant=False,
)  # fmt: skip


def test_operators_pass_the_checks_of_torch():
    """Schema, fakes, autograd registration and tracing: `torch.library.opcheck`."""
    q, k, v, sink = inputs("bshd")
    empty = (None,) * 6
    attention = torch.ops.megatron_burst.attention.default
    without = OPTIONS.replace("(True, True)", "(True, False)")
    torch.library.opcheck(attention, (q, k, v, None, *empty, "", without))
    torch.library.opcheck(attention, (q, k, v, sink, *empty, "", OPTIONS))
    hidden, weight = torch.randn(8, 16), torch.randn(32, 16)
    words = repr((tuple(SETTINGS.items()), (True, True), "a version"))
    args = hidden.requires_grad_(), weight.requires_grad_(), torch.arange(8), None, "", words
    torch.library.opcheck(torch.ops.megatron_burst.linear_cross_entropy.default, args)


def test_no_output_is_memory_of_an_input_or_of_another():
    q, k, v, sink = inputs("bshd")
    results = torch.ops.megatron_burst.attention(q, k, v, sink, *(None,) * 6, "", OPTIONS)
    places = [x.untyped_storage().data_ptr() for x in (q, k, v, sink, *results)]
    assert len(set(places)) == len(places)


class Block(nn.Module):
    """Layers differ in nothing that the compiler sees."""

    def __init__(self, number):
        super().__init__()
        self.number, self.project = number, nn.Linear(24, 24)

    def forward(self, x, bounds):
        q, k, v = self.project(x).view(1, -1, 3, 8).split(1, 2)
        return x + burst_attention(
            q, k, v, cu_seqlens=bounds, max_seqlen=16, layer=self.number
        ).flatten(2).repeat(1, 1, 3)


def test_layers_share_compiled_code_whatever_their_numbers_and_boundaries():
    """Guards against a compilation for each layer, which ends at a limit, or for each sample."""
    torch._dynamo.reset()
    counters.clear()
    blocks = [torch.compile(Block(n), backend="eager", fullgraph=True) for n in range(1, 13)]
    for bounds in (EDGES, torch.tensor([0, 3, 10, 16])):
        x = torch.randn(1, TOKENS, 24)
        for block in blocks:
            x = block(x, bounds)
    assert counters["stats"]["unique_graphs"] <= 2


def test_options_are_a_text_that_means_the_same_in_another_process():
    """Compiled code is kept on disk with this text."""
    config = BurstConfig(intra="gather", nodes=None, force=Force(heads_per_round=3))
    chosen = tuple(getattr(config, name) for name in operators._CONFIG)
    forced = tuple(getattr(config.force, name) for name in operators._FORCE)
    options = (True, (7, 0), 0.25, 0.0, "contiguous", "bshd", False)
    words = repr((options, chosen, forced, (True, False), operators._SOURCE))
    read = operators._options_of(words)
    assert read.args.config == config and read.wanted == (True, False)
    assert read.args[:7] == options


def test_autocast_and_no_grad_are_those_of_an_eager_call():
    q, k, v, _ = inputs("bshd")
    for context in (partial(torch.autocast, "cpu", torch.bfloat16), torch.no_grad):

        def call(q, k, v, context=context):
            with context():
                return burst_attention(q.sin(), k, v)

        torch._dynamo.reset()
        eager, compiled = (
            call(q, k, v),
            torch.compile(call, backend="eager", fullgraph=True)(q, k, v),
        )
        assert eager.dtype == compiled.dtype and torch.equal(eager, compiled)
        assert eager.requires_grad == compiled.requires_grad


def test_a_wrong_call_is_refused_with_its_own_sentence():
    q, k, v, _ = inputs("bshd")
    for options, said in (({"softmax_scale": -1.0}, "softmax_scale must be positive"),
                          ({"window": (3, 0), "causal": False, "cu_seqlens": torch.tensor([0, 99])},
                           "documents must end")):  # fmt: skip
        torch._dynamo.reset()
        call = torch.compile(partial(burst_attention, **options), backend="eager", fullgraph=True)
        with pytest.raises(BurstError, match=said):
            call(q, k, v)


NUMBERS = {  # by option, two values: the compiler makes a symbol of what changes
    "softmax_scale": (0.3, 0.7), "softcap": (2.0, 5.0), "window": ((3, 0), (7, 0)),
    "prefix_tree": ([-1, 0], [-1, -1]), "max_seqlen": (11, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_change_and_be_symbols(name):
    q, k, v, _ = inputs("bshd")
    bounds = (
        {"cu_seqlens": torch.tensor([0, 5, 16])} if name in ("prefix_tree", "max_seqlen") else {}
    )

    def call(q, value):
        return burst_attention(q.sin(), k, v, **{name: value}, **bounds).sin()

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for value in (*NUMBERS[name], NUMBERS[name][0]):
            assert torch.equal(compiled(q, value), call(q, value))


def test_lengths_and_numbers_of_the_loss_may_change():
    torch._dynamo.reset()
    weight = torch.randn(32, 16, requires_grad=True)

    def call(x, z):
        return linear_cross_entropy(x.sin(), weight, torch.arange(len(x)), z_loss=z)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, z in ((8, 0.0), (12, 1e-3), (16, 1e-2)):
        x = torch.randn(rows, 16, requires_grad=True)
        both = [torch.autograd.grad(one(x, z), (x, weight)) for one in (call, compiled)]
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*both, strict=True))


def test_other_kinds_of_arguments_go_to_the_eager_call():
    """Which takes them, or refuses them in its own words."""
    q, k, v, _ = inputs("bshd")
    for options in ({"softmax_scale": np.float64(0.3)}, {"window": (np.int64(3), 0)}):
        torch._dynamo.reset()
        call = partial(burst_attention, k=k, v=v, **options)
        assert torch.equal(torch.compile(call, backend="eager")(q), call(q))
    for options, said in (({"softmax_scale": float("inf")}, "softmax_scale must be"),
                          ({"softcap": float("nan")}, "softcap must be"),
                          ({"config": {}}, "config must be")):  # fmt: skip
        torch._dynamo.reset()
        with pytest.raises(BurstError, match=said):
            torch.compile(partial(burst_attention, **options), backend="eager")(q, k, v)


@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad"])
def test_transforms_in_compiled_code_are_refused(transform):
    q, k, v, _ = inputs("bshd")
    hidden, weight, labels = torch.randn(8, 16), torch.randn(32, 16), torch.arange(8)

    def attend(q):
        return burst_attention(q, k, v).sum()

    def loss(hidden):
        return linear_cross_entropy(hidden, weight, labels)

    for call, x in ((attend, q.detach()), (loss, hidden)):
        transformed = {
            "jvp": lambda x, call=call: torch.func.jvp(call, (x,), (x,)),
            "vmap": lambda x, call=call: torch.vmap(call)(torch.stack([x, x])),
            "grad": lambda x, call=call: torch.func.grad(call)(x),
        }[transform]
        torch._dynamo.reset()
        with pytest.raises((BurstError, torch._dynamo.exc.TorchDynamoException)):
            torch.compile(transformed, backend="eager")(x)


def test_weights_of_rows_keep_their_dtype_and_gradient():
    hidden, weight = torch.randn(12, 16, requires_grad=True), torch.randn(32, 16)
    for mask in (torch.rand(12, dtype=torch.float64), torch.rand(12, requires_grad=True)):

        def call(hidden, mask):
            return linear_cross_entropy(hidden * 2, weight, torch.arange(12), loss_mask=mask).sin()

        torch._dynamo.reset()
        leaves = [x for x in (hidden, mask) if x.requires_grad]
        pairs = [torch.autograd.grad(one(hidden, mask), leaves)
                 for one in (call, torch.compile(call, backend="inductor"))]  # fmt: skip
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*pairs, strict=True))


def one_is_compiled(rank):
    """What ranks say if only the first compiles its call."""
    q, k, v, _ = inputs("bshd", 2)
    call = partial(burst_attention, config=BurstConfig(intra="a2a", timeout_s=20))
    call(q, k, v)
    dist.barrier()
    try:
        (torch.compile(call, backend="eager") if rank == 0 else call)(q, k, v)
    except BurstError as error:
        return str(error)
    return ""


def test_a_rank_that_is_not_compiled_is_told():
    """It runs another program, as backward reads other memory."""
    assert all("cp ranks [0]" in said for said in run_ranks(one_is_compiled, 2))


@pytest.mark.parametrize("option", ["keep", "check"])
def test_what_the_graph_cannot_have_is_a_graph_break_and_right(option):
    """Kept results and spot checks belong to one pass of autograd."""
    config = BurstConfig(keep="all") if option == "keep" else BurstConfig(check=1)
    q, k, v, _ = inputs("bshd")

    def call(q):
        return checkpoint(
            lambda q: burst_attention(q.sin(), k, v, config=config).sin(), q, use_reentrant=False
        )

    call = call if option == "keep" else lambda q: burst_attention(q.sin(), k, v, config=config)
    torch._dynamo.reset()
    layer = lambda q: burst_attention(q.sin(), k, v, config=config).sin()  # noqa: E731
    explained = torch._dynamo.explain(layer)(q)
    assert explained.graph_break_count >= 1
    assert all("megatron_burst runs kernels" in each.reason for each in explained.break_reasons)
    eager = torch.autograd.grad(call(q).sum(), q)
    compiled = torch.autograd.grad(torch.compile(call, backend="eager")(q).sum(), q)
    assert torch.equal(*eager, *compiled)


def test_nan_guard_guards_compiled_calls():
    q, k, v, _ = inputs("bshd")
    guarded = partial(burst_attention, config=BurstConfig(nan_guard=True))
    torch._dynamo.reset()
    call = torch.compile(guarded, backend="eager", fullgraph=True)
    assert torch.equal(call(q, k, v), guarded(q, k, v))
    with pytest.raises(BurstError, match="NaN"):
        call(q, k, v * torch.nan)


LOSSES = {
    "mean": {},
    "sum of weighted rows": {"reduction": "sum", "loss_mask": torch.rand(12), "softcap": 2.0},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": 3},
}


def losses(rank, name, ranks, backend):
    """Of eager and compiled: loss and gradients; with the vocabulary in shards."""
    torch.manual_seed(1)
    hidden, whole = torch.randn(12, 16, requires_grad=True), torch.randn(32, 16)
    weight = whole.chunk(ranks)[rank].clone().requires_grad_()
    labels = torch.arange(12) * 2 % 32
    group = dist.group.WORLD if ranks > 1 else None

    def call(hidden, weight):
        return linear_cross_entropy(hidden * 2, weight, labels, tp_group=group, **LOSSES[name]) * 3

    torch._dynamo.reset()
    both = [call, torch.compile(call, backend=backend, fullgraph=True)]
    return [[y.detach(), *torch.autograd.grad(y, (hidden, weight))]
            for y in (one(hidden, weight) for one in both)]  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss_is_one_operator_with_the_gradients_of_an_eager_one(name):
    for eager, compiled in (
        losses(0, name, 1, "inductor"),
        *run_ranks(losses, 2, name, 2, "eager"),
    ):
        for a, b in zip(eager, compiled, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


OTHER_LOSSES = {
    "rows": {"reduction": "none"}, "recomputed": {"grads": "recompute"},
    "with lse": {"return_lse": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_losses_that_recompute_logits_are_a_graph_break(name):
    hidden, weight, labels = torch.randn(8, 16), torch.randn(32, 16), torch.arange(8)
    torch._dynamo.reset()

    def call(hidden):
        loss = linear_cross_entropy(hidden * 2, weight, labels, **OTHER_LOSSES[name])
        return (loss[0] if isinstance(loss, tuple) else loss).sin()

    explained = torch._dynamo.explain(call)(hidden)
    assert "megatron_burst runs kernels" in explained.break_reasons[0].reason


def test_both_modules_register_their_operators_once():
    names = {"attention", "attention_backward", "linear_cross_entropy"}
    assert operators.traced_attention and loss_operators.traced_loss
    assert all(hasattr(torch.ops.megatron_burst, name) for name in names)
