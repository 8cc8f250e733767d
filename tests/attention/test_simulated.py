"""The engine with programs of any mode and size, on simulated ranks, in float64: results, and the
largest score of each head.

Guards against wrong tiles, merges or sums that miss or repeat a part, buffers used before they
arrived or after they were released, and byte counts that differ from the program's.
"""

import gc
import weakref
from dataclasses import replace
from math import gcd, lcm

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import Circulate
from megatron_burst.schedule.topology import pretend_nodes, topology_of
from tests.attention.engine import Passes, Way, assert_exact, problem, run_engine, truth
from tests.attention.simulated import run_simulated
from tests.oracle import rows_of
from tests.sampling import examples, whole
from tests.schedule.cases import LAYOUTS, MASKS

pytestmark = pytest.mark.numeric
DIMS = st.sampled_from([(4, 4), (6, 3), (2, 5)])


def caps(backend):
    """Soft caps that a kernel takes."""
    return st.sampled_from([0.0, 0.6] if backend == "reference" else [0.0])


@st.composite
def cases(draw):
    layout = draw(st.sampled_from(LAYOUTS))
    nodes, ranks = draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 3)]))
    tokens = draw(st.integers(1, 5)) * (2 if layout is Layout.ZIGZAG else 1)
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    backend = draw(st.sampled_from(["reference", "torch-cpu"]))
    way = Way(
        "ring",
        draw(st.sampled_from(list(Circulate))),
        layout=layout,
        mask=draw(st.sampled_from(MASKS)),
        backend=backend,
        scale=draw(st.sampled_from([0.5, 1.3])),
        sinks=draw(st.booleans()),
        softcap=draw(caps(backend)),
    )
    seed = draw(st.integers(0, 9))
    tensors = problem(nodes * ranks, tokens, heads, draw(DIMS), seed)
    return pretend_nodes(nodes * ranks, nodes), tensors, way, seed


@examples(10, 100)
@given(cases())
def test_any_case_is_exact(case):
    assert_exact(*case)


EXCHANGING_NODES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3), (4, 2)]
GATHERING_NODES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3), (3, 2), (4, 2), (2, 4)]


@st.composite
def scattered(draw, nodes, ranks):
    """A topology of `nodes` nodes; their ranks in order, or anywhere in the group."""
    names = [node for node in range(nodes) for _ in range(ranks)]
    return topology_of(draw(st.one_of(st.just(names), st.permutations(names))))


@st.composite
def pulls(draw, nodes):
    """How slots are used. On several nodes they are sent, as their sizes may differ: barriers here
    span all ranks."""
    return draw(st.sampled_from([False, True, "one slot"])) if nodes == 1 else False


@st.composite
def gather_cases(draw):
    nodes, ranks = draw(st.sampled_from(GATHERING_NODES))
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1), (6, 3), (5, 5)]))
    backend, rectangular = draw(
        st.sampled_from([("reference", True), ("reference", False), ("torch-cpu", False)])
    )
    seed = draw(st.integers(0, 9))
    tensors = problem(nodes * ranks, 2 * draw(st.integers(1, 3)), heads, draw(DIMS), seed)
    circulate, left = draw(
        st.sampled_from([(Circulate.KV, False), (Circulate.KV, True), (Circulate.Q, False)])
    )
    way = Way(
        "gather", circulate, draw(st.integers(1, heads[1])), rectangular, left,
        draw(st.sampled_from([Layout.ZIGZAG, Layout.CONTIGUOUS])),
        draw(st.sampled_from(MASKS)), backend, pulls=draw(pulls(nodes)), sinks=draw(st.booleans()),
        softcap=draw(caps(backend)),
    )  # fmt: skip
    return draw(scattered(nodes, ranks)), tensors, way, seed


@examples(10, 150)
@given(gather_cases())
def test_any_gathering_case_is_exact(case):
    """Guards against keys read before they arrive, and shares sent to the wrong owner or summed too
    early."""
    assert_exact(*case)


@st.composite
def a2a_cases(draw):
    nodes, ranks = draw(st.sampled_from(EXCHANGING_NODES))
    size = nodes * ranks
    heads_kv, group = draw(st.integers(1, 2 * size + 1)), draw(st.sampled_from([1, 2]))
    heads = (lcm(size, heads_kv) * group, heads_kv)
    per_rank = heads_kv // gcd(size, heads_kv)
    seed, backend = draw(st.integers(0, 9)), draw(st.sampled_from(["reference", "torch-cpu"]))
    way = Way(
        "a2a", draw(st.sampled_from(list(Circulate))), draw(st.integers(1, per_rank)),
        left=draw(st.booleans()), layout=draw(st.sampled_from([Layout.ZIGZAG, Layout.CONTIGUOUS])),
        mask=draw(st.sampled_from(MASKS)), backend=backend, pulls=draw(pulls(nodes)),
        sinks=draw(st.booleans()), softcap=draw(caps(backend)),
    )  # fmt: skip
    tensors = problem(nodes * ranks, 2 * draw(st.integers(1, 3)), heads, draw(DIMS), seed)
    return draw(scattered(nodes, ranks)), tensors, way, seed


