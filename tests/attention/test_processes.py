"""burst_attention on real processes over gloo: every layout, circulation, topology and grouping.

Guards against what simulated ranks cannot show: wrong peers or groups, autograd wiring, packing on
the wire.
"""

from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig, Force
from megatron_burst.schedule.layout import Layout
from tests.options import burst_config
from tests.oracle import full_attention, rows_of
from tests.ranks import run_ranks
from tests.sampling import whole
from tests.schedule.cases import LAYOUTS

pytestmark = pytest.mark.numeric
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def cases_of(world):
    """(layout, what circulates, heads, whether causal): all on few ranks. On more, where only peers
    and groups differ, heads take turns; six ranks and eight have half of the masks each."""
    if world <= 2:
        return list(product(LAYOUTS, ("kv", "q"), HEADS, (True, False)))
    names = list(HEADS)
    if world <= 4:
        others = product(LAYOUTS, ("kv", "q"), (True, False))
        return [(*case[:2], names[n % 3], case[2]) for n, case in enumerate(others)]
    others = product(LAYOUTS, ("kv", "q"))
    turn = 1 if world > 6 else 0
    return [(*case, names[n % 3], (n + n // 2 + turn) % 2 == 0) for n, case in enumerate(others)]


def nodes_of(world):
    return [nodes for nodes in range(1, world + 1) if world % nodes == 0]


def calls_of(world):
    """(layout, heads, whether causal, options) of every call. Nothing circulates in a gather and an
    all-to-all on one node."""
    cases = cases_of(world)
    calls = [
        (layout, heads, causal, {"nodes": nodes, "circulate": circulate})
        for layout, circulate, heads, causal in cases
        for nodes in nodes_of(world)
    ]
    still = dict.fromkeys((case[0], *case[2:]) for case in cases if case[0] is not Layout.STRIPED)
    for layout, heads, causal in still:
        for backend in ("reference", "torch-cpu"):  # causal tiles rectangular, and square
            for intra in ("gather", "a2a") if HEADS[heads][1] % world == 0 else ("gather",):
                options = {"intra": intra, "heads_per_round": 1, "backend": backend}
                calls.append((layout, heads, causal, options))
    return calls


def inputs(world, tokens, heads, dims, dtype):
    """Whole-sequence q, k, v and dout: the same on every rank."""
    generator = torch.Generator().manual_seed(world)
    s = world * tokens
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    return [
        torch.randn(2, s, *x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes
    ]


def run(tensors, rows, **options):
    """(out, dq, dk, dv) of this rank's rows."""
    q, k, v = (x[:, rows].clone().requires_grad_() for x in tensors[:3])
    out = burst_attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3][:, rows])]


SIZES = (5, (3, 4)), (6, (8, 5))  # tokens on a rank and head dimensions, those of zigzag last


def truth_of_case(world, tokens, heads, dims, causal):
    """The inputs of a case, and its true results."""
    tensors = inputs(world, tokens, heads, dims, torch.float64)
    return tensors, truth_of(tensors, causal, dims[0] ** -0.5)


def truth_of(tensors, causal, scale):
    q, k, v, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = full_attention(*leaves, causal, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors_in_float64(rank, world):
    """The largest error of each call, over out, dq, dk and dv."""
    errors, truth_for = [], cache(truth_of_case)
    for layout, heads, causal, options in calls_of(world):
        tokens, dims = SIZES[layout is Layout.ZIGZAG]
        tensors, truth = truth_for(world, tokens, HEADS[heads], dims, causal)
        rows = rows_of(layout, rank, world, tokens)
        config = burst_config(**options)
        got = run(tensors, rows, causal=causal, layout=layout.value, config=config)
        errors.append(worst(got, truth, rows))
    return errors


def worst(got, truth, rows):
    return max(float((a - b[:, rows]).abs().max()) for a, b in zip(got, truth, strict=True))


@pytest.mark.parametrize("world", [1, 2, 4, *whole(3, 6, 8)])
def test_float64_error_is_at_most_1e_12(world):
    for rank, errors in enumerate(run_ranks(errors_in_float64, world, world)):
        for call, error in zip(calls_of(world), errors, strict=True):
            assert error <= 1e-12, (rank, call, error)


WAYS = [  # modes over several nodes
    *({"intra": "gather", "circulate": c} for c in ("kv", "q")),
    {"inter": "a2a"},
    {"flat": True, "circulate": "q"},
    {"intra": "gather", "pieces": False},
    {"intra": "gather", "overlap": False},
]
SHAPES = [(2, 2), (3, 2), (4, 1)]  # nodes x ranks


def errors_over_nodes(rank, nodes, world):
    """The largest error of each mode, for GQA with a mask and for MHA without one.

    All have several rounds of heads except those that cannot; gather's last round is a smaller one.
    """
    errors, rows = {}, rows_of(Layout.ZIGZAG, rank, world, 6)
    for group, causal in ((2, True), (1, False)):
        for exchanging in (world // nodes, world):  # ranks in the all-to-all
            heads = 2 * exchanging
            tensors = inputs(world, 6, (group * heads, heads), (6, 3), torch.float64)
            truth = truth_of(tensors, causal, 6**-0.5)
            for way in WAYS:
                if (way.get("inter") == "a2a") != (exchanging == world):
                    continue
                config = burst_config(nodes=nodes, **rounds_of(way, heads), **way)
                got = run(tensors, rows, causal=causal, config=config)
                errors[causal, str(way)] = worst(got, truth, rows)
    return errors


def rounds_of(way, heads):
    if "flat" in way or not way.get("pieces", True):
        return {}
    return {"heads_per_round": 3 if way.get("intra") == "gather" and heads > 3 else 1}


@pytest.mark.parametrize("nodes, ranks", [*SHAPES, *whole((4, 2), (2, 4))])
def test_every_way_over_nodes_is_exact(nodes, ranks):
    world = nodes * ranks
    for errors in run_ranks(errors_over_nodes, world, nodes, world):
        assert len(errors) == 2 * len(WAYS)
        for case, error in errors.items():
            assert error <= 1e-12, (case, error)


def low_precision_errors(rank, world):
    """Relative errors of out, dq, dk, dv over the whole sequence, by dtype and way."""
    tokens, heads = 256 // world, (4, 2)
    generator = torch.Generator().manual_seed(5)
    shapes = [(heads[0], 32), (heads[1], 32), (heads[1], 32), (heads[0], 32)]
    drawn = [torch.randn(1, 256, *x, generator=generator) for x in shapes]
    rows = rows_of(Layout.ZIGZAG, rank, world, tokens)
    results = {}
    nodes = 2 if world % 2 == 0 else 1
    ways = {
        "kv": BurstConfig(nodes=nodes, force=Force(circulate="kv")),
        "q": BurstConfig(nodes=nodes, force=Force(circulate="q")),
        "gather": BurstConfig(intra="gather", force=Force(heads_per_round=1)),
    }
    for dtype in (torch.bfloat16, torch.float16):
        tensors = [x.to(dtype) for x in drawn]
        truth = truth_of(tensors, True, 32**-0.5)
        norms = torch.stack([(b**2).sum() for b in truth])
        for name, config in ways.items():
            got = run(tensors, rows, config=config)
            pairs = zip(got, truth, strict=True)
            total = torch.stack([((a.double() - b[:, rows]) ** 2).sum() for a, b in pairs])
            dist.all_reduce(total)
            results[dtype, name] = (total / norms).sqrt().tolist()
    return results


def test_low_precision_error_is_at_most_twice_the_undistributed_run_at_every_size(draw):
    """Gradients summed in bf16 on the way would have errors that grow with the number of ranks."""
    (baseline,) = run_ranks(low_precision_errors, 1, 1)
    for world in (8, *draw((2, 4), 1)):
        for way, errors in run_ranks(low_precision_errors, world, world)[0].items():
            for error, alone in zip(errors, baseline[way], strict=True):
                assert error <= 2 * alone, (world, way, errors, baseline)
                assert alone < 1e-2  # the baseline itself must be right


def float32_and_formats(rank):
    """sbhd against bshd, strided inputs, lse, no_grad: the differences must be zero."""
    tensors = [x.float() for x in inputs(2, 8, (4, 2), (8, 8), torch.float64)]
    rows = rows_of(Layout.ZIGZAG, rank, 2, 8)
    q, k, v = (x[:, rows] for x in tensors[:3])
    plain, lse = burst_attention(q, k, v, return_lse=True)
    moved = burst_attention(*(x.transpose(0, 1) for x in (q, k, v)), qkv_format="sbhd")
    strided = [torch.stack([x, -x], dim=-1)[..., 0] for x in (q, k, v)]
    same_heads = [x[:, :, :1].expand(-1, -1, x.shape[2], -1) for x in (k, v)]  # sharing memory
    copied = burst_attention(q, *(x.contiguous() for x in same_heads))
    (scores,) = [tensors[0].double().transpose(1, 2) @ _expand(tensors[1]) * 8**-0.5]
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    true_lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)[:, :, rows]
    return [
        float((moved.transpose(0, 1) - plain).abs().max()),
        float((burst_attention(*strided) - plain).abs().max()),
        float((burst_attention(q, *same_heads) - copied).abs().max()),
        float((lse - true_lse).abs().max()),
        lse.requires_grad,
    ]


def _expand(k):
    return k.double().repeat_interleave(2, dim=2).transpose(1, 2).transpose(-1, -2)


def test_formats_strides_and_lse():
    for moved, strided, overlapping, lse, has_grad in run_ranks(float32_and_formats, 2):
        assert moved == strided == overlapping == 0 and lse < 1e-5 and not has_grad


def what_is_kept(rank):
    """Whether outputs have a graph, and what autograd saved: with no_grad and without."""
    q, k, v = (torch.randn(1, 8, 2, 4).requires_grad_() for _ in range(3))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            quiet = burst_attention(q, k, v)
        num_quiet = len(saved)
        loud = burst_attention(q, k, v)
    return quiet.grad_fn is None, num_quiet, loud.grad_fn is not None, len(saved)


def test_no_grad_keeps_nothing():
    assert run_ranks(what_is_kept, 2) == [(True, 0, True, 5)] * 2


def under_autocast(rank):
    """The inputs are cast as for torch's attention; the sums must stay in fp32, although autocast
    would compute the reference's products in bf16."""
    wide = [x.float() for x in inputs(2, 8, (4, 2), (8, 8), torch.float64)]
    narrow = [x.bfloat16() for x in wide]
    rows = rows_of(Layout.ZIGZAG, rank, 2, 8)
    options = dict(causal=True, config=BurstConfig(backend="reference"))
    plain = run(narrow, rows, **options)
    with torch.autocast("cpu", torch.bfloat16):
        again, cast = run(narrow, rows, **options), run(wide, rows, **options)
    same = [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]
    same += [torch.equal(a, b.to(a.dtype)) for a, b in zip(plain, cast, strict=True)]
    return all(same), [str(x.dtype) for x in cast[:1] + cast[-1:]]


def test_under_autocast_inputs_are_cast_and_sums_are_not():
    expected = True, ["torch.bfloat16", "torch.float32"]
    assert run_ranks(under_autocast, 2) == [expected] * 2
