"""The two passes of a call: what forward leaves for backward beside out, and how backward takes it.

Each class is one way: `forward(q, k, v)` returns out [b, n, h, dv], lse [b, h, n] and the tensors
that are left; `backward(left, out, dout)` returns the gradients of q, k and v.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.engine.a2a import a2a_backward_recalling, a2a_forward
from megatron_burst.engine.call import Call
from megatron_burst.engine.gather import gather_backward, gather_forward
from megatron_burst.engine.gathered import Pieces
from megatron_burst.engine.lean import lean
from megatron_burst.engine.run import run_backward, run_forward
from megatron_burst.engine.wholes import Left
from megatron_burst.plan.a2a import A2ASchedule

Tensors = tuple[Tensor, ...]
Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """Leaves q, k, v and lse.

    If `followed`, by backward, values do not hold on to what they are a slice of.
    """

    call: Call
    followed: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        out, lse = run_forward(self.call, q, k, v)
        return out, lse, (q, k, lean(v, q, k) if self.followed else v, lse)

    def backward(self, left: Sequence[Tensor], out: Tensor, dout: Tensor) -> Tensors:
        q, k, v, lse = left
        return run_backward(self.call, q, k, v, out, lse, dout)


@dataclass(frozen=True, slots=True)
class Recalling:
    """Of a call that gathers: leaves q, k, v, lse and the keys of other hosts that came.

    They need not go between hosts again.
    """

    call: Call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        came = Pieces.made_for(self.call.forward, k, v)
        out, lse = gather_forward(self.call, q, k, v, came)
        return out, lse, (q, k, lean(v, q, k), lse, *came.tensors)

    def backward(self, left: Sequence[Tensor], out: Tensor, dout: Tensor) -> Tensors:
        q, k, v, lse, *came = left
        pieces = Pieces(tuple(came), self.call.forward.topology.inter_size)
        return gather_backward(self.call, q, k, v, out, lse, dout, pieces)


@dataclass(frozen=True, slots=True)
class Exchanging:
    """Of a call that exchanges heads: leaves what was exchanged, in place of q, k, v and lse.

    As much memory; backward need not exchange it again. `shapes` are those of q, k and v.
    """

    call: Call
    shapes: Shapes

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        left = Left.of()
        out, lse = a2a_forward(self.call, q, k, v, left)
        return out, lse, left.tensors

    def backward(self, left: Sequence[Tensor], out: Tensor, dout: Tensor) -> Tensors:
        return a2a_backward_recalling(self.call, Left.of(left), self.shapes, out, dout)


def passes_of(call: Call, shapes: Shapes, followed: bool) -> Plain | Recalling | Exchanging:
    """How a call's passes run.

    Args:
        call: the call.
        shapes: of q, k and v.
        followed: whether backward follows this very forward. Where results are kept for a replay
            instead, what is left beside inputs and results would be more memory until then.
    """
    if followed and isinstance(call.forward, A2ASchedule):
        return Exchanging(call, shapes)
    return Recalling(call) if followed and call.recalling else Plain(call, followed)
