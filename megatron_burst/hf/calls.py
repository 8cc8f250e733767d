"""Calls of a model with a sharded batch: what must hold before, and what must have happened after.

Attention checks its own calls. What never reaches it, a layer that mixes tokens in another way, a
loss of a shard's labels or a position counted from the shard, shows only here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from megatron_burst.errors import Need, require
from megatron_burst.hf.batch import ShardedBatch
from megatron_burst.hf.fused import FusedLogits, fused_head
from megatron_burst.hf.refusals import WHO, of_class, of_inputs, of_model
from megatron_burst.operators import ON_CALL
from megatron_burst.recompute.checkpoints import patch_checkpoints
from megatron_burst.recompute.inputs import all_on_host

_RUNNING: ContextVar["ModelCall | None"] = ContextVar("hf call", default=None)


@dataclass(slots=True)
class ModelCall:
    """The outermost call of a model with a sharded batch, while it runs."""

    batch: ShardedBatch
    labels: Tensor | None  # next tokens, this rank's
    items: Any  # the number of labels that losses are divided by
    attended: int = 0  # calls of burst attention
    losses: int = 0  # of these labels, divided by the labels of the whole batch

    def count(self) -> None:
        self.attended += 1


def call_model(original: Callable, model: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
    """`PreTrainedModel.__call__` and `PeftModel.__call__`: checks a model and its inputs, and then
    whether it used a sharded batch as one."""
    batch = inputs.get("burst")
    if batch is None:
        return original(model, *args, **inputs)
    if _RUNNING.get() is not None:  # a model inside another
        require(WHO, [(
            inputs.get("position_ids") is not None, "a model must pass position_ids on to its "
            "layers, because a shard alone does not show where it lies",
            f"none in {type(model).__name__}", "use a model with rotary embeddings")])  # fmt: skip
        return original(model, *args, **inputs)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    require(WHO, of_model(model, inner, batch.group is not None and batch.group.size() > 1))
    require(WHO, of_inputs(inner, args, inputs))
    call = ModelCall(batch, inputs.get("shift_labels"), inputs.get("num_items_in_batch"))
    token, of_operators = _RUNNING.set(call), ON_CALL.set(call.count)
    try:
        with fused_head(inner, call.labels, batch.fused_loss), _checkpoints_of(batch):
            outputs = original(model, *args, **inputs)
    finally:
        _RUNNING.reset(token)
        ON_CALL.reset(of_operators)
    require(WHO, _of_outputs(inner, call, inputs, outputs))
    return outputs


def _checkpoints_of(batch: ShardedBatch) -> AbstractContextManager[None]:
    """A context in which activation checkpoints keep what the batch's options ask for."""
    if batch.config.keep != "none" or batch.input_gib is not None:
        patch_checkpoints()
    return nullcontext() if batch.input_gib is None else all_on_host(*batch.input_gib)


def count_attention(module: torch.nn.Module, batch: ShardedBatch | None) -> None:
    """Burst attention begins a call. Refuses a layer that does not pass a sharded batch on."""
    if is_compiling():  # the operator counts, whenever it runs
        return
    if call := _RUNNING.get():
        require(WHO, [(
            batch is not None, "all layers must pass further keyword arguments on to attention, "
            "because burst is one", f"none in {type(module).__name__}",
            "use another model")])  # fmt: skip
        call.count()


def make_model(original: Callable, model: torch.nn.Module, config: Any, *args: Any,
               **options: Any) -> None:  # fmt: skip
    """`PreTrainedModel.__init__`, which refuses a model that cannot have burst."""
    if getattr(config, "_attn_implementation", None) == "burst":
        require(WHO, of_class(type(model)))
    original(model, config, *args, **options)


