"""Layers that "auto" does not recompute: Megatron runs them without a checkpoint."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, is_grad_enabled
from torch.nn import Module

from megatron_burst.mcore.kept_modules import LayerModules, modules_of
from megatron_burst.mcore.recompute import whole_bytes
from megatron_burst.mcore.stage import stage_of
from megatron_burst.recompute.keeping import running


def with_fewer_checkpoints(
    forward: Callable[..., Any], /, self: Module, hidden_states: Tensor, *args: Any, **options: Any
) -> Any:
    """A block's forward under full recomputation, with those of its layers in checkpoints that are
    recomputed: they are its first ones, which is what Megatron's "block" method does."""
    checkpoints = _checkpoints(self, hidden_states, options)
    if checkpoints is None:
        return forward(self, hidden_states, *args, **options)
    config = self.config
    self.config = copy(config)  # of the block alone: its layers have the model's
    self.config.recompute_method, self.config.recompute_num_layers = "block", checkpoints
    try:
        return forward(self, hidden_states, *args, **options)
    finally:
        self.config = config


def _checkpoints(block: Module, x: Tensor, options: dict[str, Any]) -> int | None:
    """How many of a block's layers, the first ones, are recomputed; None: as many as Megatron is
    asked for."""
    if not all(isinstance(each, TransformerLayer) for each in block.layers):
        return None
    layers = [modules_of(each) for each in block.layers]
    whole = _whole_among(layers, x) if _is_outermost(layers) else []
    # Megatron-Core 0.16 and 0.17 do not give it to layers without a checkpoint
    if not whole or options.get("padding_mask") is not None:
        return None
    config = block.config
    most = config.recompute_num_layers if config.recompute_method == "block" else len(layers)
    return min(most, len(layers)) - len(whole)


def _is_outermost(layers: Sequence[LayerModules]) -> bool:
    """Whether "auto" chooses for these layers, and no checkpoint is around all of them."""
    return bool(layers) and layers[0].burst.keep == "auto" and not running() and is_grad_enabled()


def _whole_among(layers: Sequence[LayerModules], x: Tensor) -> list[LayerModules]:
    """The layers that are not recomputed, for a block's input; tells them what they should hold."""
    config, stage = layers[0].config, stage_of(layers[0].burst, x.device)
    chosen = layers[0].chosen(stage, x)
    whole = [each for each in layers if each.is_whole_by(chosen)]
    for each in layers:
        each.expected_bytes = x.nbytes + whole_bytes(config, stage, x) if each in whole else 0
    return whole
