"""A pass that tensor-parallel ranks make together, of which one may fail."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.errors import DisagreementError
from megatron_burst.loss.statistics import WHO


class Attempt:
    """What a rank computes between the collectives of a pass. If that fails, the rank makes the
    other collectives nevertheless, with NaN, as other ranks wait for them; then the exception
    leaves the context. On CPUs the other ranks raise a DisagreementError then; on GPUs, which
    nothing waits for, they get NaN.

    Args:
        group: the ranks; None: this one alone.
        device: computes.
        failure: of this rank, before the pass; then it makes its collectives only.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device,
                 failure: Exception | None = None) -> None:  # fmt: skip
        self._group, self._device, self._failure = group, device, failure

    def __call__[T](self, work: Callable[..., T], *args: object, **options: object) -> T | None:
        """What `work` returns; None after a failure."""
        if self._failure is None:
            try:
                return work(*args, **options)
            except Exception as error:
                self._failure = error
        return None

    def or_nan(self, result: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What was made for a collective; NaN, or 0 as an integer, after a failure."""
        if self._failure is None and result is not None:
            return result
        nothing = torch.nan if dtype.is_floating_point else 0
        return torch.full(tuple(shape), nothing, dtype=dtype, device=self._device)

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # of a collective
            return
        on_cpu = self._group is not None and self._device.type == "cpu"
        try:
            failed = self._failed() if on_cpu else []
            if self._failure is not None:
                raise self._failure
        finally:
            self._failure = None  # its frames hold this, and tensors of the pass
        if failed:
            raise failed_elsewhere(failed)

    def _failed(self) -> list[int]:
        """The ranks that failed."""
        flags = torch.zeros(self._group.size(), device=self._device)
        flags[self._group.rank()] = self._failure is not None
        dist.all_reduce(flags, group=self._group)
        return flags.nonzero().flatten().tolist()


def failed_elsewhere(ranks: list[int]) -> DisagreementError:
    """The error of a rank when others failed."""
    return DisagreementError(f"{WHO}: a pass must succeed on every rank of a tensor-parallel "
                             "group, because each computes its part of every token's logits; got "
                             f"an exception on tp ranks {ranks}; look at the output of these ranks "
                             "first, and to go on after such an error, catch it on all ranks and "
                             "repeat the step on all of them")  # fmt: skip
