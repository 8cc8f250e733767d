"""What of transformers' models burst does not support; tensors and names only."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_burst.errors import Need, require
from megatron_burst.masks_of_models import parts_of

WHO = "burst in transformers"
_SHARD = "call megatron_burst.hf.shard_batch, and pass all that it returns to the model"
# functions that make up a mask which attention derives from window, causality and boundaries
_MASKS = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
          "and_masks", "packed_sequence_mask_function",
          "remap_positions_for_packed_sequence"}  # fmt: skip
# arguments that models pass to attention, and that change nothing there
_HARMLESS = {"position_ids", "use_cache", "cache_position", "num_items_in_batch",
             "output_hidden_states", "output_router_logits", "shift_labels", "labels",
             "return_dict", "logits_to_keep", "fused_lm_head"}  # fmt: skip
_LAYERS = {"full_attention", "sliding_attention", "attention"}
_ROPES = {"dynamic", "longrope"}  # their frequencies depend on the longest position that they see


def no_mask(*, mask_function: Callable, attention_mask: Tensor | None = None, **_: Any) -> None:
    """A mask function of transformers: no mask, because attention gets boundaries and windows.

    Raises:
        BurstError: if there is padding, or a mask that these do not express.
    """
    strange = sorted(parts_of(mask_function) - _MASKS)
    require(WHO, [
        (attention_mask is None or bool(attention_mask.all()),
         "a batch must have no padding, because attention would see it",
         "zeros in attention_mask", _SHARD),
        (not strange, "a mask must be causal, a window or documents, because burst supports no "
         "other in a model", ", ".join(strange), "use another attn_implementation"),
    ])  # fmt: skip


def of_attention(module: torch.nn.Module, asked: Mapping[str, Any], lengths: tuple[int, int],
                 window: int | None, causal: bool) -> Iterator[Need]:  # fmt: skip
    """Checks of one call of a model's attention: what it asks for beyond q, k, v and a window."""
    yield (asked["burst"] is not None,
           "attention must get the whole sample's layout, because a shard alone does not show "
           "where it lies", "no keyword argument burst", _SHARD)  # fmt: skip
    yield (asked["attention_mask"] is None,
           "attention must have no mask of its own, because it is sharded", "attention_mask",
           "leave it out, and pass boundaries to shard_batch")  # fmt: skip
    yield (not asked["dropout"], "attention must have no dropout, because no kernel has it",
           f"dropout={asked['dropout']}",
           "set attention_dropout=0.0 in the model's config")  # fmt: skip
    legal = {"burst", "attention_mask", "dropout", *_HARMLESS}
    strange = [n for n, x in asked.items() if n not in legal and x is not None and x is not False]
    yield (not strange, "a model must ask attention for nothing but windows, sinks and a scale, "
           "because burst supports nothing else here", ", ".join(strange),
           "use another attn_implementation")  # fmt: skip
    yield (lengths[0] == lengths[1], "queries and keys must be the same rows, because both are "
           "sharded alike", "{} queries and {} keys".format(*lengths),
           "decode with another attn_implementation")  # fmt: skip
    yield (window is None or causal, "a window must be causal, because transformers counts both "
           "its sides differently", f"sliding_window={window} and is_causal={causal}",
           "use another attn_implementation")  # fmt: skip
    group = asked["burst"].group
    yield from _of_config(module, group is not None and group.size() > 1, window)


def _of_config(module: torch.nn.Module, sharded: bool, window: int | None) -> Iterator[Need]:
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = list(getattr(config, "layer_types", None) or ())
    mine = types[index] if index is not None and index < len(types) else ""
    strange = sorted(set(types) - _LAYERS)
    yield (not strange,
           "all layers must be attention, full or in a window, because other layers would see a "
           "shard as if it were the sample", ", ".join(strange), "use another model")  # fmt: skip
    windowed = getattr(config, "sliding_window", None) and not types
    windowed = windowed and getattr(config, "use_sliding_window", True)
    yield (window is not None or not (windowed or mine == "sliding_attention"),
           "a layer with a window must pass it to attention, because attention gets no mask",
           "no sliding_window", "use another attn_implementation")  # fmt: skip
    yield (not getattr(config, "is_encoder_decoder", False),
           "a model must have no encoder, because keys of cross-attention are not sharded",
           "is_encoder_decoder=True", "use another attn_implementation")  # fmt: skip
    ropes = _ropes_of(getattr(config, "rope_parameters", None) or {}) & _ROPES
    yield (not sharded or not ropes, "rotary frequencies must not depend on the sequence's length, "
           "because each rank sees other positions", f"rope_type {', '.join(sorted(ropes))}",
           "use another rope_type, or one rank")  # fmt: skip


def _ropes_of(parameters: Mapping[str, Any]) -> set[str]:
    """Rope types, also where each kind of layers has its own."""
    inner = (_ropes_of(x) for x in parameters.values() if isinstance(x, Mapping))
    return {str(parameters.get("rope_type", "default"))}.union(*inner)
