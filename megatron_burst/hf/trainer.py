"""The same batches on all ranks of a context-parallel group: for accelerate and for Trainer."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_burst.comm.alone import Ranks, group_or_default
from megatron_burst.errors import Need, require
from megatron_burst.hf.batch import shard_batch
from megatron_burst.hf.calls import mean_over

_WHO = "burst in Trainer"
_DISPATCH = "because parts of a batch that one process read would go to the ranks of a group"


def prepare_data_loader(loader: DataLoader, *, group: Ranks = None, **options: Any) -> DataLoader:
    """accelerate's function of this name, for ranks that share their samples.

    accelerate gives each process batches of its own. Here all ranks of a context-parallel group get
    the same ones, in the order that as many processes as there are groups would have, so that a
    run without context parallelism can be compared. Data sets with a length and streams both work:
    every process reads a stream itself. All processes must call it.

    Args:
        loader: with its own batch size, collator and workers; it must not shard.
        group: the context-parallel group, or that dimension of a DeviceMesh; None: all processes.
        options: other arguments of accelerate's function, such as `device`.

    Raises:
        BurstError: if `dispatch_batches` is asked for, which sends parts of one process's batches.
    """
    require("prepare_data_loader", [(
        not options.get("dispatch_batches"), f"dispatch_batches must be off, {_DISPATCH}", "True",
        "leave it out")])  # fmt: skip
    put = options.get("device") is not None
    prepared = _for_groups(
        loader, group, {"rng_types": ["generator"], "put_on_device": put} | options
    )
    # gather_for_metrics would cut what it gathers, as if each process had samples of its own
    prepared._drop_last = True
    return prepared


class ContextParallelMixin:
    """Makes a Trainer of transformers or TRL shard its batches over context-parallel ranks.

        class BurstSFTTrainer(ContextParallelMixin, SFTTrainer): ...

        trainer = BurstSFTTrainer(model, args, cp_group=mesh["cp"], train_dataset=texts, ...)

    Training and evaluation get the same batches on all ranks of a group, from data sets with a
    length and from streams, in the order of a run with as many processes as there are groups. Put
    it before the Trainer. A sub-class whose batches are not a model's inputs, such as GRPO's,
    overrides `shard_inputs`.

    Args:
        cp_group: the context-parallel group, or that dimension of a DeviceMesh; None: all ranks.
        shard_options: further arguments of `shard_batch`, such as `fused_loss`.

    Raises:
        BurstError: if the Trainer would compute with the labels of a shard.
    """

    def __init__(
        self, *args: Any, cp_group: Ranks = None, shard_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.cp_group, self.shard_options = cp_group, dict(shard_options or {})
        super().__init__(*args, **options)
        require(_WHO, _of_trainer(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, with `prepare_data_loader` of this module."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = partial(_prepared, self.accelerator, self.cp_group)
        self.accelerator.gather_for_metrics = partial(
            _gathered, self.accelerator, _firsts_of(self.cp_group),
            self.accelerator.gather_for_metrics,
        )  # fmt: skip
        self.gather_function = self.accelerator.gather_for_metrics

    def shard_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's shard of a batch; as it is, if it is sharded already."""
        if "burst" in inputs:
            return inputs
        return shard_batch(inputs, group=self.cp_group, **self.shard_options)

    def get_batch_samples(self, epoch_iterator: Iterator, *args: Any) -> tuple:
        """Trainer's, of sharded batches, so that each label is counted once."""
        return super().get_batch_samples(map(self.shard_inputs, epoch_iterator), *args)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """Trainer's, also in evaluation with the number of labels of the whole batch."""
        if num_items_in_batch is None and "burst" in inputs:  # which Trainer multiplies by again
            num_items_in_batch = inputs["num_items_in_batch"] * self.accelerator.num_processes
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model: torch.nn.Module, inputs: Mapping[str, Any], *args: Any,
                        **options: Any) -> tuple:  # fmt: skip
        """Trainer's, with the loss of the whole batch on all ranks of the group."""
        inputs = self.shard_inputs(self._prepare_inputs(inputs))
        loss, *predictions = super().prediction_step(model, inputs, *args, **options)
        return (mean_over(group_or_default(self.cp_group, _WHO), loss), *predictions)


