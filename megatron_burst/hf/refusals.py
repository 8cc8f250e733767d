"""What of transformers' models burst does not support: modules, tensors and names only."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_burst.errors import Need, require
from megatron_burst.masks_of_models import parts_of

WHO = "burst in transformers"
_SHARD = "call megatron_burst.hf.shard_batch, and pass all that it returns to the model"
_OTHER = "use another attn_implementation, and batches that are not sharded"
# functions that make up a mask which attention derives from window, causality and boundaries
_MASKS = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
          "and_masks", "packed_sequence_mask_function",
          "remap_positions_for_packed_sequence"}  # fmt: skip
# arguments that models pass to attention, and that change nothing there
_HARMLESS = {"position_ids", "use_cache", "cache_position", "num_items_in_batch",
             "output_hidden_states", "output_router_logits", "shift_labels", "labels",
             "return_dict", "logits_to_keep", "fused_lm_head"}  # fmt: skip
# of labels that are not next tokens
_LOSSES = {"ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
           "ForQuestionAnswering"}  # fmt: skip
_WINDOW = "sliding_attention"
_LAYERS = {"full_attention", _WINDOW, "attention"}
_ROPES = {"dynamic", "longrope"}  # their frequencies depend on the longest position that they see


def no_mask(*, mask_function: Callable, attention_mask: Tensor | None = None, **_: Any) -> None:
    """A mask function of transformers: no mask, because attention gets boundaries and windows.
    Refuses padding, and masks that these do not express."""
    strange = sorted(parts_of(mask_function) - _MASKS)
    require(WHO, [
        (attention_mask is None or bool(attention_mask.all()),
         "a batch must have no padding, because attention would see it",
         "zeros in attention_mask", _SHARD),
        (not strange, "a mask must be causal, a window or documents, because burst supports no "
         "other in a model", ", ".join(strange), _OTHER),
    ])  # fmt: skip


def of_attention(module: torch.nn.Module, index: int | None, arguments: Mapping[str, Any],
                 lengths: tuple[int, int], window: int | None,
                 causal: bool) -> Iterator[Need]:  # fmt: skip
    """Checks of one call of a model's attention, and of its arguments beyond q, k, v and a window;
    `index`: its layer, None if that is not known."""
    yield (arguments["burst"] is not None,
           "attention must get the whole sample's layout, because a shard alone does not show "
           "where it lies", "no keyword argument burst", f"to train, {_SHARD}; to generate or "
           "evaluate, model.set_attn_implementation(\"sdpa\")")  # fmt: skip
    name = type(module).__name__
    yield (arguments["attention_mask"] is None,
           "attention must have no mask or bias of the model's own, because it is sharded",
           f"one in {name}", _OTHER)  # fmt: skip
    yield (not arguments["dropout"], "attention must have no dropout, because no kernel has it",
           f"dropout={arguments['dropout']}",
           "set attention_dropout=0.0 in the model's config")  # fmt: skip
    legal = {"burst", "attention_mask", "dropout", *_HARMLESS}
    strange = [name for name, x in arguments.items()
               if name not in legal and x is not None and x is not False]  # fmt: skip
    yield (not strange, "a model must ask attention for nothing but windows, sinks, a soft cap and "
           "a scale, because burst supports nothing else here", ", ".join(strange),
           _OTHER)  # fmt: skip
    yield (lengths[0] == lengths[1], "queries and keys must be the same rows, because both are "
           "sharded alike", "{} queries and {} keys".format(*lengths),
           "to decode, model.set_attn_implementation(\"sdpa\")")  # fmt: skip
    yield (window is None or causal, "a window must be causal, because transformers counts both "
           "its sides differently", f"sliding_window={window} and is_causal={causal}",
           _OTHER)  # fmt: skip
    yield (window is not None or not _has_window(module, index),
           "a layer with a window must pass it to attention, because attention gets no mask",
           "no sliding_window", _OTHER)  # fmt: skip


def _has_window(module: torch.nn.Module, index: int | None) -> bool:
    """Whether a layer has a window, by its model's config, or else by its own attributes."""
    config = getattr(module, "config", None)
    types = list(getattr(config, "layer_types", None) or ())
    all_have_windows = getattr(config, "use_sliding_window", True) and not types
    if all_have_windows and getattr(config, "sliding_window", None):
        return True
    if index is not None:
        return types[index : index + 1] == [_WINDOW]
    own_types = [getattr(module, name, None) for name in ("layer_type", "attention_type")]
    return getattr(module, "is_sliding", False) or _WINDOW in own_types or {*types} == {_WINDOW}


