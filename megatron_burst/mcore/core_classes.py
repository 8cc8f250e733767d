"""Which class of burst's takes the place of a core attention of Megatron's, or of a model's own."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_burst.errors import BurstError
from megatron_burst.mcore import core_attention
from megatron_burst.mcore.checks import WHO
from megatron_burst.mcore.core_attention import BurstCoreAttention

_GEMMA2 = "megatron.bridge.models.gemma.gemma2_provider"
_CORES_OF_GEMMA2 = "Gemma2DotProductAttention", "Gemma2FlexDotProductAttention"


class BurstGemma2CoreAttention(BurstCoreAttention):
    """Replaces Megatron-Bridge's classes for Gemma 2, which refuse context parallelism and packed
    samples (0.6.2, models/gemma/gemma2_provider.py).

    The configuration says the scale, and odd layers alone have its window.
    """

    def __init__(self, config: Any, layer_number: int, *arguments: Any, **options: Any) -> None:
        if config.apply_query_key_layer_scaling:
            raise BurstError(f"{WHO}: Gemma 2 must not scale scores by layer, because Bridge's "
                             "kernels do not agree on where these are capped then; got "
                             "apply_query_key_layer_scaling=True; leave it out")  # fmt: skip
        options["softmax_scale"] = config.query_pre_attn_scalar**-0.5
        super().__init__(config, layer_number, *arguments, **options)
        own_config = copy.copy(config)
        own_config.window_attn_skip_freq = 2
        self.burst = replace(self.burst, layer_config=own_config)


def burst_replacements() -> dict[type, type]:
    """Megatron's core attention classes -> ours."""
    with_te = {TEDotProductAttention: core_attention.BurstTECoreAttention} if HAVE_TE else {}
    return {DotProductAttention: BurstCoreAttention, **with_te}


def burst_core_of(core: type) -> type | None:
    """Burst's class that replaces a core attention; None if there is none.

    A model's own subclass of TransformerEngine's (Gemma's in Megatron-Bridge) is kept, with burst's
    as its base. Not if it overrides `forward`: that may depend on positions in the sequence
    (Ministral's) without knowing the shard.
    """
    replacements = burst_replacements()
    if core in replacements:
        return replacements[core]
    if issubclass(core, tuple(replacements.values())):
        return core
    if core.__module__ == _GEMMA2:
        return BurstGemma2CoreAttention if core.__name__ in _CORES_OF_GEMMA2 else None
    if HAVE_TE and issubclass(core, TEDotProductAttention):
        return _on_burst(core) if core.forward is TEDotProductAttention.forward else None
    return None


@cache
def _on_burst(core: type) -> type:
    """A subclass whose `super().__init__` is burst's."""
    members = {"__doc__": core.__doc__, "__module__": core.__module__}
    return type(f"Burst{core.__name__}", (core, core_attention.BurstTECoreAttention), members)
