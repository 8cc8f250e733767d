"""What core attention refuses: configurations and calls that burst does not support."""

from functools import cache

import torch.distributed as dist
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_burst.errors import BurstError
from megatron_burst.installed import require_megatron
from megatron_burst.mcore.argument_values import global_args
from megatron_burst.mcore.arguments import check_args, check_options
from megatron_burst.say import say

WHO = "burst core attention"
PER_LAYER = ("attention_dropout", "window_size")  # options that a layer may have otherwise
_WITHOUT = "train this model without burst"
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
         f"window_size={config.window_size}", f"leave it out, or {_WITHOUT}"),
        (not (config.fp8_dot_product_attention or config.fp8_multi_head_attention),
         "must not be fp8, because its kernels are not", "fp8 attention", "switch it off"),
        (attention_type == "self", "must be self-attention, because queries and keys are dealt "
         "out alike", f"attention_type={attention_type}", _WITHOUT),
        (attn_mask_type in CAUSAL, "must be causal or unmasked, because other masks are not "
         "supported", f"attn_mask_type={attn_mask_type.name}", _WITHOUT),
    )  # fmt: skip
    for holds, must, got, change in needs:
        if not holds:
            raise BurstError(f"{WHO}: layer {layer_number} {must}; got {got}; {change}")
    check_options(config, WHO, skip=PER_LAYER)


def check_run() -> None:
    """Refuse a run in which burst attention is being built, by whichever door; name its Megatron.

    Raises:
        BurstError: see `require_megatron` and, of the command line if there is one, `check_args`;
            also for what the flag's door would have set there.
    """
    _say_once(f"burst attention: {require_megatron(WHO)}")
    args = global_args()
    if args is None:
        return
    check_args(args, WHO)
    if getattr(args, "create_attention_mask_in_dataloader", False):
        raise BurstError(
            f"{WHO}: the data loader must make no mask, because the causal mask is known and any "
            "other is not supported; got create_attention_mask_in_dataloader=True; pass "
            "--no-create-attention-mask-in-dataloader"
        )


@cache
def _say_once(sentence: str) -> None:
    """Say it on the first rank, once in a process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(sentence)


def names_burst(config: TransformerConfig) -> bool:
    """Whether a configuration has a layer run burst."""
    kinds = config.cp_comm_type
    return "burst" in ([kinds] if isinstance(kinds, str) else kinds or ())


def check_named(config: TransformerConfig) -> None:
    """Refuse a model of burst's spec, or under burst's flag, in which no layer would run burst.

    Raises:
        BurstError: if it has context parallelism, and all of it is Megatron's own.
    """
    if config.context_parallel_size > 1 and not names_burst(config):
        raise BurstError(
            f"{WHO}: a layer must have the cp_comm_type burst, because all would run Megatron's "
            f"own context parallelism otherwise; got cp_comm_type={config.cp_comm_type}; pass "
            "--cp-comm-type burst, or call the validate_args of megatron.training.arguments, which "
            "sets it, after importing megatron_burst.patch"
        )


def check_tokens(query: Tensor, key: Tensor) -> None:
    """Refuse decoding: keys of a cache are no shard of the queries' sequence.

    Args:
        query, key: [tokens, b, h, d].

    Raises:
        BurstError: naming the numbers of tokens.
    """
    if InferenceMode.is_active() or query.shape[0] != key.shape[0]:
        raise BurstError(
            f"{WHO}: queries and keys must be of the same tokens, in training or evaluation, "
            "because KV caches are not supported; got "
            f"{query.shape[0]} query and {key.shape[0]} key tokens in "
            f"{'an inference engine' if InferenceMode.is_active() else 'one call'}; generate with "
            "a model that is built at --context-parallel-size 1"
        )


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
