"""The largest score of each head in one call of attention, over all ranks."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.group import log_of
from megatron_burst.engine.passes import Passes
from megatron_burst.errors import BurstError
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.recompute.keep import once


@dataclass(slots=True)
class LargestLogits:
    """The largest scores of one call, of which all ranks of the group get the maximum."""

    scores: Tensor  # [h], max(float32, q's dtype); kernels raise it while the call runs
    group: dist.ProcessGroup

    @classmethod
    def of_call(cls, q: Tensor, passes: Passes, group: dist.ProcessGroup) -> "LargestLogits":
        """Of queries [b, n, h, d]. Recomputation that reuses a call's results has its scores too,
        since it runs no kernel."""

        def lowest() -> LargestLogits:
            scores = q.new_full(q.shape[2:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
            return cls(scores, group)

        return lowest() if passes.keep is None else once(lowest)

    def of_pass(self, passes: Passes, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        """`passes.forward`, after which the scores are those of all ranks; collective. A rank whose
        kernels fail shares too, as other ranks wait for it, unless a transfer failed."""
        has_begun = False
        sample_mask, begin, sink = options

        def begin_and_note() -> None:
            nonlocal has_begun
            begin()
            has_begun = True

        try:
            results = passes.forward(q, k, v, sample_mask, begin_and_note, sink, self.scores)
        except Exception:
            log = log_of(self.group)
            if has_begun and log is not None and log.later_error is None:
                with suppress(Exception):  # the first error is the cause
                    self._share()
            raise
        self._share()
        return results

    def _share(self) -> None:
        if self.group.size() == 1:
            return
        try:
            dist.all_reduce(self.scores, dist.ReduceOp.MAX, self.group)
        except RuntimeError as error:
            log, text = log_of(self.group), (str(error).splitlines() or [""])[0]
            lost = BurstError("burst attention: all ranks must share the largest scores of a call, "
                              "because return_max_logit asks for those of the whole sample; got "
                              f"{text}; look at the output of the other ranks first")  # fmt: skip
            raise (log.abort(lost, "") if log else lost) from error
