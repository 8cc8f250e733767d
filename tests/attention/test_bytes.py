"""Bytes on the wire, counted by wrapping torch.distributed, against the plan's numbers."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_burst.attention import burst_attention
from megatron_burst.config import BurstConfig
from megatron_burst.engine.setup import attention_shape
from megatron_burst.plan.cost import gather_bytes, link_bytes
from megatron_burst.plan.gather import gather_schedule
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Circulate, Direction
from megatron_burst.plan.topology import pretend_hosts
from tests.ranks import run_ranks

PASSES = [
    (hosts, circulate, grad_wire)
    for hosts in (1, 2, 4)
    for circulate in Circulate
    for grad_wire in ("accumulate", "input")
]


def count_sends(topology, rank):
    """Wrap every way out of torch.distributed; count bytes by the link to the receiver."""
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


def counted_and_planned(rank, world):
    restore = dict(vars(dist))
    found = []
    for hosts, circulate, grad_wire in PASSES:
        topology = pretend_hosts(world, hosts)
        config = BurstConfig(hosts=hosts, circulate=circulate.value, grad_wire=grad_wire)
        q, k, v = (torch.randn(2, 6, h, d).bfloat16() for h, d in ((4, 8), (2, 8), (2, 5)))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        sent = count_sends(topology, rank)
        burst_attention(q, k, v, config=config).sum().backward()
        vars(dist).update(restore)
        grad_dtype = torch.bfloat16 if grad_wire == "input" else torch.float32
        shape = attention_shape(q, k, v, grad_dtype)
        options = {"layout": Layout.ZIGZAG, "mask": Mask.CAUSAL, "tokens": 6}
        planned = Counter()
        for direction in Direction:
            backward = direction is Direction.BACKWARD
            schedule = ring_schedule(
                topology, rank, direction=direction,
                circulate=circulate if backward else Circulate.KV, **options,
            )  # fmt: skip
            planned.update(link_bytes(schedule, shape))
        found.append((dict(+sent), dict(+planned)))
    return found


@pytest.mark.parametrize("world", [4])
def test_bytes_on_each_link_are_exactly_the_plans(world):
    for found in run_ranks(counted_and_planned, world, world):
        assert len(found) == len(PASSES)
        for sent, planned in found:
            assert sent == planned and sum(sent.values()) > 0


GATHERS = [
    (hosts, heads, wire, circulate)
    for hosts in (1, 2, 4)
    for heads in (1, 2)
    for wire in ("accumulate", "input")
    for circulate in (Circulate if hosts > 1 else (Circulate.KV,))
]


def gathered_and_planned(rank, world):
    restore = dict(vars(dist))
    found = []
    for hosts, heads, grad_wire, circulate in GATHERS:
        topology = pretend_hosts(world, hosts)
        config = BurstConfig(
            hosts=hosts, intra="gather", heads_per_round=heads, grad_wire=grad_wire,
            circulate=circulate.value,
        )  # fmt: skip
        q, k, v = (torch.randn(2, 6, h, d).bfloat16() for h, d in ((4, 8), (2, 8), (2, 5)))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        sent = count_sends(topology, rank)
        burst_attention(q, k, v, config=config).sum().backward()
        vars(dist).update(restore)
        grad_dtype = torch.bfloat16 if grad_wire == "input" else torch.float32
        shape = attention_shape(q, k, v, grad_dtype)
        planned = Counter()
        for direction in Direction:
            backward = direction is Direction.BACKWARD
            schedule = gather_schedule(
                topology, rank, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=6, heads_kv=2,
                heads_per_round=heads, direction=direction, rectangular_causal=False,
                circulate=circulate if backward else Circulate.KV,
            )  # fmt: skip
            planned.update(gather_bytes(schedule, shape, grad_dtype.itemsize if backward else 0))
        found.append((dict(+sent), dict(+planned)))
    return found


def test_bytes_of_gathering_are_exactly_the_plans():
    """Inside hosts and between them; the latter as many as the nested ring's."""
    for found in run_ranks(gathered_and_planned, 4, 4):
        assert len(found) == len(GATHERS)
        for sent, planned in found:
            assert sent == planned and sum(sent.values()) > 0
