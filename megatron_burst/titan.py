"""Burst attention as torchtitan's context parallelism: importing this module puts it in place.

torchrun ... -m megatron_burst.titan --parallelism.spmd_backend partial_dtensor ...

runs torchtitan's own training with it. It replaces the two functions that models and trainers
import by name; with other backends torchtitan does not replace attention, which is refused.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.context_parallel import api
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

from megatron_burst import operators  # noqa: F401  (registers what is saved)
from megatron_burst.attention import burst_attention
from megatron_burst.errors import Need, require
from megatron_burst.masks_of_models import parts_of
from megatron_burst.shards import LayoutName, shard

_WHO = "burst in torchtitan"
_LAYOUTS: dict[str | None, LayoutName] = {"headtail": "zigzag", None: "contiguous"}
_MASKS = {"get_causal_mask_mod", "get_document_mask_mod", "and_masks",
          "get_efficient_causal_mask_mod_for_packed_document"}  # fmt: skip
_IN_PLACE: WeakSet[dist.ProcessGroup] = WeakSet()  # per process: groups of replaced attention


@dataclass(frozen=True, slots=True, eq=False)
class ShardedMask:
    """What attention gets instead of a mask."""

    layout: LayoutName
    cu_seqlens: tuple[Tensor, ...]  # of each whole sequence of the batch, on the CPU


def apply_cp_to_forward(attention_modules: Sequence[torch.nn.Module], cp_mesh: Any) -> None:
    """torchtitan's: replace the forward of inner attention, [b, s / ranks, heads, d]; refuses other
    classes than FlexAttention and ScaledDotProductAttention. Errors count layers from 1."""
    for layer, module in enumerate(attention_modules, 1):
        require(_WHO, [(
            type(module) in (FlexAttention, ScaledDotProductAttention),
            "inner attention must be FlexAttention or ScaledDotProductAttention, because burst "
            "does not know what other modules compute",
            type(module).__name__, "set attn_backend flex")])  # fmt: skip
        module.forward = partial(_attend, cp_mesh.get_group(), layer)
    _IN_PLACE.add(cp_mesh.get_group())


def _attend(group: dist.ProcessGroup, layer: int, q: Tensor, k: Tensor, v: Tensor, *,
            attention_masks: ShardedMask | None = None, scale: float | None = None,
            enable_gqa: bool = False, is_causal: bool = True, **more: Any) -> Tensor:  # fmt: skip
    extras = [name for name, x in more.items() if x is not None]
    require(_WHO, [
        (not extras, "a model must ask attention for nothing but a mask and a scale, because burst "
         "supports nothing else here", ", ".join(extras), "use another model"),
        (isinstance(attention_masks, ShardedMask),
         "attention must get the whole sample's layout, because a shard alone does not show where "
         "it lies", type(attention_masks).__name__, "shard with prepare_context_parallel_input"),
    ])  # fmt: skip
    attend = partial(burst_attention, group=group, softmax_scale=scale,
                     layout=attention_masks.layout, causal=is_causal, layer=layer)  # fmt: skip
    if not attention_masks.cu_seqlens:
        return attend(q, k, v)
    rows = zip(*(x.split(1) for x in (q, k, v)), attention_masks.cu_seqlens, strict=True)
    return torch.cat([attend(*sample, cu_seqlens=ends) for *sample, ends in rows])


def prepare_context_parallel_input(
    inputs: Tensor, labels: Tensor, extra_kwargs: dict[str, Any], cp_mesh: Any,
    device: torch.device, load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """torchtitan's: this rank's rows of a batch, [b, s]; positions say where documents begin.
    Refuses other load balancers and masks, and attention that was not replaced."""
    group, masks = cp_mesh.get_group(), extra_kwargs.get("attention_masks")
    require(_WHO, _of_input(group, masks, load_balancer_type))
    layout, positions = _LAYOUTS[load_balancer_type], extra_kwargs["positions"]
    ends: tuple[Tensor, ...] = ()
    if masks is not None:
        tokens = positions.shape[1]
        ends = tuple(torch.tensor([*(row == 0).nonzero().flatten().tolist(), tokens])
                     for row in positions.cpu())  # fmt: skip
    take = partial(shard, group=group, layout=layout)
    own = {"positions": take(positions), "attention_masks": ShardedMask(layout, ends)}
    return take(inputs), take(labels), extra_kwargs | own


def _of_input(group: dist.ProcessGroup, masks: Any, balancer: str | None) -> Iterator[Need]:
    yield (group in _IN_PLACE, "parallelism.spmd_backend must be partial_dtensor, because with "
           "other backends torchtitan shards attention itself", "no replaced attention",
           "pass --parallelism.spmd_backend partial_dtensor")  # fmt: skip
    yield (balancer in _LAYOUTS, "context_parallel_load_balancer must be headtail or None, because "
           "burst has no layout for other balancers", balancer, "pass headtail")  # fmt: skip
    yield (masks is None or isinstance(masks, BlockMask),
           "all layers must share one BlockMask, because burst supports only a mask of documents "
           "here", type(masks).__name__, "use another model")  # fmt: skip
    strange = sorted(parts_of(masks.mask_mod) - _MASKS) if masks is not None else []
    yield (not strange, "a mask must be causal or of documents, because burst supports no other "
           "mask here", ", ".join(strange), "use another model")  # fmt: skip


def _saved_operators(original: Callable[[], set]) -> set:
    """What selective checkpoints save: attention in compiled layers too."""
    return {*original(), torch.ops.megatron_burst.attention.default}


def put_in_place() -> None:
    """Replace torchtitan's functions wherever they were imported by name; again changes nothing."""
    original = activation_checkpoint._get_default_save_ops
    if getattr(original, "func", None) is not _saved_operators:
        _replace(original, partial(_saved_operators, original), "_get_default_save_ops")
    for function in (apply_cp_to_forward, prepare_context_parallel_input):
        _replace(getattr(api, function.__name__), function, function.__name__)


def _replace(original: object, replacement: object, name: str) -> None:
    """Replace a function of this name in all modules that have it."""
    for module in [*sys.modules.values()]:
        if module is not None and vars(module).get(name) is original:
            setattr(module, name, replacement)


put_in_place()

if __name__ == "__main__":
    from torchtitan.train import main

    main()
