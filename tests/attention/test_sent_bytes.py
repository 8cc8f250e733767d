"""Bytes on the wire, counted by wrapping torch.distributed, match the programs' (whose formulas are
in tests/schedule/test_programs.py)."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.call import attention_shape
from megatron_burst.config import BurstConfig, Force
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.rules import a2a_bytes
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.spec import Circulate, Direction, Kernel, Spec
from megatron_burst.schedule.topology import Link, pretend_nodes
from tests.ranks import run_ranks
from tests.sampling import whole

PASSES = [
    (nodes, circulate, grad_wire)
    for nodes in (1, 2, 4)
    for circulate in Circulate
    for grad_wire in ("accumulate", "input")
]


KERNEL = Kernel(rectangular_causal=False, takes_delta=False, wide_grads=True)  # the CPU's


def shape_of(q, k, v, grad_dtype):
    shape = attention_shape([x.shape for x in (q, k, v)], q.dtype)
    return replace(shape, grad_bytes=grad_dtype.itemsize)


def planned_of(mode, topology, rank, shape, circulate=Circulate.KV, **options):
    """Bytes by link that a rank's programs send in forward and backward."""
    forward = Spec(
        topology, shape, kernel=KERNEL, intra=mode, circulate=Circulate.KV, cp_rank=rank, **options
    )
    backward = replace(forward, direction=Direction.BACKWARD, circulate=circulate)
    return [Counter(EMITTERS[mode](spec).sent_bytes()) for spec in (forward, backward)]


def count_sends(topology, rank):
    """Wrap every send of torch.distributed; count bytes by the link to the receiver."""
    sent = Counter()
    post = dist.batch_isend_irecv

    def counted(ops):
        for op in ops:
            if op.op is dist.isend:
                sent[topology.link(rank, op.peer)] += op.tensor.numel() * op.tensor.itemsize
        return post(ops)

    def forbidden(*args, **kwargs):
        raise AssertionError("burst attention sends by batch_isend_irecv only")

    dist.batch_isend_irecv = counted
    for name in ("all_reduce", "all_gather", "broadcast", "all_to_all", "send", "barrier"):
        setattr(dist, name, forbidden)
    return sent


@contextmanager
def counted_stamps():
    """Wrap how stamps are sent; the bytes that each rank receives from each per pass."""
    stamps, send = [], vars(dist.ProcessGroup)["alltoall_base"]

    def counted(group, stamps_of_all, mine, *options):
        stamps.append(mine.nbytes / group.size())
        return send.__get__(group)(stamps_of_all, mine, *options)

    with patch.object(dist.ProcessGroup, "alltoall_base", counted):
        yield stamps


def counted_and_planned(rank, world):
    restore = dict(vars(dist))
    found = []
    for nodes, circulate, grad_wire in PASSES:
        topology = pretend_nodes(world, nodes)
        config = BurstConfig(
            nodes=nodes, intra="ring", force=Force(circulate=circulate.value, grad_wire=grad_wire)
        )
        q, k, v = (torch.randn(2, 6, h, d).bfloat16() for h, d in ((4, 8), (2, 8), (2, 5)))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        burst_attention(q, k, v, config=config).sum().backward()
        sent = count_sends(topology, rank)
        with counted_stamps() as stamps:
            burst_attention(q, k, v, config=config).sum().backward()
        vars(dist).update(restore)
        grad_dtype = torch.bfloat16 if grad_wire == "input" else torch.float32
        shape = shape_of(q, k, v, grad_dtype)
        planned = planned_of("ring", topology, rank, shape, circulate, grad_wire=grad_wire)
        planned = sum(planned, Counter())
        found.append((dict(+sent), dict(+planned), stamps))
    return found


@pytest.mark.parametrize("world", [4])
def test_bytes_on_each_link_are_exactly_the_plans_and_three_stamps(world):
    for found in run_ranks(counted_and_planned, world, world):
        assert len(found) == len(PASSES)
        for sent, planned, stamps in found:
            assert sent == planned and sum(sent.values()) > 0
            assert stamps == [8] * 3  # where forward and backward begin, and where backward ends


MODES_BETWEEN = [(intra, c) for intra in ("gather", "ring") for c in Circulate]


def sent_between(rank, world):
    """Bytes that a backward on nodes of one rank sends, a token and head of MHA in bf16, d 128."""
    restore, tokens, heads, found = dict(vars(dist)), 2, 2, []
    topology = pretend_nodes(world, world)
    for intra, circulate in MODES_BETWEEN:
        config = BurstConfig(
            nodes=world,
            inter="ring",
            intra=intra,
            force=Force(circulate=circulate.value, resend="always"),
        )
        q, k, v = (torch.randn(1, tokens, heads, 128).bfloat16() for _ in range(3))
        out = burst_attention(*(x.requires_grad_() for x in (q, k, v)), config=config)
        sent = count_sends(topology, rank)
        out.sum().backward()
        vars(dist).update(restore)
        found.append(sent[Link.INTER] / (tokens * heads))
    return found


