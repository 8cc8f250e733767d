"""Compares some calls of a running job with the definition of attention; loaded if
`BurstConfig.check` asks for it.

All ranks draw the same calls, by the numbers of their passes. The tolerance of a row is a multiple
of its dtype's rounding, of what is large in the row: its largest result, and the root of the summed
squares of what adds up to it, as that is how far independent roundings of the terms move the sum.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random, getrandbits
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from megatron_burst.checks.definition import Compared, Definition
from megatron_burst.comm.detector import Pass, PassKind
from megatron_burst.engine.passes import Passes
from megatron_burst.errors import BurstError
from megatron_burst.kernels.partial import row_delta


def checked(attend: Callable[..., tuple[Tensor, Tensor]], tensors: tuple, passes: Passes,
            sample: Any, layer: int,
            largest: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A call, and its backward, compared if it is drawn.

    Args:
        attend: `BurstAttentionFunction.apply`.
        tensors: q, k, v [b, n, h, d], and the sink or None.
        passes, sample, layer, largest: its other arguments.

    Raises:
        BurstError: on all ranks, also from backward, if a result is too far from the definition.
    """
    log, interval = passes.announcer.log, passes.check
    number = log.number + 1 if log else getrandbits(32)  # the same on all ranks
    if not interval or Random(number // interval).randrange(interval) != number % interval:
        return attend(*tensors, passes, sample, layer, largest)
    *inputs, sink = tensors
    inputs = [x.view_as(x) for x in inputs]  # whose gradients are of this call alone
    out, lse = attend(*inputs, sink, passes, sample, layer, largest)
    fields = {n: x.detach() for n, x in zip("qkv", inputs, strict=True)}
    fields |= {"out": out.detach(), "lse": lse}  # not `out`, whose graph holds this
    check = SpotCheck(passes, sample, (layer, number), fields)
    check.forward(sink)
    if out.requires_grad and all(x.requires_grad for x in inputs):
        out.register_hook(partial(fields.__setitem__, "dout"))
        register_multi_grad_hook(inputs, check.backward)
    return out, lse


class SpotCheck:
    """One call that is compared; `where`: its layer, and the number of its pass, which draws rows;
    `fields`: its q, k, v, out and lse, and for backward dout."""

    def __init__(
        self, passes: Passes, sample: Any, where: tuple[int, int], fields: dict[str, Tensor]
    ) -> None:
        self._passes, self._where, self._fields = passes, where, fields
        self._definition = Definition(passes, sample, where[1])

    def forward(self, sink: Tensor | None) -> None:
        """Compare out and lse of some queries. Raises as `checked`."""
        with self._together():
            self._compare("forward", *self._definition.out(self._fields, sink))

    def backward(self, grads: Any) -> None:
        """Compare dq of some queries, dk and dv of some keys, by the call's own lse and out, which
        forward has compared. Raises as `forward`."""
        fields, (dq, dk, dv) = self._fields, grads
        if "dout" not in fields or any(grad is None for grad in grads):
            return
        with self._together():
            fields["delta"] = row_delta(fields["dout"], fields["out"])
            self._compare("backward", *self._definition.grad_of_queries(fields, dq))
            self._compare("backward", *self._definition.grads_of_keys(fields, dk, dv))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context that all ranks enter, or none: who failed before is heard of now."""
        layer, number = self._where
        with torch.no_grad(), Pass(self._passes.announcer, PassKind.CHECK, number, layer) as entry:
            entry.begin()
            yield

    def _compare(self, direction: str, places: Tensor, fields: dict[str, Compared]) -> None:
        """Compare with the definition; all ranks have the same of both. Raises as `checked`."""
        for name, (got, true, squares) in fields.items():
            large = torch.maximum(true.abs(), squares.sqrt()).amax(-1)
            least = torch.finfo(self._passes.dtype).smallest_normal  # float16 rounds more below
            away, limit = (got - true).abs().amax(-1), self._tolerance(name) * (large + least)
            wrong = ~(away <= limit)  # also NaN
            if not wrong.any():
                continue
            worst = int((away - limit).nan_to_num(torch.inf).argmax())
            row, head = divmod(worst, away.shape[1])
            first = self._definition.head * (1 if name in ("dk", "dv") else away.shape[1])
            raise self._error(
                direction, f"{name} at position {int(places[row])} and head {first + head}, which "
                f"is off by {float(away[row, head]):.3g} ({float(limit[row, head]):.2g} is "
                f"allowed), on {self._owner(row, len(places))}, and {int(wrong.any(1).sum())} of "
                f"{len(places)} sampled rows are wrong")  # fmt: skip

    def _tolerance(self, name: str) -> float:
        """Of rounding: kernels round weights to q's dtype too; float32 on GPUs may be TF32, whose
        mantissa is float16's."""
        dtype, device = self._passes.dtype, self._passes.spec.kernel.device
        if dtype is torch.float64 or (dtype is torch.float32 and device == "cpu"):
            return 4096 * torch.finfo(dtype).eps
        eps = torch.finfo(torch.float16 if dtype is torch.float32 else dtype).eps
        return (8 if name.startswith("d") else 4) * eps

    def _owner(self, row: int, count: int) -> str:
        log, rank = self._passes.announcer.log, row // (count // self._definition.size)
        return f"{log.parallel_kind.rank} {rank} (rank {log.ranks[rank]})" if log else "this rank"

    def _error(self, direction: str, got: str) -> BurstError:
        layer, number = self._where
        where = f"layer {layer}, {direction}" if layer else direction
        of = f", pass {number} of the group" if self._passes.announcer.log else ""
        return BurstError(f"burst attention: with check={self._passes.check} results must match "
                          "attention's definition, because training continues with them; got "
                          f"{got}, in {where}{of}; repeat the step, and if it happens again, try "
                          "another --burst-backend, or the job without that rank's "
                          "GPU")  # fmt: skip
