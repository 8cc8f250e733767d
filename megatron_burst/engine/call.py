"""What one attention call is, apart from its tensors."""

from dataclasses import dataclass

import torch

from megatron_burst.comm.hop import Carrier
from megatron_burst.kernels.backends import Backend
from megatron_burst.plan.a2a import A2ASchedule
from megatron_burst.plan.gather import GatherSchedule
from megatron_burst.plan.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about one attention call but its tensors.

    Attributes:
        forward: what this rank does in forward.
        backward: what it does in backward.
        recalling: what it does in a backward for which forward has left keys of other hosts; None
            if it never does.
        backend: computes the tiles.
        carrier: carries the data between ranks.
        scale: of the scores before the softmax.
        grad_dtype: of gradients on the wire.
        deterministic: whether gradients must be bitwise the same every time.
    """

    forward: Schedule | GatherSchedule | A2ASchedule
    backward: Schedule | GatherSchedule | A2ASchedule
    backend: Backend
    carrier: Carrier
    scale: float
    grad_dtype: torch.dtype
    deterministic: bool = False
    recalling: GatherSchedule | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the kernel is all of it: a ring of one rank, which has the whole sequence."""
        return isinstance(self.forward, Schedule) and self.forward.topology.cp_size == 1

    @property
    def num_rounds(self) -> int:
        """In which heads are gathered or exchanged; 0 of a ring."""
        return 0 if isinstance(self.forward, Schedule) else len(self.forward.rounds)
