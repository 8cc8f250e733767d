"""A model of each family in transformers, on two ranks against one process; all are in
`test_hf_models.py`.

Guards against a model that burst never reaches, that counts positions from its shard, or that
mixes tokens in another way, and trains wrong without a word.
"""

import pytest

from tests.integrations.tiny_models import outcomes
from tests.ranks import preload, run_ranks

pytest.importorskip("transformers", reason="pip install transformers")
preload("transformers", "megatron_burst.hf")
RIGHT = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "cohere", "phi3", "gpt2",
    "opt",
)  # fmt: skip
REFUSED = {
    "mamba": "all layers must be attention",
    "qwen3_next": "all layers must be attention.*linear_attention",
    "rwkv": "must take position_ids",
    "roberta": "count from 0.*RobertaEmbeddings",
    "bart": "must take position_ids",
    "xglm": "every layer must compute attention",
    "stablelm": "must pass further keyword arguments on",
    "falcon": "AttentionInterface.*FALCON_ATTENTION_CLASSES",
    "deepseek_v32": "indexed_attention",
}


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_loss_and_gradients_are_those_of_one_process(packed):
    types = list(RIGHT) if packed else [*RIGHT, *REFUSED]
    for found in run_ranks(outcomes, 2, types, packed, {}):
        assert {name: found[name] for name in RIGHT} == dict.fromkeys(RIGHT, "right")
        for name in () if packed else REFUSED:
            with pytest.raises(ValueError, match=f"refused: burst in transf.*{REFUSED[name]}"):
                raise ValueError(found[name])
