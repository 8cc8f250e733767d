"""Runs a call by the schedules that it has."""

from torch import Tensor

from megatron_burst.engine.a2a import a2a_backward, a2a_forward
from megatron_burst.engine.alone import alone_backward, alone_forward
from megatron_burst.engine.call import Call
from megatron_burst.engine.gather import gather_backward, gather_forward
from megatron_burst.engine.ring import ring_backward, ring_forward
from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.schedule import Schedule

_FORWARD = {Schedule: ring_forward, GatherSchedule: gather_forward, A2ASchedule: a2a_forward}
_BACKWARD = {Schedule: ring_backward, GatherSchedule: gather_backward, A2ASchedule: a2a_backward}


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries; shapes as in `ring_forward`, whatever the schedule."""
    run = alone_forward if call.is_alone else _FORWARD[type(call.forward)]
    return run(call, q, k, v)


def run_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank; shapes as in `ring_backward`, whatever the schedule."""
    run = alone_backward if call.is_alone else _BACKWARD[type(call.backward)]
    return run(call, q, k, v, out, lse, dout)