@pytest.mark.parametrize("nodes", [2, 3, 4, *whole(8)])
def test_gradients_between_nodes_are_sent_in_the_models_dtype_whatever_their_number(nodes):
    """K, V, dK and dV are 1024 bytes for each other node, as in a ring whose sums are rounded on
    the way; Q, dO and dQ 768, with lse and delta 776."""
    each = {Circulate.KV: 1024, Circulate.Q: 776}
    expected = [(nodes - 1) * each[circulate] for _, circulate in MODES_BETWEEN]
    for found in run_ranks(sent_between, nodes, nodes):
        assert found == expected


GATHERS = [
    (nodes, heads, wire, circulate, resend)
    for nodes in (1, 2, 4)
    for heads in (1, 2)
    for wire in ("accumulate", "input")
    for circulate in (Circulate if nodes > 1 else (Circulate.KV,))
    for resend in ("always", "never")
    if nodes == 1 or (resend, circulate) != ("never", Circulate.Q)  # K and V cannot stay
]


def gathered_and_planned(rank, world):
    restore = dict(vars(dist))
    found = []
    for nodes, heads, grad_wire, circulate, resend in GATHERS:
        topology = pretend_nodes(world, nodes)
        config = BurstConfig(
            nodes=nodes, intra="gather",
            force=Force(
                heads_per_round=heads, grad_wire=grad_wire, circulate=circulate.value, resend=resend
            ),
        )  # fmt: skip
        q, k, v = (torch.randn(2, 6, h, d).bfloat16() for h, d in ((4, 8), (2, 8), (2, 5)))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        sent = count_sends(topology, rank)
        burst_attention(q, k, v, config=config).sum().backward()
        vars(dist).update(restore)
        grad_dtype = torch.bfloat16 if grad_wire == "input" else torch.float32
        shape = shape_of(q, k, v, grad_dtype)
        stay = resend == "never" and circulate is Circulate.KV
        planned = planned_of(
            "gather", topology, rank, shape, circulate, heads_per_round=heads, saves_remote=stay
        )
        planned = sum(planned, Counter())
        found.append((dict(+sent), dict(+planned)))
    return found


def test_bytes_of_gathering_are_exactly_the_plans():
    """Inside nodes and between them; between nodes as many as the nested ring's."""
    for found in run_ranks(gathered_and_planned, 4, 4):
        assert len(found) == len(GATHERS)
        for sent, planned in found:
            assert sent == planned and sum(sent.values()) > 0


EXCHANGES = [(nodes, keep) for nodes in (1, 2, 4) for keep in ("plain", "none", "all")]


def exchanged_and_planned(rank, world):
    """By case: bytes sent and planned in each pass, and what auto expects between nodes.

    Rows are multiples of 16 bytes, so nothing is padded.
    """
    restore = dict(vars(dist))
    found = []
    patch_checkpoints()
    for nodes, keep in EXCHANGES:
        topology = pretend_nodes(world, nodes)
        config = BurstConfig(
            nodes=nodes, intra="a2a", force=Force(heads_per_round=1),
            keep="all" if keep == "all" else "none",
        )  # fmt: skip
        q, k, v = (torch.randn(2, 6, h, d) for h, d in ((16, 8), (4, 8), (4, 4)))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        attend = partial(burst_attention, config=config)
        if keep != "plain":
            attend = partial(checkpoint, attend, use_reentrant=True)
        sent = count_sends(topology, rank)
        out = attend(q, k, v)
        forward = dict(+sent)
        sent.clear()
        out.sum().backward()
        vars(dist).update(restore)
        shape = shape_of(q, k, v, torch.float32)
        flat = topology.flat()
        there, back = planned_of("a2a", flat, rank, shape, Circulate.KV, saves_remote=keep != "all")
        if keep == "none":  # backward recomputes it
            back += there
        planned = [dict(+there), dict(+back)]
        over_all = a2a_bytes(shape, topology, keep == "all")
        found.append(([forward, dict(+sent)], planned, over_all))
    return found


def test_bytes_of_exchanging_are_exactly_the_plans():
    """Backward resends q, k and v only where kept results replace the forward."""
    for found in run_ranks(exchanged_and_planned, 4, 4):
        assert len(found) == len(EXCHANGES)
        for (*_, keep), (sent, planned, over_all) in zip(EXCHANGES, found, strict=True):
            assert sent == planned and all(sent)
            if keep != "none":
                assert sum(of_links.get(Link.INTER, 0) for of_links in sent) == over_all
