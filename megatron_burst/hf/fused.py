"""The loss of a transformers model without its logits: the head computes it, a tile at a time.

While a model runs, its head returns `FusedLogits` in place of logits, which the model hands to its
loss function. Scales and soft caps that a model applies in between are taken from its config, and
compared with what it does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from megatron_burst.errors import BurstError, Need, require
from megatron_burst.loss.linear import linear_cross_entropy

_WHO = "fused loss in transformers"
# adapters whose weight is added to that of a linear layer, as (module, class)
_LORA = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.adalora.layer", "SVDLinear")}
type Step = tuple[str, float]  # "*", "/" or "tanh", and the number


class LogitsError(BurstError, AttributeError):
    """Logits were read that do not exist. An AttributeError, so that `hasattr` says no."""


@dataclass(frozen=True, slots=True)
class FusedLogits:
    """Takes the place of logits, of which no more than a tile ever exists."""

    total: Tensor  # the sum of the labels' losses, []
    planned: tuple[Step, ...]  # what the loss took the model to do to logits
    done: tuple[Step, ...] = ()  # what the model did to them

    def loss(self, count: Any) -> Tensor:
        """The sum over the number of labels. Refuses a model that did something else to logits."""
        require(_WHO, [
            (self.done == self.planned, "a model must scale and cap its logits as its config says, "
             "because the loss is computed before", f"{self.done or 'nothing'} for {self.planned}",
             "leave fused_loss out"),
            (count is not None, "the loss must be divided by num_items_in_batch, because a shard "
             "does not know all labels", "none", "pass all that shard_batch returns"),
        ])  # fmt: skip
        return self.total / count

    @property
    def device(self) -> torch.device:
        """Where labels must be."""
        return self.total.device

    def to(self, *_: Any, **__: Any) -> "FusedLogits":
        """Itself: the loss is in float32, and has all rows."""
        return self

    float = view = reshape = contiguous = to

    def __mul__(self, factor: Any) -> "FusedLogits":
        return self._after("*", factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "FusedLogits":
        return self._after("/", divisor)

    def tanh(self) -> "FusedLogits":
        return self._after("tanh", 0.0)  # the middle of a soft cap

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), options: Any = None):
        if function in (torch.tanh, torch.Tensor.tanh):
            return args[0].tanh()
        raise _not_there(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        raise _not_there(name)

    def __getitem__(self, place: Any) -> Any:
        raise _not_there("[...]")

    def __add__(self, other: Any) -> Any:
        raise _not_there("+")

    __radd__ = __add__

    def _after(self, step: str, number: Any) -> "FusedLogits":
        return replace(self, done=(*self.done, (step, float(number))))


def _not_there(what: str) -> LogitsError:
    return LogitsError(f"{_WHO}: nothing may read the logits, because fused_loss never stores "
                       f"them; got {what}; call shard_batch without fused_loss where logits are "
                       "needed, and leave metrics that read them out")  # fmt: skip


# FSDP2 looks for tensors in what a module returns, to gather its weights before backward
register_pytree_node(
    FusedLogits,
    lambda x: ([x.total], (x.planned, x.done)),
    lambda tensors, steps: FusedLogits(*tensors, *steps),
)


@contextmanager
def fused_head(model: torch.nn.Module, labels: Tensor | None, is_on: bool) -> Iterator[None]:
    """While it lasts, the model's head computes the loss of labels [b, s] in place of logits."""
    if not is_on or labels is None:
        yield
        return
    head = model.get_output_embeddings()
    require(_WHO, _of_head(model, head))
    head.forward = partial(_fused, head, labels, _planned(model.config.get_text_config()))
    try:
        yield
    finally:
        del head.forward


def _fused(head: torch.nn.Module, labels: Tensor, planned: tuple[Step, ...],
           hidden: Tensor) -> FusedLogits:  # fmt: skip
    require(_WHO, [(
        hidden.shape[:-1] == labels.shape, "the head must get a row for each label, because each "
        "has a loss", f"{tuple(hidden.shape[:-1])} rows and {tuple(labels.shape)} labels",
        "leave logits_to_keep out")])  # fmt: skip
    cap = planned[-1][1] if ("tanh", 0.0) in planned else 0.0
    scale = 1.0
    for step, number in planned[:-3] if cap else planned:
        scale = scale * number if step == "*" else scale / number
    total = linear_cross_entropy(hidden, _weight_of(head), labels, reduction="sum", softcap=cap,
                                 logit_scale=scale)  # fmt: skip
    return FusedLogits(total, planned)


def _planned(config: Any) -> tuple[Step, ...]:
    """What a model does to logits, by the names in its config: a scale, then a soft cap."""
    steps: list[Step] = []
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
        if isinstance(number := getattr(config, name, None), int | float):
            divides = name == "logits_scaling" and config.model_type != "hyperclovax"
            steps.append(("/" if divides else "*", float(number)))
            break
    if cap := getattr(config, "final_logit_softcapping", None):
        steps += [("/", float(cap)), ("tanh", 0.0), ("*", float(cap))]
    return tuple(steps)


def _of_head(model: torch.nn.Module, head: Any) -> Iterator[Need]:
    yield (head is not None, "a model must have a head, because the loss takes its place",
           f"none in {type(model).__name__}", "leave fused_loss out")  # fmt: skip
    kind, linear = type(head).__name__, _linear_of(head)
    is_linear = getattr(type(linear), "forward", None) is torch.nn.Linear.forward
    yield (is_linear and linear.bias is None and "forward" not in vars(head),
           "the head must be a linear layer without a bias, because the loss multiplies by its "
           "weight alone", kind, "leave fused_loss out")  # fmt: skip
    if linear is head or hasattr(head, "modules_to_save"):
        return
    # among its base classes, because FSDP2 derives a class of its own
    is_lora = any((base.__module__, base.__name__) in _LORA for base in type(head).__mro__)
    is_plain = is_lora and not head.lora_variant and not any(head.lora_bias.values())
    is_plain = is_plain and not any(getattr(x, "p", 0) for x in head.lora_dropout.values())
    yield (is_plain, "an adapter of the head must be plain LoRA without dropout and bias, because "
           "its weight is added to the head's", f"another {kind}",
           "set lora_dropout=0, or leave the head out of target_modules")  # fmt: skip
    yield (not (head.merged and head.disable_adapters), "adapters of the head must not be merged "
           "where they are disabled, because PEFT takes them out in the head's own call", "both",
           "call unmerge_adapter() before")  # fmt: skip


def _linear_of(head: Any) -> Any:
    """The linear layer that PEFT wraps, or the head itself."""
    copies = getattr(head, "modules_to_save", None)
    if copies is None:
        return getattr(head, "base_layer", head)
    adapters = head.active_adapter
    adapters = [adapters] if isinstance(adapters, str) else adapters or ()
    active = [copies[name] for name in adapters if name in copies]
    return active[0] if active and not head.disable_adapters else head.original_module


def _weight_of(head: Any) -> Tensor:
    """The head's weight [vocab, h], with that of its LoRA adapters."""
    weight = _linear_of(head).weight
    if hasattr(head, "lora_A") and not (head.merged or head.disable_adapters):
        names = [name for name in head.active_adapters if name in head.lora_A]
        weight = weight + sum(head.get_delta_weight(name).to(weight.dtype) for name in names)
    return weight
