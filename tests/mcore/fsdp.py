"""Megatron's models under its two kinds of FSDP and without, their losses and gradients."""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from tests.ranks import preload

preload("torch.distributed.fsdp", "megatron.core.distributed.fsdp.mcore_fsdp_adapter")

STEPS = 2  # micro-batches whose gradients are summed


def fsdp_group():
    """Ranks that parameters are sharded over."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def wrapped(model, strategy: str = "", *units: type):
    """The model under FSDP2, or under Megatron-FSDP with a strategy.

    `units`: classes of modules that are sharded on their own; without them Megatron's choice.
    """
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
    )
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    if not strategy:
        given = {"sub_modules_to_wrap": units} if units else {}
        config = DistributedDataParallelConfig()
        return TorchFullyShardedDataParallel(model.config, config, model, **given)
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, use_megatron_fsdp=True,
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
        gradient_reduce_div_fusion=dist.get_backend() == "nccl",
    )  # fmt: skip
    given = {"fsdp_unit_modules": [*units]} if units else {}
    return FullyShardedDataParallel(model.config, config, model, **given)


def losses_of(model, batch: dict) -> list[torch.Tensor]:
    """This rank's loss of each micro-batch, after its backward; gradients are not reduced yet."""
    inputs = batch["tokens"], batch["position_ids"], None
    labels, mask = batch["labels"], batch["loss_mask"]
    found = []
    for step in range(STEPS):
        is_last = step == STEPS - 1 or not hasattr(model, "no_sync")
        with nullcontext() if is_last else model.no_sync():
            losses = model(*inputs, labels=labels.roll(step, 0), loss_mask=mask.roll(step, 0))
            loss = (losses * mask.roll(step, 0)).sum() * 0.125
            loss.backward()
        found.append(loss.detach())
    return found


def gradients(model) -> dict[str, torch.Tensor]:
    """Reduced gradients of a wrapped model, on the CPU."""
    found, group = {}, fsdp_group()
    for name, parameter in model.named_parameters():
        parts, grad = [None] * group.size(), parameter.grad
        # a rank may have no part of a small one
        dist.all_gather_object(parts, None if grad is None else grad.to_local().cpu(), group)
        parts = [part for part in parts if part is not None]
        if parts:
            found[name.replace("module.", "")] = torch.cat(parts)
    return found


def gradients_without_fsdp(model, summed: bool = False) -> dict[str, torch.Tensor]:
    """Those of a bare model, reduced as FSDP does, on the CPU; `summed`: as Megatron-FSDP for a
    loss per token."""
    found, group = {}, fsdp_group()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            found[name] = parameter.grad.cpu() / (1 if summed else group.size())
    return found