def _for_groups(loader: DataLoader, group: Ranks, options: Mapping[str, Any]) -> DataLoader:
    """accelerate's loader for as many processes as there are groups."""
    from accelerate.data_loader import prepare_data_loader as of_accelerate

    firsts = _firsts_of(group)
    return of_accelerate(loader, **options | {
        "num_processes": len(firsts), "process_index": firsts.index(_first_of(group)),
        "dispatch_batches": False, "torch_device_mesh": None})  # fmt: skip


def _prepared(
    accelerator: Any, group: Ranks, loader: DataLoader, device_placement: bool | None = None,
    slice_fn_for_dispatch: Any = None,
) -> DataLoader:  # fmt: skip
    """`Accelerator.prepare_data_loader`."""
    if getattr(loader, "_is_accelerate_prepared", False):
        return loader
    put = accelerator.device_placement if device_placement is None else device_placement
    prepared = _for_groups(loader, group, dict(
        device=accelerator.device, put_on_device=put, split_batches=accelerator.split_batches,
        rng_types=accelerator.rng_types.copy(), even_batches=accelerator.even_batches,
        non_blocking=accelerator.non_blocking, data_seed=accelerator.dataloader_config.data_seed,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    ))  # fmt: skip
    accelerator._dataloaders.append(prepared)
    return prepared


def _gathered(accelerator: Any, firsts: list[int], original: Any, values: Any,
              use_gather_object: bool = False) -> Any:  # fmt: skip
    """`Accelerator.gather_for_metrics`: values per sample once for each group, without those of
    samples that filled up the last batch; scalars, which are of shards, of all ranks."""
    if not isinstance(values, torch.Tensor) or not dist.is_initialized():
        return original(values, use_gather_object)
    gathered = accelerator.gather(values)
    if values.dim() == 0:
        return gathered
    ranks = dist.get_world_size()
    of_groups = gathered.view(ranks, *values.shape)[firsts].flatten(0, 1)
    state = accelerator.gradient_state
    is_last = state.end_of_dataloader and state.remainder > 0
    return of_groups[: state.remainder] if is_last else of_groups


def _firsts_of(group: Ranks) -> list[int]:
    """The lowest rank of each group, this process's included."""
    first = _first_of(group)
    if not dist.is_initialized():
        return [first]
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    local = torch.tensor([first], device=device)
    lowest = local.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(lowest, local)
    return sorted(set(lowest.tolist()))


def _first_of(group: Ranks) -> int:
    """The lowest rank of this process's group."""
    ranks = group_or_default(group, "prepare_data_loader")
    return min(dist.get_process_group_ranks(ranks)) if dist.is_initialized() else 0


def _of_trainer(trainer: Any) -> Iterator[Need]:
    args = trainer.args
    shifted = "because labels of a shard are shifted already"
    yield (not args.label_smoothing_factor, f"label_smoothing_factor must be 0, {shifted}",
           args.label_smoothing_factor, "leave it out")  # fmt: skip
    yield (trainer.compute_loss_func is None, f"compute_loss_func must be None, {shifted}",
           "a function", "override compute_loss, with shift_labels and num_items_in_batch of its "
           "inputs")  # fmt: skip
    yield (trainer.compute_metrics is None, "compute_metrics must be None, because predictions are "
           "those of a shard", "a function", "evaluate the loss, or compute metrics from "
           "hidden states after unshard")  # fmt: skip
    yield (args.neftune_noise_alpha is None, "neftune_noise_alpha must be None, because its noise "
           "would be that of a shard's length", args.neftune_noise_alpha,
           "leave it out")  # fmt: skip
    yield (not trainer.accelerator.dispatch_batches, f"dispatch_batches must be off, {_DISPATCH}",
           "True", "leave it out of accelerator_config")  # fmt: skip
    yield (args.average_tokens_across_devices or args.world_size == 1,
           "average_tokens_across_devices must be on, because ranks have unequal numbers of labels",
           "False", "leave it on")  # fmt: skip
