"""`nan_guard`: the first tile with a NaN is named, on every rank that meets it; off by default."""

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch

from megatron_burst.attention import burst_attention
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.engine import Passes, Way, assert_exact, problem, rows_in, truth
from tests.attention.simulated import run_simulated
from tests.faults.acts import told_in
from tests.options import burst_config
from tests.ranks import run_ranks

ODD = 1
WAYS = {
    "ring": {"intra": "ring"}, "gather": {"intra": "gather"}, "nested": {"nodes": 2},
    "a2a": {"intra": "a2a"}, "a2a in nodes": {"intra": "a2a", "nodes": 2},
    "invariant": {"invariant": True},
}  # fmt: skip


def of_nan(rank):
    """By way, what is said if a rank's keys have a NaN, and whether a call without NaN computes the
    same with and without the guard, before and after."""
    q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    found = {}
    for way, given in WAYS.items():
        options = burst_config(nan_guard=True, timeout_s=60, **given)

        def step(k=k, options=options):
            out = burst_attention(q, k, v, config=options, layer=3)
            return [out, *torch.autograd.grad(out.sum(), (q, v))]

        plain = burst_attention(q, k, v, config=replace(options, nan_guard=False))
        before = torch.equal(step()[0], plain)
        bad = k.detach().clone()
        bad[0, 5, 1, 2] = torch.nan
        said = told_in(partial(step, bad if rank == ODD else k))
        found[way] = said, before and torch.equal(step()[0], plain)
    return found


def test_the_first_tile_with_a_nan_is_named():
    """Causal: some ranks do not see the key, and are told."""
    tile = (r"got NaN in out of '.*'.*, as (k|out) of '.*?'.* had before, after "
            r"(Attend|FromRanks) of .*, step \d+ of \d+, forward; look")  # fmt: skip
    every = run_ranks(of_nan, 4)
    for way, (rank, found) in product(WAYS, enumerate(every)):
        said, same = found[way]
        assert same and "in layer 3, forward" in said and re.search(tile, said), said
        if "a2a" not in way and way != "invariant":  # there other ranks compute with the key
            assert rank == ODD or "must succeed" not in said or "on cp rank 1" in said
            assert rank != ODD or way != "ring" or "as k of 'kv' rows" in said
    for way in WAYS:
        assert any(re.search("as k of .* after Attend", found[way][0]) for found in every)


CHUNKS, ANYWHERE = (0, 8, 8, 16), (0, 3, 3, 7, 13)  # where documents begin
MASKED = {
    "causal": {}, "full": {"mask": Mask.FULL}, "window": {"mask": Mask(5, 0)},
    "contiguous": {"layout": Layout.CONTIGUOUS}, "sinks": {"sinks": True},
    "documents": {"mask": Mask(right=0, documents=True), "edges": ANYWHERE},
    "chunks of documents": {"mask": Mask(right=0, documents=True), "edges": CHUNKS,
                            "layout": Layout.DOCUMENTS},
    "slices": {"mask": Mask(documents=True), "slices": ((0, 5, 0, 5, 0), (5, 12, 0, 12, 1))},
}  # fmt: skip


@contextmanager
def fresh_memory_of_nan():
    """Every new tensor holds NaN, as the simulated ranks' buffers do."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mode", EMITTERS)
def test_only_what_an_operation_has_written_is_checked(mode, nodes):
    """In both passes, with memory that holds NaN until it is written."""
    topology, tensors = pretend_nodes(4, nodes), problem(4, 4, (4, 2), (4, 6), 3, batch=1)
    for name, given in MASKED.items():
        way = Way(mode, guarded=True, left=name != "full", **given)
        with fresh_memory_of_nan():
            assert_exact(topology, tensors, way)
            said = with_nan(topology, tensors, way)
        assert all(said), (name, said)


def with_nan(topology, tensors, way):
    """By rank, whether its forward is refused, or its results have no NaN: a key has one, which
    ranks see, or do not."""
    tensors = [x.clone() for x in tensors]
    tensors[1][0, 2, 1, 2] = torch.nan
    whole, *_ = truth(
        *tensors, way.mask, way.scale, way.edges, (), way.sink(tensors[0]), way.slices
    )

    def one(rank, carrier):
        shard = [x[:, rows_in(x, way, rank, 4)] for x in (*tensors, whole)]
        try:
            Passes(way, topology, shard[:4], carrier).forward(*shard[:3])
        except BurstError as error:
            return bool(re.search("got NaN in (out|lse) of", str(error)))
        return not shard[4].isnan().any()

    return run_simulated(one, 4)[0]


def alone(**options):
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    return burst_attention(q, k, v, config=burst_config(backend="reference", **options)), q


@pytest.mark.parametrize(
    "name, op, where", [("forward", "Attend", "out"), ("backward", "AttendBackward", "dq")]
)
def test_a_kernel_that_makes_nan_is_named_in_both_passes(name, op, where):
    kernel = type(backends()["reference"])
    right = getattr(kernel, name)

    def wrong(*args, **options):
        found = right(*args, **options)
        found[0].fill_(torch.nan)
        return found

    out, q = alone(nan_guard=True)
    with patch.object(kernel, name, wrong):
        again = partial(torch.autograd.grad, out.sum(), q)
        said = told_in(again if name == "backward" else partial(alone, nan_guard=True))
    assert f"got NaN in {where} of " in said and f"after {op} of" in said
    assert "although the inputs had none" in said


def test_without_the_guard_nan_is_the_result():
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in range(3))
    k[0, 3] = torch.nan
    assert burst_attention(q, k, v)[0, 3:].isnan().all()
