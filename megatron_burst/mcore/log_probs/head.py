"""Makes a Megatron model return `DeferredLogits` where a framework takes log-probabilities."""

import inspect
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_burst.errors import BurstError
from megatron_burst.logs import log_message
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.mcore.fused_loss import check_model
from megatron_burst.mcore.log_probs import frameworks
from megatron_burst.mcore.log_probs.deferred import defer
from megatron_burst.mcore.output_layer import ColumnParallelLinear

# arguments of a model's forward with which it must return what Megatron does
_OTHER_USES = ("labels", "inference_context", "inference_params", "runtime_gather_output",
               "output_processor")  # fmt: skip


class DeferredHead:
    """Attached to one GPTModel or HybridModel of a pipeline stage with an output layer."""

    def __init__(self, model: Any) -> None:
        self.model, self.layer, self.active = model, model.output_layer, False
        self.parameters = inspect.signature(model.forward).parameters

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward: whether it returns logits to a function of a framework's that
        takes deferred ones."""
        options = dict(zip(self.parameters, args, strict=False)) | kwargs
        is_plain = model.output_layer is self.layer  # no adapter around it
        values = [options.get(name) for name in _OTHER_USES]
        other = any(value is not None and value is not False for value in values)
        self.active = is_plain and not other and frameworks.takes_deferred()

    def end(self, *_: Any) -> None:
        """After the model's forward, even if it failed."""
        self.active = False

    def defer(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """The logits of a call of the layer; computed under FSDP, whose hooks end with the call."""
        own = self.layer.weight if weight is None else weight
        if isinstance(own, DTensor) or hasattr(own, "__fsdp_param__"):
            self.active = False
            return self.layer(hidden, weight=weight)[0]
        return defer(self.layer, hidden, weight)


def defer_logits(model: Any) -> Any:
    """Make a model return deferred logits where it returns logits. Idempotent.

    A model whose head computes more than `hidden @ weight.T` is left unchanged, with a log line.

    Args:
        model: Megatron's GPTModel or HybridModel, not yet wrapped. It is modified and returned.
    """
    if not model.post_process or getattr(model, "deferred_head", None) is not None:
        return model
    try:
        check_model(model, FusedLossConfig())
    except BurstError as error:
        log_message(f"burst log-probabilities: this model makes logits; {error}")
        return model
    model.deferred_head = head = DeferredHead(model)
    head.layer.__class__, head.layer.deferred_head = ColumnParallelLinear, head
    model.register_forward_pre_hook(head.begin, with_kwargs=True)
    model.register_forward_hook(head.end, always_call=True)
    return model


def build_deferring(build, /, self, *args, **options) -> None:
    """A model's constructor; see `patches`."""
    build(self, *args, **options)
    defer_logits(self)
