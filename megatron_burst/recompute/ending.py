"""Recomputation ends early: the last call of a checkpoint is not made again if backward reads
nothing of what it returns, which is so for the last linear layer of a transformer layer.

Whether it is so is found in the call's first recomputation, which makes it: in the graph between it
and a reentrant checkpoint's results; for other checkpoints, by torch, which ends recomputation
there.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from megatron_burst.errors import BurstError
from megatron_burst.recompute.auto.graph import makers_of, readers
from megatron_burst.recompute.keep import call_kept
from megatron_burst.recompute.keeping import WHO, Keeping, RunningFrame, Tensors, running


class Nothing:
    """The policy that keeps no results: recomputation gets memory without values instead."""

    rounds = False

    def trim(self, outs: Tensors) -> Tensors:
        """What is kept of the results."""
        self._likes = [(torch.empty_like(x, device="meta"), x.device) for x in outs]
        return ()

    def restore(self, kept: Tensors, inputs: Tensors) -> Tensors:
        """As many results, of which only the gradients mean something."""
        return tuple(torch.empty_like(like, device=device) for like, device in self._likes)


class Ending:
    """A call of a function, such as a module, that is not made again if backward reads nothing that
    it returns: tensors, and None, in any nesting. `parameters`: what it reads besides arguments."""

    def __init__(self, function: Callable, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._function, self._parameters = function, parameters
        self.unread: bool | None = None  # None: not known before its first recomputation

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The function's results, in a recomputation perhaps without values."""
        runs = running()
        run = runs[0] if len(runs) == 1 else None
        if run and (run.keeps_next if run.recomputes else self.unread):
            keeping = Keeping(policy=Nothing(), parameters=tuple(self._parameters()))
            outs = call_kept(self._function, args, options, keeping)
            return self._watch(run, outs, True) if run.recomputes else outs
        for frame in runs:
            frame.place += 1  # as for a call that is kept
        if not run or not run.recomputes or self.unread is False:
            return self._function(*args, **options)
        try:
            outs = self._function(*args, **options)
        except _StopRecomputationError:  # torch's own, which ends a recomputation
            self._note(True)
            raise
        return self._watch(run, outs)

    def _watch(self, run: RunningFrame, outs: Any, empty: bool = False) -> Any:
        """The results of a recomputation, without values if `empty`; looks for their readers once
        the checkpoint's results exist."""
        if run.frame.stops_early:  # torch would have ended it at its last call
            self._note(False, empty)
            return outs
        if nodes := makers_of(outs):
            run.at_end.append(lambda results: self._note(not any(readers(results, nodes)), empty))
        return outs

    def _note(self, unread: bool, empty: bool = False) -> None:
        if empty and not unread:
            raise BurstError(f"{WHO}: what reads a layer's last results in backward must not "
                             "change between steps, because results that nothing reads are not "
                             "recomputed; got a reader where there was none before; recompute a "
                             "function that does the same every time")  # fmt: skip
        self.unread = unread and self.unread is not False
