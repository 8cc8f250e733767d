"""How Megatron's GPT specs come to use burst's core attention; others that name it are refused."""

import functools
import inspect

from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron_burst.errors import BurstError
from megatron_burst.mcore.core_attention import asks_for_burst, burst_replacements
from megatron_burst.mcore.refusals import WHO
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
    return (*provided, *map(_refuse_in, burst_replacements()))


def _refuse_in(megatrons_own: type) -> Patch:
    return Patch(
        owner=f"{megatrons_own.__module__}:{megatrons_own.__name__}",
        name="__init__",
        parameters=("self", *inspect.signature(megatrons_own).parameters),
        why="specs past GPT's (hybrid, T5, heterogeneous) name this class themselves, and it does "
        "not know what burst means",
        wrap=functools.partial(_refuse_burst, megatrons_own),
    )


def _refuse_burst(megatrons_own: type, init):
    signature = inspect.signature(megatrons_own)

    def checked(self, *arguments, **options) -> None:
        given = signature.bind(*arguments, **options).arguments
        layer = [given.get(name) for name in _OF_LAYER]
        if type(self) is megatrons_own and asks_for_burst(*layer):
            raise BurstError(
                f"{WHO}: the model's spec must name burst's core attention, because Megatron's own "
                f"has no burst; got {megatrons_own.__name__} with cp_comm_type=burst; put the spec "
                "through megatron_burst.burst_spec, or train this model without burst"
            )
        init(self, *arguments, **options)

    return checked


def _replace_provided(core_attention):
    def provide(self) -> type:
        provided = core_attention(self)
        return burst_replacements().get(provided, provided)

    return provide
