"""Weights that the planner counts of a config.json, beside those of transformers' own class for it.

Guards against plans that leave out a part of a model: their memory and time would be another's.
"""

import importlib.util

import pytest
import torch

from megatron_burst.tools.job.hugging_face import from_hugging_face
from tests.tools.job.configs import PRINTED, WITHHELD
from tests.tools.job.test_families import CONFIGS, NAMED, SAID

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)

from tests.integrations.test_bridge_flags import read

EVERY = {name: config for name, (config, *_) in (PRINTED | WITHHELD).items()}
EVERY |= {name: CONFIGS[name] for name in (*SAID, *NAMED)}
# in no release of transformers, and what Bridge calls a language model alone
NO_CLASS = {"kimi_k2", "internlm2", "internlm3", "internvl_chat", "qwen2_5_vl_text"}
COMPARED = [name for name, config in EVERY.items() if config["model_type"] not in NO_CLASS]


@pytest.mark.parametrize("name", COMPARED)
def test_weights_are_those_of_transformers_class(name, tmp_path):
    """The planner counts no norms and few biases: up to 0.04 %."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # transformers' classes have no layers of multi-token prediction; ours no list of longrope's
    # factors, which are no weights
    config = {key: x for key, x in EVERY[name].items() if key != "auto_map"}
    without = {"num_nextn_predict_layers": 0, "rope_scaling": None}
    config |= {key: without[key] for key in without.keys() & config.keys()}
    theirs = read(config, tmp_path)
    language = getattr(theirs, "text_config", theirs)
    with torch.device("meta"):
        if "vl" in theirs.model_type:  # their language models have no class with a head
            model = AutoModelForImageTextToText.from_config(theirs)
        else:
            model = AutoModelForCausalLM.from_config(language)
    weights = sum(x.numel() for part, x in model.named_parameters() if "visual" not in part)
    assert from_hugging_face(config, name).params == pytest.approx(weights, rel=4e-4)


@pytest.mark.parametrize("name", [*SAID, *PRINTED])
def test_a_key_that_is_not_there_has_the_value_of_its_class(name):
    """A model's flags without a key are those with the class's value of it, or none."""
    from transformers import AutoConfig

    config = {key: x for key, x in EVERY[name].items() if key != "auto_map"}
    for key in config.keys() - {"model_type", "architectures"}:
        less = {other: x for other, x in config.items() if other != key}
        try:
            found, theirs = from_hugging_face(less, name), AutoConfig.for_model(**less)
        except Exception:  # it is needed, by us or by transformers
            continue
        if not found.unknown and hasattr(theirs, key):
            whole = from_hugging_face(less | {key: getattr(theirs, key)}, name)
            assert whole.unknown or found == whole, key


def test_pages_say_which_types_bridge_converts():
    from megatron.bridge import AutoBridge
    from transformers.models.auto import modeling_auto

    from docs.family_pages import CONVERTERS, published

    supported, found = set(AutoBridge.list_supported_models()), set()
    for config in published().values():
        kind = config["model_type"]
        listed = (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind),
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind),
        )
        names = config.get("architectures", listed)
        found |= {kind} if supported & set(names) else set()
    assert sorted(found) == CONVERTERS["bridge"]["types"]