@examples(10, 150)
@given(a2a_cases())
def test_any_all_to_all_is_exact(case):
    """Guards against heads or rows sent to the wrong rank, and results returned too early or too
    late."""
    assert_exact(*case)


@pytest.mark.parametrize("heads_kv", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, *whole(5, 7)])
def test_few_kv_heads_are_exact_in_an_all_to_all(ranks, heads_kv):
    """Each goes to all ranks with query heads for it; their gradients are summed as wide as those
    of shards are: bf16 is as exact as on one rank."""
    tensors = problem(ranks, 4, (lcm(ranks, heads_kv), heads_kv), (4, 4), 4)
    way = Way("a2a", backend="torch-cpu", left=ranks % 2 == 0, pulls=ranks % 3 == 0)
    for dtype in (torch.float64, torch.bfloat16):
        assert_exact(pretend_nodes(ranks, 1), tensors, way, dtype=dtype)


@pytest.mark.parametrize("circulate", list(Circulate))
@pytest.mark.parametrize("nodes, ranks", [(4, 4), *whole((2, 8), (16, 1))])
def test_sixteen_ranks(nodes, ranks, circulate):
    tensors = problem(16, 4, (4, 2), (4, 4), 1)
    assert_exact(pretend_nodes(16, nodes), tensors, Way("ring", circulate, backend="torch-cpu"))


def test_scores_so_far_apart_that_exp_overflows():
    """Merging must not exponentiate a positive number: lse differs by thousands between ranks."""
    tensors = problem(4, 4, (2, 2), (4, 4), 2)
    tensors[1] *= torch.linspace(1, 3000, 16).view(1, -1, 1, 1)
    way = Way("ring", layout=Layout.CONTIGUOUS, mask=Mask.FULL, scale=1.0)
    expected = truth(*tensors, Mask.FULL, 1.0)
    for rank, results in enumerate(run_engine(pretend_nodes(4, 2), tensors, way)):
        for result, true in zip(results, expected, strict=True):
            part = true[:, rank * 4 : rank * 4 + 4]
            assert (result - part).abs().max() <= 1e-9 * true.abs().max()


@pytest.mark.parametrize("circulate", list(Circulate))
@pytest.mark.parametrize("mode", ["ring", "gather", "a2a"])
def test_tensors_of_a_call_are_let_go_when_it_is_over(mode, circulate):
    """Guards against reference cycles in a call's objects: they would hold memory until the garbage
    collector runs."""
    topology, tokens = pretend_nodes(4, 2), 4
    tensors = problem(4, tokens, (4, 2), (4, 4), 3)
    way = replace(Way(mode), circulate=circulate)

    def one(rank, carrier):
        shard = [x[:, rows_of(Layout.ZIGZAG, rank, 4, tokens)].clone() for x in tensors]
        results = Passes(way, topology, shard, carrier).both(*shard)
        return [weakref.ref(x) for x in (*shard, *results)]

    gc.collect()
    gc.disable()
    try:
        results, _ = run_simulated(one, 4)
        assert [[x() is None for x in found] for found in results] == [[True] * 8] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("pulls", [False, True], ids=["sent", "pulled"])
@pytest.mark.parametrize("mode", ["ring", "gather", "a2a"])
def test_memory_that_a_longer_call_replaces_is_let_go(mode, pulls):
    """Guards against a program that keeps views of the group's buffers, which persist between
    calls, longer than the group does."""
    if pulls and mode == "ring":
        pytest.skip("rings have no slots")
    topology, way = pretend_nodes(4, 2), Way(mode, pulls=pulls)

    def one(rank, carrier):
        kept, before = [], []
        for tokens in (4, 8):
            tensors = problem(4, tokens, (4, 2), (4, 4), 3)
            shard = [x[:, rows_of(Layout.ZIGZAG, rank, 4, tokens)] for x in tensors]
            kept.append(Passes(way, topology, shard, carrier))
            for _ in range(2):
                kept[-1].both(*shard)
            if not before:
                before = [weakref.ref(x) for memory in carrier.kept() for x in memory]
                del shard, tensors
        return before, kept

    gc.collect()
    gc.disable()
    try:
        results, carriers = run_simulated(one, 4, pulls=pulls)
        carriers[0]._wire.letters.clear()
        for before, _ in results:
            assert before and all(x() is None for x in before)
    finally:
        gc.enable()
