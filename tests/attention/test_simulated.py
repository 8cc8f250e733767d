"""The engine with the schedules of any hosts x ranks, on simulated ranks, in float64.

Catches wrong tiles, a merge or an accumulation that misses or repeats a share, a buffer used
before it landed or after it was given away, bytes other than the plan's.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.attention import attention_shape
from megatron_burst.engine import Call, run_backward, run_forward
from megatron_burst.kernels.backends import backends
from megatron_burst.plan.cost import link_bytes
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Circulate, Direction
from megatron_burst.plan.topology import pretend_hosts
from tests.attention.simulated import run_simulated
from tests.oracle import full_attention, rows_of


def problem(cp_size, tokens, heads, dims, seed):
    """Whole-sequence q, k, v and the gradient of the output, float64."""
    generator = torch.Generator().manual_seed(seed)
    s = cp_size * tokens
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    return [torch.randn(2, s, *x, generator=generator, dtype=torch.float64) for x in shapes]


def truth(q, k, v, dout, causal, scale):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = full_attention(*leaves, causal, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_engine(topology, tensors, *, layout, mask, circulate, backend, scale, seed=0):
    """(out, dq, dk, dv) of each rank, and the bytes that each sent."""
    size = topology.cp_size
    tokens = tensors[0].shape[1] // size

    def one(rank, carrier):
        q, k, v, dout = (x[:, rows_of(layout, rank, size, tokens)] for x in tensors)
        options = {"layout": layout, "mask": mask, "tokens": tokens}
        call = Call(
            ring_schedule(topology, rank, direction=Direction.FORWARD, **options),
            ring_schedule(
                topology, rank, direction=Direction.BACKWARD, circulate=circulate, **options
            ),
            backends()[backend], carrier, scale, torch.float64,
        )  # fmt: skip
        out, lse = run_forward(call, q, k, v)
        grads = run_backward(call, q, k, v, out, lse, dout)
        shape = attention_shape(q, k, v, torch.float64)
        planned = sum(sum(link_bytes(s, shape).values()) for s in (call.forward, call.backward))
        return [out, *grads], planned

    results, carriers = run_simulated(one, size, seed)
    for carrier, (_, planned) in zip(carriers, results, strict=True):
        assert carrier.sent_bytes == planned
    return [tensors for tensors, _ in results]


def assert_exact(topology, tensors, *, layout, mask, scale, **options):
    size, tokens = topology.cp_size, tensors[0].shape[1] // topology.cp_size
    expected = truth(*tensors, mask is Mask.CAUSAL, scale)
    got = run_engine(topology, tensors, layout=layout, mask=mask, scale=scale, **options)
    for rank, results in enumerate(got):
        rows = rows_of(layout, rank, size, tokens)
        for result, whole in zip(results, expected, strict=True):
            assert (result - whole[:, rows]).abs().max() <= 1e-12


@st.composite
def cases(draw):
    layout = draw(st.sampled_from(list(Layout)))
    hosts, ranks = draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 3)]))
    topology = pretend_hosts(hosts * ranks, hosts)
    tokens = draw(st.integers(1, 5)) * (2 if layout is Layout.ZIGZAG else 1)
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    dims = draw(st.sampled_from([(4, 4), (6, 3), (2, 5)]))
    options = {
        "layout": layout,
        "mask": draw(st.sampled_from(list(Mask))),
        "circulate": draw(st.sampled_from(list(Circulate))),
        "backend": draw(st.sampled_from(["reference", "torch-cpu"])),
        "scale": draw(st.sampled_from([0.5, 1.3])),
        "seed": draw(st.integers(0, 9)),
    }
    return topology, problem(topology.cp_size, tokens, heads, dims, options["seed"]), options


@settings(deadline=None, max_examples=60)
@given(cases())
def test_any_case_is_exact(case):
    topology, tensors, options = case
    assert_exact(topology, tensors, **options)


@pytest.mark.parametrize("circulate", list(Circulate))
@pytest.mark.parametrize("hosts, ranks", [(4, 4), (2, 8), (16, 1)])
def test_sixteen_ranks(hosts, ranks, circulate):
    topology = pretend_hosts(16, hosts)
    assert_exact(
        topology, problem(16, 4, (4, 2), (4, 4), 1), layout=Layout.ZIGZAG, mask=Mask.CAUSAL,
        circulate=circulate, backend="torch-cpu", scale=0.5,
    )  # fmt: skip


def test_scores_so_far_apart_that_exp_overflows():
    """Merging must not exponentiate a positive number: lse differ by thousands between ranks."""
    tensors = problem(4, 4, (2, 2), (4, 4), 2)
    tensors[1] *= torch.linspace(1, 3000, 16).view(1, -1, 1, 1)
    got = run_engine(
        pretend_hosts(4, 2), tensors, layout=Layout.CONTIGUOUS, mask=Mask.FULL,
        circulate=Circulate.KV, backend="reference", scale=1.0,
    )  # fmt: skip
    expected = truth(*tensors, False, 1.0)
    for rank, results in enumerate(got):
        for result, whole in zip(results, expected, strict=True):
            part = whole[:, rank * 4 : rank * 4 + 4]
            assert (result - part).abs().max() <= 1e-9 * whole.abs().max()
