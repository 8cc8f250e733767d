"""Layers that "auto" does not recompute: Megatron runs them without a checkpoint."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, is_grad_enabled
from torch.nn import Module

from megatron_burst.mcore.keep.kept_modules import LayerModules, modules_of
from megatron_burst.mcore.keep.module_costs import layers_of, repeats_decisions
from megatron_burst.mcore.keep.recompute import whole_bytes
from megatron_burst.mcore.keep.stage import stage_of
from megatron_burst.recompute.keeping import running


def with_fewer_checkpoints(
    forward: Callable[..., Any], /, self: Module, hidden_states: Tensor, *args: Any, **options: Any
) -> Any:
    """A block's forward under full recomputation, with those of its layers in checkpoints that are
    recomputed: they are its first ones, which is what Megatron's "block" method does."""
    layers = [modules_of(layer) for layer in self.layers if isinstance(layer, TransformerLayer)]
    whole, expected_bytes = _whole_among(self, layers, hidden_states)
    if not whole:
        return forward(self, hidden_states, *args, **options)
    config, mask = self.config, options.get("padding_mask")
    self.config = copy(config)  # of the block alone: its layers have the model's
    # whole ones are the last of those that would be in checkpoints
    self.config.recompute_method = "block"
    self.config.recompute_num_layers = layers.index(whole[0])
    for layer in whole:
        layer.expected_bytes = expected_bytes
        # Megatron-Core 0.16 and 0.17 give it to layers in checkpoints only
        layer.options = {} if mask is None else {"padding_mask": mask}
    try:
        return forward(self, hidden_states, *args, **options)
    finally:
        self.config = config
        for layer in whole:
            layer.expected_bytes, layer.options = 0, {}


def _whole_among(block: Module, layers: Sequence[LayerModules],
                 x: Tensor) -> tuple[list[LayerModules], int]:  # fmt: skip
    """The layers that are not recomputed, for a block's input, and bytes that each should hold."""
    if not layers or layers[0].burst.keep != "auto" or not is_grad_enabled():
        return [], 0
    config, stage = layers[0].config, stage_of(layers[0].burst, x.device)
    model = layers_of(stage.models, config)
    # others' memory is not counted; and a checkpoint around all of them recomputes them anyway
    counts = len(layers) == len(block.layers) and not running()
    # then each layer that is recomputed has a checkpoint of its own
    has_own = config.recompute_method == "block" or config.recompute_num_layers == 1
    model.may_be_whole = counts and has_own and not repeats_decisions(config)
    if not model.may_be_whole:
        return [], 0
    chosen = layers[0].chosen(stage, x)
    whole = [layer for layer in layers if layer.is_whole_by(chosen)]
    return whole, x.nbytes + whole_bytes(config, stage, x)
