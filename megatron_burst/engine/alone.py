"""Attention of a rank that has the whole sequence: the kernel alone, in one call of it a pass."""

from torch import Tensor

from megatron_burst.engine.call import Call
from megatron_burst.kernels.backends import QuerySide
from megatron_burst.plan.mask import Mask


def alone_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) as the kernel returns them; shapes as in `ring_forward`."""
    return call.backend.forward(q, k, v, call.scale, call.forward.mask is Mask.CAUSAL)


def alone_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) as the kernel returns them; shapes as in `ring_backward`."""
    return call.backend.backward(
        QuerySide(q, dout, lse, None, out), k, v, call.scale, call.forward.mask is Mask.CAUSAL,
        deterministic=call.deterministic,
    )  # fmt: skip
