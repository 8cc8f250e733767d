"""How Megatron's GPT specs come to use burst's core attention; others that name it are refused."""

import functools
import inspect

from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron_burst.errors import BurstError
from megatron_burst.mcore.core_attention import asks_for_burst, burst_replacements
from megatron_burst.mcore.refusals import WHO, check_config, check_named
from megatron_burst.patching import Patch

_OF_LAYER = ("config", "layer_number", "cp_comm_type", "pg_collection")


def provider_patches() -> tuple[Patch, ...]:
    """What makes all of Megatron's GPT specs, multi-token prediction included, use burst."""
    owners = ["megatron.core.models.backends:LocalSpecProvider"]
    if HAVE_TE:
        owners.append("megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider")
    provided = [
        Patch(
            owner=owner,
            name="core_attention",
            parameters=("self",),
            why="GPT specs ask their backend for core attention; --spec does not reach the layers "
            "of multi-token prediction",
            wrap=_replace_provided,
        )
        for owner in owners
    ]
    attention = Patch(
        owner="megatron.core.transformer.attention:Attention",
        name="__init__",
        parameters=(
            "self", "config", "submodules", "layer_number", "attn_mask_type", "attention_type",
            "cp_comm_type", "pg_collection", "pp_layer_offset", "name",
        ),
        why="specs past GPT's (hybrid, T5, heterogeneous, a user's) name their core attention "
        "themselves, and it does not know what burst means",
        wrap=_refuse_others,
    )  # fmt: skip
    return (*provided, attention)


def _refuse_others(init):
    signature = inspect.signature(init)

    def build(self, *arguments, **options) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        _check_core(_class_of(given["submodules"].core_attention), **given)
        init(self, *arguments, **options)
        _check_core(type(self.core_attention), **given)  # of a function, or of params

    return build


def _check_core(
    core: type | None, config, layer_number, attn_mask_type, attention_type, pg_collection=None, **_
) -> None:
    """Refuse a layer that is to run burst and would build another core attention.

    Raises:
        BurstError: naming what the layer has; where burst cannot run it, why not.
    """
    if core is None:
        return
    check_named(config)
    kinds = config.cp_comm_type
    kind = kinds[layer_number - 1] if isinstance(kinds, list) else kinds
    ours = tuple(burst_replacements().values())
    if issubclass(core, ours) or not asks_for_burst(config, layer_number, kind, pg_collection):
        return
    check_config(config, layer_number, attn_mask_type, attention_type, None)
    raise BurstError(
        f"{WHO}: the model's spec must name burst's core attention, because no other knows what "
        f"cp_comm_type=burst means; got {core.__name__} in layer {layer_number}; put the spec "
        "through megatron_burst.burst_spec, or train this model without burst"
    )


def _class_of(core_attention) -> type | None:
    """What a spec's core attention is an object of, where that is known before it is built."""
    core = getattr(core_attention, "module", core_attention)
    core = core.func if isinstance(core, functools.partial) else core
    return core if isinstance(core, type) else None


def _replace_provided(core_attention):
    def provide(self) -> type:
        provided = core_attention(self)
        return burst_replacements().get(provided, provided)

    return provide
