"""The largest score of each head in one call of attention, over all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.group import log_of
from megatron_burst.engine.passes import Passes
from megatron_burst.kernels.partial import accumulate_dtype


@dataclass(slots=True)
class LargestLogits:
    """What one call finds.

    Attributes:
        scores: [h], max(float32, q's dtype); kernels raise it while the call runs.
        group: whose ranks share it.
    """

    scores: Tensor
    group: dist.ProcessGroup

    @classmethod
    def of_call(cls, q: Tensor, passes: Passes, group: dist.ProcessGroup) -> "LargestLogits":
        """Of queries [b, n, h, d]. Recomputation that reuses a call's results has its scores too,
        since it runs no kernel."""

        def lowest() -> LargestLogits:
            scores = q.new_full(q.shape[2:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
            return cls(scores, group)

        if passes.keep is None:
            return lowest()
        from megatron_burst.recompute.keep import once  # which most runs never load

        return once(lowest)

    def share(self) -> None:
        """Make the scores those of all ranks; collective."""
        if self.group.size() > 1:
            try:
                dist.all_reduce(self.scores, dist.ReduceOp.MAX, self.group)
            except RuntimeError as error:
                if log := log_of(self.group):
                    raise log.lost_hop(error) from error
                raise
