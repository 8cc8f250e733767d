"""The engine on simulated ranks: problems, schedules, both passes, and the truth beside them."""

from dataclasses import replace
from functools import partial

import torch

from megatron_burst.engine.a2a import a2a_backward_recalling, a2a_forward
from megatron_burst.engine.call import Call
from megatron_burst.engine.gather import gather_backward, gather_forward
from megatron_burst.engine.gathered import Pieces
from megatron_burst.engine.run import run_backward, run_forward
from megatron_burst.engine.setup import attention_shape
from megatron_burst.engine.wholes import Left
from megatron_burst.kernels.backends import backends
from megatron_burst.plan.a2a import A2ASchedule, a2a_schedule
from megatron_burst.plan.cost import gather_bytes, link_bytes
from megatron_burst.plan.gather import GatherSchedule, gather_schedule
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.plan.schedule import Circulate, Direction
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


def ring_schedules(topology, rank, circulate, **rows):
    return (
        ring_schedule(topology, rank, direction=Direction.FORWARD, **rows),
        ring_schedule(topology, rank, direction=Direction.BACKWARD, circulate=circulate, **rows),
    )


def gather_schedules(topology, rank, heads, circulate=Circulate.KV, recalls=False, **rows):
    """`heads`: key heads, heads of a round, whether causal tiles may be rectangular."""
    options = dict(zip(("heads_kv", "heads_per_round", "rectangular_causal"), heads, strict=True))
    schedule = partial(gather_schedule, topology, rank, **options, **rows)
    return (
        schedule(direction=Direction.FORWARD),
        schedule(direction=Direction.BACKWARD, circulate=circulate, recalls=recalls),
    )


def a2a_schedules(topology, rank, heads, circulate=Circulate.KV, **rows):
    """`heads`: key heads, and how many of them a rank computes in a round."""
    options = {"heads_kv": heads[0], "heads_per_round": heads[1]}
    schedule = partial(a2a_schedule, topology, rank, **options, **rows)
    return (
        schedule(direction=Direction.FORWARD),
        schedule(direction=Direction.BACKWARD, circulate=circulate),
    )


def planned_bytes(schedules, shape):
    if isinstance(schedules[0], A2ASchedule):
        return None  # rows are padded
    if isinstance(schedules[0], GatherSchedule):
        shares = (0, shape.grad_bytes)
        planned = (gather_bytes(s, shape, n) for s, n in zip(schedules, shares, strict=True))
        return sum(sum(of_links.values()) for of_links in planned)
    return sum(sum(link_bytes(schedule, shape).values()) for schedule in schedules)


def both_passes(call, q, k, v, dout):
    """(out, dq, dk, dv); backward knows nothing but forward's inputs and results."""
    out, lse = run_forward(call, q, k, v)
    return [out, *run_backward(call, q, k, v, out, lse, dout)]


def both_passes_leaving(call, q, k, v, dout):
    """(out, dq, dk, dv); backward takes the keys of other hosts that forward has left."""
    left = Pieces.made_for(call.forward, k, v)
    out, lse = gather_forward(call, q, k, v, left)
    recalling = replace(call, recalling=call.backward)
    return [out, *gather_backward(recalling, q, k, v, out, lse, dout, left)]


def both_passes_recalling(call, q, k, v, dout):
    """(out, dq, dk, dv); backward takes what forward has exchanged, twice."""
    left = Left.of()
    out, _ = a2a_forward(call, q, k, v, left)
    shapes = [x.shape for x in (q, k, v)]
    left_before = [x.clone() for x in left.tensors]
    run_forward(call, q, -k, -v)  # a call in between must not spoil it
    a2a_backward_recalling(call, left, shapes, out, -dout)
    assert all(map(torch.equal, left.tensors, left_before))
    return [out, *a2a_backward_recalling(call, left, shapes, out, dout)]


def run_engine(
    topology,
    tensors,
    *,
    layout,
    mask,
    schedules,
    backend,
    scale,
    seed=0,
    pulls=False,
    passes=both_passes,
):
    """(out, dq, dk, dv) of each rank; `schedules` makes a rank's two."""
    size = topology.cp_size
    tokens = tensors[0].shape[1] // size

    def one(rank, carrier):
        q, k, v, dout = (x[:, rows_of(layout, rank, size, tokens)] for x in tensors)
        made = schedules(topology, rank, layout=layout, mask=mask, tokens=tokens)
        call = Call(*made, backends()[backend], carrier, scale, torch.float64)
        run_forward(call, q, -k, -v)  # neither call may see or spoil the other's keys
        carrier.sent_bytes = 0
        return passes(call, q, k, v, dout), planned_bytes(
            made, attention_shape(q, k, v, torch.float64)
        )

    results, carriers = run_simulated(one, size, seed, pulls)
    for carrier, (_, planned) in zip(carriers, results, strict=True):
        assert planned in (None, carrier.sent_bytes)
    return [tensors for tensors, _ in results]


def assert_exact(topology, tensors, *, layout, mask, scale, **options):
    size, tokens = topology.cp_size, tensors[0].shape[1] // topology.cp_size
    expected = truth(*tensors, mask is Mask.CAUSAL, scale)
    got = run_engine(topology, tensors, layout=layout, mask=mask, scale=scale, **options)
    for rank, results in enumerate(got):
        rows = rows_of(layout, rank, size, tokens)
        for result, whole in zip(results, expected, strict=True):
            assert (result - whole[:, rows]).abs().max() <= 1e-12
