"""Runs a call by the schedules that it has."""

from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.engine.gather import gather_backward, gather_forward
from megatron_burst.engine.ring import ring_backward, ring_forward
from megatron_burst.plan.gather import GatherSchedule


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries; shapes as in `ring_forward` and `gather_forward`."""
    run = gather_forward if isinstance(call.forward, GatherSchedule) else ring_forward
    return run(call, q, k, v)


def run_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank; shapes as in `ring_backward` and `gather_backward`."""
    run = gather_backward if isinstance(call.backward, GatherSchedule) else ring_backward
    return run(call, q, k, v, out, lse, dout)
