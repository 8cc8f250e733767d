"""What core attention refuses: configurations and calls that burst does not support."""

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_burst.errors import BurstError

WHO = "burst core attention"
CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}  # the masks that are supported


def check_config(
    config: TransformerConfig,
    layer_number: int,
    attn_mask_type: AttnMaskType,
    attention_type: str,
    attention_dropout: float | None,
) -> None:
    """Refuse a layer whose configuration asks for something that burst does not do.

    Raises:
        BurstError: naming the option and what to change.
    """
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    window = is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    )
    needs = (  # whether it holds, what must hold and why, what was got, what to change
        (not dropout, "must not drop weights, because kernels of a ring cannot",
         f"attention_dropout={dropout}", "pass --attention-dropout 0"),
        (not window, "must see all earlier keys, because windows are not supported yet",
         f"window_size={config.window_size}", "leave it out, or train without burst"),
        (config.softmax_type == "vanilla", "must use the plain softmax, because sinks are not "
         "supported yet", f"softmax_type={config.softmax_type}",
         "leave it out, or train without burst"),
        (not (config.fp8_dot_product_attention or config.fp8_multi_head_attention),
         "must not be fp8, because its kernels are not", "fp8 attention", "switch it off"),
        (not (config.qk_clip or config.log_max_attention_logit), "must not track the largest "
         "logit, because its kernels do not return it", "qk_clip or log_max_attention_logit",
         "switch it off"),
        (attention_type == "self", "must be self-attention, because queries and keys are dealt "
         "out alike", f"attention_type={attention_type}", "use Megatron's own for this layer"),
        (attn_mask_type in CAUSAL, "must be causal or unmasked, because other masks are not "
         "supported", f"attn_mask_type={attn_mask_type.name}", "use a causal mask"),
    )  # fmt: skip
    for holds, must, got, change in needs:
        if not holds:
            raise BurstError(f"{WHO}: layer {layer_number} {must}; got {got}; {change}")


def check_call(attention_mask, attn_mask_type, attention_bias, packed_seq_params) -> None:
    """Refuse a call with a mask, bias or packing that burst does not do, rather than drop it.

    Raises:
        BurstError: naming what was passed and what to change.
    """
    if attention_mask is not None:
        raise BurstError(
            f"{WHO}: no mask tensor may be passed, because the causal mask is known and any other "
            f"is not supported; got one of shape {tuple(attention_mask.shape)}; pass "
            "--no-create-attention-mask-in-dataloader"
        )
    if attention_bias is not None:
        raise BurstError(
            f"{WHO}: no attention bias may be passed, because kernels of a ring add none; got one "
            f"of shape {tuple(attention_bias.shape)}; use a position embedding such as rope"
        )
    if packed_seq_params is not None:
        raise BurstError(
            f"{WHO}: sequences must not be packed, because masks between documents are not "
            f"supported yet; got packed_seq_params in {packed_seq_params.qkv_format}; switch "
            "packing off, or train without burst"
        )
    if attn_mask_type not in CAUSAL:
        name = getattr(attn_mask_type, "name", attn_mask_type)
        raise BurstError(
            f"{WHO}: the mask must be causal or none, because other masks are not supported; got "
            f"attn_mask_type={name}; use a causal mask without padding"
        )