def cross_entropy(original: Callable, source: Any, target: Tensor,
                  num_items_in_batch: Any = None, ignore_index: int = -100,
                  **options: Any) -> Tensor:  # fmt: skip
    """transformers' `fixed_cross_entropy`, also of fused logits."""
    call = _RUNNING.get()
    if call and call.labels is not None and num_items_in_batch is not None:
        is_right = target.data_ptr() == call.labels.data_ptr() and ignore_index == -100
        call.losses += is_right
        # FSDP2's mixed precision rounds what reaches the model
        num_items_in_batch = call.items if is_right else num_items_in_batch
    if isinstance(source, FusedLogits):
        return source.loss(num_items_in_batch)
    return original(source, target, num_items_in_batch, ignore_index, **options)


def prediction_step(original: Callable, trainer: Any, model: torch.nn.Module, inputs: Mapping,
                    prediction_loss_only: bool, ignore_keys: Any = None) -> tuple:  # fmt: skip
    """`Trainer.prediction_step`: the loss of the whole batch on all its ranks, and no
    predictions."""
    batch = inputs.get("burst")
    if batch is None:
        return original(trainer, model, inputs, prediction_loss_only, ignore_keys)
    require("burst in Trainer", [(
        prediction_loss_only, "evaluation must ask for the loss alone, because predictions and "
        "labels are those of a shard", "compute_metrics, or predict()",
        "leave compute_metrics out, or evaluate with model.set_attn_implementation(\"sdpa\") and "
        "batches that are not sharded")])  # fmt: skip
    loss, *predictions = original(trainer, model, inputs, prediction_loss_only, ignore_keys)
    return (mean_over(batch.group, loss), *predictions)


def mean_over(group: dist.ProcessGroup | None, loss: Tensor | None) -> Tensor | None:
    """The mean of a loss over the ranks of a group."""
    if group is None or group.size() == 1 or loss is None:
        return loss
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total / group.size()


def _of_outputs(model: torch.nn.Module, call: ModelCall, inputs: Mapping[str, Any],
                outputs: Any) -> Iterator[Need]:  # fmt: skip
    """Whether a model used the batch in every layer, and its outputs are the whole batch's."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    yield (call.attended >= layers,
           "every layer must compute attention through attn_implementation, because others see a "
           "shard as if it were the sample", f"{call.attended} of {layers} layers in {name}",
           "set attn_implementation=\"burst\", or use another model")  # fmt: skip
    if not isinstance(outputs, Mapping):  # of `return_dict=False`: as far as they are known
        names = ("logits",) if call.labels is None else ("loss", "logits")
        outputs = dict(zip(names, outputs, strict=False))
    loss, rows = outputs.get("loss"), inputs["position_ids"].shape[1]
    is_sharded = call.batch.group is not None and call.batch.group.size() > 1
    yield (outputs.get("aux_loss") is None or not is_sharded,
           "the auxiliary loss of experts must be off, because it would count the tokens of a "
           "shard", "output_router_logits", "pass output_router_logits=False, and "
           "router_aux_loss_coef=0.0 to TRL")  # fmt: skip
    of_trl = bool(inputs.get("fused_lm_head"))  # of shift_labels and num_items_in_batch too
    yield (loss is None or call.losses > 0 or of_trl,
           "a model must compute its loss from shift_labels and num_items_in_batch, because its "
           "own labels and counts are those of a shard", f"another loss in {name}",
           "pass neither labels nor shift_labels, and compute the loss from logits")  # fmt: skip
    yield (not call.batch.fused_loss or call.losses > 0 or call.labels is None,
           "fused_loss must replace a loss that a model computes from its head's logits",
           f"none in this call of {name}", "leave fused_loss out: TRL's trainers compute "
           "log-probabilities without logits themselves")  # fmt: skip
    for output in ("logits", "last_hidden_state", "pooler_output", "start_logits"):
        x = outputs.get(output)
        per_row = not isinstance(x, Tensor) or (x.dim() == 3 and x.shape[1] == rows)
        yield (per_row, f"{output} must have a row for each token, because what sums up a sample "
               "would sum up a shard", f"shape {tuple(getattr(x, 'shape', ()))} in {name}",
               "take the hidden states, call unshard on them, and score those")  # fmt: skip
