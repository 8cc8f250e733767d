"""Functions of transformers and PEFT that burst replaces, to see how a sharded batch is used."""

from megatron_burst.imports import when_imported
from megatron_burst.patching import Patch

_CALLS = "megatron_burst.hf.calls"
_CALL = "self", "args", "kwargs"
_ROWS = (
    Patch("hf", "transformers.modeling_utils:PreTrainedModel.__init__", f"{_CALLS}:make_model",
          ("self", "config", "inputs", "kwargs"),
          "a model that does not know burst would stop with a KeyError", "transformers"),
    Patch("hf", "transformers.modeling_utils:PreTrainedModel.__call__", f"{_CALLS}:call_model",
          _CALL, "no hook of a model sees its keyword arguments and its outputs before the loss is "
          "used", "transformers"),
    Patch("hf", "transformers.loss.loss_utils:fixed_cross_entropy", f"{_CALLS}:cross_entropy",
          ("source", "target", "num_items_in_batch", "ignore_index", "kwargs"),
          "shows which labels and which count a loss is made of, and takes fused logits",
          "transformers"),
    Patch("hf", "transformers.trainer:Trainer.prediction_step", f"{_CALLS}:prediction_step",
          ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
          "metrics would get the shards of all ranks as if they were samples", "transformers"),
    Patch("hf", "peft.peft_model:PeftModel.__call__", f"{_CALLS}:call_model", _CALL,
          "PEFT calls forward of the model that it wraps, and no call of it is seen", "peft"),
)  # fmt: skip


def patch_transformers() -> None:
    """Replace them, each once its module is imported. Idempotent.

    Raises:
        BurstError: if transformers or PEFT differ from what the rows were written for.
    """
    for patch in _ROWS:
        when_imported(patch.module, patch.apply)
