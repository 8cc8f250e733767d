"""Megatron's output layer without logits: what is computed from its weight runs inside its call.

FSDP gathers a weight before the call of the module that has it, and shards it again afterwards; in
backward it gathers it for the call's output and reduces the gradient that autograd then adds to it.
The same layer serves the heads of multi-token prediction, whose losses are normalized here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer import multi_token_prediction as mtp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_burst.errors import BurstError
from megatron_burst.loss.passes import largest_class
from megatron_burst.loss.tensor_parallel import TensorParallel
from megatron_burst.mcore.log_probs.deferred import defer
from megatron_burst.mcore.refusals import LOSS_FLAG as WHO


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's class, whose calls return `LazyLogits` while its model computes a loss, and
    `DeferredLogits` while it computes logits for log-probabilities.

    It has Megatron's name because Megatron-FSDP looks up by name how a weight is sharded
    (core/distributed/fsdp/mcore_fsdp_adapter.py:271).
    """

    fused_head: Any = None  # of the model
    defers: bool | None = None  # logits, for log-probabilities; None: it never does

    def __call__(self, input_, weight=None, runtime_gather_output=None):
        """As Megatron's, or lazy logits, for which FSDP gathers nothing, and no bias."""
        if self.fused_head is not None and self.fused_head.active:
            return LazyLogits(self, input_, weight), None
        if self.defers:
            return defer(self, input_, weight), None
        return super().__call__(input_, weight=weight, runtime_gather_output=runtime_gather_output)


@dataclass(slots=True)
class LazyLogits:
    """Logits [s, b, vocab / tp] that would be `hidden @ weight.T * scale`.

    Supports what Megatron does with logits before the loss: scaling (MuP), and for the acceptance
    counts of multi-token prediction size and largest entry.
    """

    layer: tensor_parallel.ColumnParallelLinear
    hidden: Tensor  # [s, b, h], or a tensor-parallel rank's part of s
    weight: Tensor | None = None  # [vocab / tp, h]; None: the layer's own
    scale: float = 1.0

    def compute(self, work: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`work(hidden, weight)`, inside the layer's call."""
        return inside(self.layer, work, self.hidden, self.weight)

    def __mul__(self, factor: float) -> "LazyLogits":
        return replace(self, scale=self.scale * factor)

    def size(self, dim: int) -> int:
        if dim not in (-1, 2):
            raise no_logits("logits only have a size in their last axis", f"size({dim})")
        return self.layer.output_size_per_partition

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Largest logit and its class in this rank's part of the vocabulary, [s, b] each."""
        if dim not in (-1, 2):
            raise no_logits("logits are compared along the vocabulary only", f"max({dim})")
        tp = TensorParallel.of(self.layer.tp_group, self.layer.sequence_parallel)
        with torch.no_grad():  # classes of any vocabulary are exact in float64
            largest, classes = self.compute(
                lambda x, weight: torch.stack(largest_class(x, weight, tp, self.scale)).double()
            )
        return largest.to(self.hidden.dtype), classes.long()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.argmax:
            return args[0].max(**(kwargs or {}))[1]
        raise no_logits("logits are never stored while the loss is computed", func.__name__)


def inside(layer: tensor_parallel.ColumnParallelLinear, work: Callable[[Tensor, Tensor], Tensor],
           hidden: Tensor, weight: Tensor | None) -> Tensor:  # fmt: skip
    """`work(hidden, weight)` as the forward of an output layer, with all hooks of its call;
    `weight`: as in a call of the layer, None: its own.

    Hooks get what they get from Megatron's layer, a tensor and no bias: some unpack it.
    """
    before = vars(layer).get("forward")

    def forward(hidden: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        own = layer.weight
        if isinstance(weight, DTensor) and own is not None:
            # MTP detaches the layer's own before the call (mtp_detach_heads)
            weight = own if weight.requires_grad else own.detach()
        weight = own if weight is None else weight
        refuse_sharded(weight)
        return work(hidden, weight), None

    layer.forward = forward
    try:
        return nn.Module.__call__(layer, hidden, weight=weight)[0]
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def refuse_sharded(weight: Tensor | None) -> None:
    """Refuse a weight that FSDP2 has sharded where it is read."""
    if isinstance(weight, DTensor):
        raise BurstError(f"{WHO}: cannot run with tied embeddings under FSDP2, because FSDP2 "
                         "gathers their weight for the embedding alone; got a sharded weight; pass "
                         "--untie-embeddings-and-output-weights, or "
                         "--use-megatron-fsdp")  # fmt: skip


def no_logits(must: str, got: object) -> BurstError:
    """An error: someone needs logits while the fused loss makes none."""
    return BurstError(f"{WHO}: {must}; got {got}; leave that out, or --burst-fused-loss")


def weights_of_heads(mask: Tensor, config: Any, group: dist.ProcessGroup, packed_seq_params: Any
                     ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """For each head of multi-token prediction, the weights [b, s] of its losses, and the factor of
    what Megatron logs of them, with which both are those of one rank.

    Megatron divides by a context-parallel rank's own number of labels, up to the commit d98e8a6 of
    main (core/transformer/multi_token_prediction.py:885, 891), and then averages over ranks. One
    all-reduce for the counts of all heads.
    """
    masks = [mask]
    for _ in range(config.mtp_num_layers):
        rolled, _count = mtp.roll_tensor(
            masks[-1], shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed_seq_params
        )
        masks.append(rolled)
    local = torch.stack([mask.sum() for mask in masks])
    total = local.clone()
    dist.all_reduce(total, group=group)
    per_rank = group.size() / total.clamp(min=1)
    scales = torch.full_like(per_rank, config.mtp_loss_scaling_factor / config.mtp_num_layers)
    if not config.calculate_per_token_loss:
        scales = scales * per_rank
    elif hasattr(mtp, "process_mtp_loss"):  # 0.16 does not weight them as the main losses
        scales = scales * total[0] / total.clamp(min=1)
    log_factors = local.clamp(min=1) * per_rank
    yield from ((scales[head] * masks[head], log_factors[head]) for head in range(1, len(masks)))
