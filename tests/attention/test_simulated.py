"""The engine with ring and gather schedules of any size, on simulated ranks, in float64.

Catches wrong tiles, a merge or an accumulation that misses or repeats a share, a buffer used
before it landed or after it was given away, bytes other than the plan's.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.engine.call import Call
from megatron_burst.engine.run import run_backward, run_forward
from megatron_burst.kernels.backends import backends
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.schedule import Circulate
from megatron_burst.plan.topology import pretend_hosts, topology_of
from tests.attention.engine import (
    a2a_schedules,
    assert_exact,
    both_passes,
    both_passes_leaving,
    both_passes_recalling,
    gather_schedules,
    problem,
    ring_schedules,
    run_engine,
    truth,
)
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of


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
        "schedules": partial(ring_schedules, circulate=draw(st.sampled_from(list(Circulate)))),
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


EXCHANGING_HOSTS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3), (4, 2)]
GATHERING_HOSTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3), (3, 2), (4, 2), (2, 4)]


@st.composite
def scattered(draw, hosts, ranks):
    """A topology of so many hosts; their ranks in a row, or anywhere in the group."""
    names = [host for host in range(hosts) for _ in range(ranks)]
    return topology_of(draw(st.one_of(st.just(names), st.permutations(names))))


@st.composite
def gather_cases(draw):
    hosts, ranks = draw(st.sampled_from(GATHERING_HOSTS))
    size = hosts * ranks
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1), (6, 3), (5, 5)]))
    backend, rectangular = draw(
        st.sampled_from([("reference", True), ("reference", False), ("torch-cpu", False)])
    )
    seed, dims = draw(st.integers(0, 9)), draw(st.sampled_from([(4, 4), (6, 3), (2, 5)]))
    tensors = problem(size, 2 * draw(st.integers(1, 3)), heads, dims, seed)
    circulate, recalls = draw(
        st.sampled_from([(Circulate.KV, False), (Circulate.KV, True), (Circulate.Q, False)])
    )
    options = {
        "layout": draw(st.sampled_from([Layout.ZIGZAG, Layout.CONTIGUOUS])),
        "mask": draw(st.sampled_from(list(Mask))),
        "schedules": partial(
            gather_schedules,
            heads=(heads[1], draw(st.integers(1, heads[1])), rectangular),
            circulate=circulate,
            recalls=recalls,
        ),
        "passes": both_passes_leaving if recalls else both_passes,
        "backend": backend,
        "scale": 0.5,
        "seed": seed,
        "pulls": draw(st.sampled_from([False, True, "one slot"])),
    }
    return draw(scattered(hosts, ranks)), tensors, options


@settings(deadline=None, max_examples=80)
@given(gather_cases())
def test_any_gathering_case_is_exact(case):
    """Catches keys read before they arrive, shares sent to the wrong owner or summed too early."""
    topology, tensors, options = case
    assert_exact(topology, tensors, **options)


@st.composite
def a2a_cases(draw):
    hosts, ranks = draw(st.sampled_from(EXCHANGING_HOSTS))
    per_rank, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    heads = (ranks * per_rank * group, ranks * per_rank)
    seed, dims = draw(st.integers(0, 9)), draw(st.sampled_from([(4, 4), (6, 3), (2, 5)]))
    options = {
        "layout": draw(st.sampled_from([Layout.ZIGZAG, Layout.CONTIGUOUS])),
        "mask": draw(st.sampled_from(list(Mask))),
        "schedules": partial(
            a2a_schedules,
            heads=(heads[1], draw(st.integers(1, per_rank))),
            circulate=draw(st.sampled_from(list(Circulate))),
        ),
        "backend": draw(st.sampled_from(["reference", "torch-cpu"])),
        "scale": 0.5,
        "seed": seed,
        "pulls": draw(st.sampled_from([False, True, "one slot"])),
        "passes": draw(st.sampled_from([both_passes, both_passes_recalling])),
    }
    tensors = problem(hosts * ranks, 2 * draw(st.integers(1, 3)), heads, dims, seed)
    return draw(scattered(hosts, ranks)), tensors, options


@settings(deadline=None, max_examples=80)
@given(a2a_cases())
def test_any_exchange_of_heads_is_exact(case):
    """Catches heads or rows dealt to the wrong rank, results that come home too early or late."""
    topology, tensors, options = case
    assert_exact(topology, tensors, **options)


@pytest.mark.parametrize("circulate", list(Circulate))
@pytest.mark.parametrize("hosts, ranks", [(4, 4), (2, 8), (16, 1)])
def test_sixteen_ranks(hosts, ranks, circulate):
    topology = pretend_hosts(16, hosts)
    assert_exact(
        topology, problem(16, 4, (4, 2), (4, 4), 1), layout=Layout.ZIGZAG, mask=Mask.CAUSAL,
        schedules=partial(ring_schedules, circulate=circulate), backend="torch-cpu", scale=0.5,
    )  # fmt: skip


def test_scores_so_far_apart_that_exp_overflows():
    """Merging must not exponentiate a positive number: lse differ by thousands between ranks."""
    tensors = problem(4, 4, (2, 2), (4, 4), 2)
    tensors[1] *= torch.linspace(1, 3000, 16).view(1, -1, 1, 1)
    got = run_engine(
        pretend_hosts(4, 2), tensors, layout=Layout.CONTIGUOUS, mask=Mask.FULL,
        schedules=partial(ring_schedules, circulate=Circulate.KV), backend="reference", scale=1.0,
    )  # fmt: skip
    expected = truth(*tensors, False, 1.0)
    for rank, results in enumerate(got):
        for result, whole in zip(results, expected, strict=True):
            part = whole[:, rank * 4 : rank * 4 + 4]
            assert (result - part).abs().max() <= 1e-9 * whole.abs().max()


WAYS = {
    "ring": ring_schedules,
    "gather": partial(gather_schedules, heads=(2, 1, True)),
    "a2a": partial(a2a_schedules, heads=(2, 1)),
}


@pytest.mark.parametrize("circulate", list(Circulate))
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_a_call_are_let_go_when_it_is_over(way, circulate):
    """Catches objects of a call that refer to each other in a ring: what they hold would take
    memory until the garbage collector comes by."""
    topology, tokens = pretend_hosts(4, 2), 4
    tensors = problem(4, tokens, (4, 2), (4, 4), 3)
    rows = {"layout": Layout.ZIGZAG, "tokens": tokens}

    def one(rank, carrier):
        made = WAYS[way](topology, rank, circulate=circulate, mask=Mask.CAUSAL, **rows)
        call = Call(*made, backends()["reference"], carrier, 0.5, torch.float64)
        shard = rows_of(Layout.ZIGZAG, rank, 4, tokens)
        q, k, v, dout = (x[:, shard].clone() for x in tensors)
        out, lse = run_forward(call, q, k, v)
        run_backward(call, q, k, v, out, lse, dout)
        return [weakref.ref(x) for x in (q, k, v, out, lse, dout)]

    gc.collect()
    gc.disable()
    try:
        results, _ = run_simulated(one, 4)
        assert [[x() is None for x in found] for found in results] == [[True] * 6] * 4
    finally:
        gc.enable()
