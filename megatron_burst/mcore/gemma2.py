"""Core attention of Gemma 2 in Megatron-Bridge, whose own classes refuse context parallelism and
packed samples (0.6.2, models/gemma/gemma2_provider.py)."""

import copy
from dataclasses import replace
from typing import Any

from megatron.core.transformer.module import MegatronModule

from megatron_burst.errors import BurstError
from megatron_burst.mcore.checks import WHO

REPLACED = ("Gemma2DotProductAttention", "Gemma2FlexDotProductAttention")


class Gemma2CoreAttention(MegatronModule):
    """Comes before `BurstCoreAttention`, and has its arguments: the configuration says the scale,
    and odd layers alone have its window."""

    def __init__(self, config: Any, layer_number: int, *arguments: Any, **options: Any) -> None:
        if config.apply_query_key_layer_scaling:
            raise BurstError(f"{WHO}: Gemma 2 must not scale scores by layer, because Bridge's "
                             "kernels do not agree on where these are capped then; got "
                             "apply_query_key_layer_scaling=True; leave it out")  # fmt: skip
        options["softmax_scale"] = config.query_pre_attn_scalar**-0.5
        super().__init__(config, layer_number, *arguments, **options)
        own = copy.copy(config)
        own.window_attn_skip_freq = 2
        self.burst = replace(self.burst, layer_config=own)
