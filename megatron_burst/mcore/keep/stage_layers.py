"""Which layers a pipeline stage has, and which of them keep what "auto" chose."""

from collections.abc import Sequence
from functools import lru_cache

from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_burst.recompute.auto.budget import WHOLE, Placed

_NOWHERE = Placed()
_spread = lru_cache(maxsize=64)(Placed.spread)  # every call of a kept module asks
_SIZES = (  # of a configuration
    "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "v_head_dim",
    "ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip


def stage_layers(config: TransformerConfig) -> list[int]:
    """Numbers of this process's decoder layers that may be recomputed, over all its chunks.

    A multi-token prediction layer counts as the decoder layer of the same number, if there is one.
    "block" recomputes only the first layers of each chunk; with quantized layers it may be others.
    """
    is_block = config.recompute_method == "block" and not (config.fp8 or config.fp4)
    most = config.recompute_num_layers if is_block else config.num_layers
    numbers = []
    for chunk in _chunks(config):
        first = get_transformer_layer_offset(config, chunk) + 1
        numbers += range(first, first + min(get_num_layers_to_build(config, chunk), most))
    return numbers


def is_among(layers: int | None, config: TransformerConfig, layer_number: int) -> bool:
    """Whether a layer is among so many first ones of its pipeline stage; None: all of them."""
    return layers is None or layer_number in stage_layers(config)[:layers]


def meets_other_sequences(config: TransformerConfig) -> bool:
    """Whether a layer communicates with ranks of other sequences: those must recompute the same
    layers, whatever the lengths of their own."""
    if not config.num_moe_experts:
        return False
    shared = config.tensor_model_parallel_size * config.context_parallel_size
    tp_of_experts = getattr(config, "expert_tensor_parallel_size", None) or 1
    elsewhere = shared % (config.expert_model_parallel_size * tp_of_experts) > 0
    return elsewhere or "global_aux_loss" in config.moe_router_load_balancing_type


def layer_kind(config: TransformerConfig) -> tuple:
    """What a layer's memory depends on: layers of equal kinds hold as much for each token."""
    return tuple(getattr(config, name, None) for name in _SIZES)


def is_last(config: TransformerConfig, layer_number: int) -> bool:
    """Whether a layer's backward follows its forward at once, so that nothing can be fetched in
    between."""
    last = config.pipeline_model_parallel_size - 1
    if parallel_state.get_pipeline_model_parallel_rank() != last or mtp_layers(config):
        return False
    return layer_number == stage_layers(config)[-1]


def is_on_host(
    placed: Placed, config: TransformerConfig, layer_number: int, whole: Placed = _NOWHERE
) -> bool | None:
    """Whether a layer keeps a module's output in host memory, or on the device; None: it does not
    keep it. Not among its layers are those of which everything is kept."""
    numbers = stage_layers(config)
    numbers = numbers[: len(numbers) - whole.device]
    if layer_number not in numbers:
        return None
    return _spread(placed, len(numbers))[numbers.index(layer_number)]


def of_decoder(chosen: dict[str, Placed], config: TransformerConfig) -> dict[str, Placed]:
    """What is left for the stage's decoder layers when multi-token prediction layers keep like
    those of their number; all of these if it is enough for all."""
    layers = len(stage_layers(config)) - chosen.get(WHOLE, _NOWHERE).device
    mtp, shared = mtp_layers(config), sharing(config)

    def of_decoder_layers(placed: Placed) -> Placed:
        if placed.device >= layers + mtp:
            return Placed(layers)
        device = max(0, min(placed.device, layers) - shared)
        return Placed(device, max(0, min(placed.host, layers - device) - mtp))

    return {
        name: placed if name == WHOLE else of_decoder_layers(placed)
        for name, placed in chosen.items()
    }


def sharing(config: TransformerConfig) -> int:
    """Number of multi-token prediction layers that keep like decoder layers of their number."""
    numbers = stage_layers(config)
    return sum(number in numbers for number in range(1, mtp_layers(config) + 1))


def mtp_layers(config: TransformerConfig) -> int:
    """Number of the stage's layers of multi-token prediction."""
    return sum(get_mtp_num_layers_to_build(config, chunk) for chunk in _chunks(config))


def _chunks(config: TransformerConfig) -> Sequence[int | None]:
    chunks = config.virtual_pipeline_model_parallel_size
    return range(chunks) if chunks else (None,)