def of_model(outer: torch.nn.Module, model: torch.nn.Module, sharded: bool) -> Iterator[Need]:
    """Checks of a model that gets a sharded batch. `outer`: PEFT's, or the model itself."""
    tuned = getattr(outer, "active_peft_config", None)
    yield (not getattr(tuned, "is_prompt_learning", False), "PEFT must not add tokens, because a "
           "shard alone does not show where they lie", f"{type(tuned).__name__}",
           "use LoRA")  # fmt: skip
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    yield from _of_layers(model, config)
    parameters = inspect.signature(type(model).forward).parameters
    variable = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    yield (variable or "burst" in parameters, "a model must pass further keyword arguments on to "
           "attention, because burst is one", f"none in {name}", _OTHER)  # fmt: skip
    yield (not model.config.is_encoder_decoder,
           "a model must have no encoder, because keys of cross-attention are not sharded",
           "is_encoder_decoder=True", _OTHER)  # fmt: skip
    offset = [type(x).__name__ for x in model.modules()
              if hasattr(x, "create_position_ids_from_input_ids")]  # fmt: skip
    yield ("position_ids" in parameters and not offset,
           "a model must take position_ids that count from 0, because it would count those of its "
           "shard", f"other positions in {(offset or [name])[0]}", _OTHER)  # fmt: skip
    ropes = _ropes_of(getattr(config, "rope_parameters", None) or {}) & _ROPES
    yield (not sharded or not ropes, "rotary frequencies must not depend on the sequence's length, "
           "because each rank sees other positions", f"rope_type {', '.join(sorted(ropes))}",
           "use another rope_type, or one rank")  # fmt: skip


def _of_layers(model: torch.nn.Module, config: Any) -> Iterator[Need]:
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    strange = sorted(set(types or ()) - _LAYERS)
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    strange += sorted({type(x).__name__ for x in (text or model).modules()
                       if isinstance(x, torch.nn.Conv1d) and x.kernel_size[0] > 1})  # fmt: skip
    yield (not strange,
           "all layers must be attention, full or in a window, because other layers would see a "
           "shard as if it were the sample", ", ".join(strange), "use another model")  # fmt: skip


def of_class(kind: type) -> Iterator[Need]:
    """Checks of a model's class, before a model is made."""
    names = vars(sys.modules[kind.__module__])
    tables = [name for name in names if name.endswith("_ATTENTION_CLASSES")]
    yield (not tables, "a model must take attention from AttentionInterface, because burst is "
           "registered there", f"{', '.join(tables)} of {kind.__name__}",
           "use another attn_implementation")  # fmt: skip


def of_inputs(model: torch.nn.Module, args: tuple, inputs: Mapping[str, Any]) -> Iterator[Need]:
    """Checks of what a model gets beside a sharded batch."""
    yield (not args, "a sharded batch must be passed by name, because each name has its meaning",
           f"{len(args)} arguments without", "call model(**batch)")  # fmt: skip
    yield (inputs.get("position_ids") is not None, "a sharded batch must have position_ids, "
           "because a model would count those of its shard", "none", _SHARD)  # fmt: skip
    mask = inputs.get("attention_mask")
    yield (mask is None or (mask.dim() == 2 and bool(mask.all())),
           "a batch must have no padding and no mask, because attention would see all of it",
           "attention_mask", f"leave it out; {_SHARD}")  # fmt: skip
    yield (not inputs.get("logits_to_keep"), "all rows must reach the head, because the last rows "
           "of a shard are not those of the sample", "logits_to_keep", "leave it out")  # fmt: skip
    yield (inputs.get("shift_labels") is None or inputs.get("labels") is not None,
           "labels must reach the model, because who takes them out computes a loss that shifts "
           "them again", "shift_labels without labels", "leave out what reads labels beside the "
           "model (label_smoothing_factor, compute_loss_func, compute_metrics), or take "
           "shift_labels out too")  # fmt: skip
    shifts_labels = getattr(model, "loss_type", None) not in _LOSSES
    yield (shifts_labels or inputs.get("labels") is None, "labels must be next tokens, because "
           "shard_batch shifts them", f"those of {type(model).__name__}",
           "pass neither labels nor shift_labels, and compute the loss from what unshard returns "
           "of hidden states or logits")  # fmt: skip


def _ropes_of(parameters: Mapping[str, Any]) -> set[str]:
    """Rope types, also where each kind of layers has its own."""
    inner = (_ropes_of(x) for x in parameters.values() if isinstance(x, Mapping))
    return {str(parameters.get("rope_type", "default"))}.union(*inner)
