"""Makes a Megatron model return `DeferredLogits` where a framework takes log-probabilities."""

import inspect
from typing import Any

from torch.distributed.tensor import DTensor

from megatron_burst.errors import BurstError
from megatron_burst.logs import log_message
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore.fused_loss import check_model
from megatron_burst.mcore.log_probs import frameworks
from megatron_burst.mcore.output_layer import ColumnParallelLinear

# arguments of a model's forward with which it must return what Megatron does
_OTHER_USES = ("labels", "inference_context", "inference_params", "runtime_gather_output",
               "output_processor")  # fmt: skip


def begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the model's forward: whether it returns logits to a function of a framework's that
    takes deferred ones."""
    layer = model.output_layer
    if type(layer) is not ColumnParallelLinear:  # an adapter around it
        return
    options = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    is_plain = all(options.get(name) is None for name in _OTHER_USES)
    is_tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if is_tied else layer.weight
    # FSDP's hooks end with the call of the layer
    is_sharded = isinstance(weight, DTensor) or hasattr(weight, "__fsdp_param__")
    layer.defers = is_plain and not is_sharded and frameworks.takes_deferred()


def end(model: Any, *_: Any) -> None:
    """After the model's forward, even if it failed."""
    model.output_layer.defers = False


def defer_logits(model: Any) -> Any:
    """Make a model return deferred logits where it returns logits. Idempotent.

    A model whose head computes more than `hidden @ weight.T` is left unchanged, with a log line.

    Args:
        model: Megatron's GPTModel or HybridModel, not yet wrapped. It is modified and returned.
    """
    layer = getattr(model, "output_layer", None)
    if not model.post_process or getattr(layer, "defers", None) is not None:
        return model
    try:
        check_model(model, FusedLossConfig())
    except BurstError as error:
        log_message(f"burst log-probabilities: this model makes logits; {error}")
        return model
    model.output_layer.__class__ = ColumnParallelLinear
    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)
    end(model)
    return model


def build_deferring(build, /, self, *args, **options) -> None:
    """A model's constructor; see `patches`."""
    build(self, *args, **options)
    defer_logits(self)
