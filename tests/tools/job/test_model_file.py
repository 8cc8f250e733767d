"""Models by name, from config.json, from Megatron's arguments; units."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.errors import BurstError, nearest_multiples
from megatron_burst.tools.job.hugging_face import PRESETS, from_hugging_face, preset_name
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.model_file import megatron_arguments, model_of
from megatron_burst.tools.units import in_units, whole_number
from tests.tools.job.configs import (
    DEEPSEEK_V3,
    LLAMA_3_1_8B,
    LLAMA_3_1_405B,
    PRINTED,
    QWEN_2_5_7B,
    QWEN_2_5_72B,
    QWEN_3_8B,
    QWEN_3_32B,
    WITHHELD,
)
from tests.tools.job.configs import LLAMA_3_8B as LLAMA

FLAGS = """
# --num-layers 7
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --ffn-hidden-size=14336 \\
    --disable-bias-linear \\
    --swiglu --vocab-size 128256 --untie-embeddings-and-output-weights # the head
"""
DUMPED = json.dumps({"megatron_arguments": {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "ffn_hidden_size": 14336,
    "swiglu": True, "vocab_size": 128256, "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
}})  # fmt: skip


FAMILIES = json.loads((Path(__file__).parent / "families.json").read_text())
PUBLISHED = {
    name: config
    for name, config in {
        **{name: one for name, (one, *_) in (PRINTED | WITHHELD).items()}, **FAMILIES
    }.items()
    if preset_name(name)
}  # fmt: skip


def same(model: Model, name: str) -> bool:
    return replace(model, name=name) == PRESETS[name]


def alike(model: Model, name: str) -> bool:
    """Whether everything that figures depend on is the same."""
    return same(replace(model, beside=PRESETS[name].beside, unknown=PRESETS[name].unknown), name)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama3-8b"), (LLAMA_3_1_405B, "llama3-405b"), (DEEPSEEK_V3, "deepseek-v3"),
        (QWEN_2_5_7B, "qwen2.5-7b"), (QWEN_2_5_72B, "qwen2.5-72b"), (QWEN_3_8B, "qwen3-8b"),
        (QWEN_3_32B, "qwen3-32b"), (LLAMA_3_1_8B, "llama3.1-8b"),
        *((PRINTED[one][0], one.lower()) for one in ("Qwen3-30B-A3B", "gpt-oss-20b")),
        (PRINTED["Llama-3.2-1B"][0], "llama3.2-1b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_published_configs_are_the_presets(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert same(model_of(str(tmp_path / "config.json")), name)
    assert same(model_of(str(tmp_path)), name)  # a downloaded model is a folder
    assert PRESETS[name].unknown == ()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_of_other_families_are_the_presets(name):
    preset = preset_name(name)
    assert replace(from_hugging_face(PUBLISHED[name], name), name=preset) == PRESETS[preset]


@pytest.mark.parametrize(("name", "billions"), [("0.6b", 0.596), ("1.7b", 1.72), ("14B", 14.77)])
def test_presets_are_found_whatever_their_capitals_and_dashes(name, billions):
    found = model_of(f"Qwen3_{name}")
    assert found.params / 1e9 == pytest.approx(billions, rel=0.002) and not found.unknown
    assert model_of("Llama-3.1-8B") == PRESETS["llama3.1-8b"]
    assert len({preset_name(one) for one in PRESETS}) == len(PRESETS)
    assert same(model_of("Llama-3.3-70B"), "llama3.3-70b")
    assert same(model_of("Qwen3.6-35B-A3B"), "qwen3.5-35b-a3b")
    assert same(model_of("Qwen3.6-27B"), "qwen3.5-27b")
    assert replace(PRESETS["deepseek-r1"], name="deepseek-v3") == PRESETS["deepseek-v3"]


@pytest.mark.parametrize("where", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_model_of_the_local_cache(where, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(where, str(tmp_path))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[where]
    folder = tmp_path / below / "models--meta-llama--Meta-Llama-3-8B"
    with pytest.raises(BurstError, match="hf:meta-llama/.* must be in the local cache.*got no .*/"):
        model_of("hf:meta-llama/Meta-Llama-3-8B")
    with pytest.raises(BurstError, match="hf: must be followed by a name"):
        model_of("hf:")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    for commit, config in (
        ("abc123", LLAMA),
        ("older", LLAMA | {"num_hidden_layers": 2}),
    ):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    found = model_of("hf:meta-llama/Meta-Llama-3-8B")
    assert same(found, "llama3-8b") and found.name == "hf:meta-llama/Meta-Llama-3-8B"
    assert model_of("hf:meta-llama/Meta-Llama-3-8B@older").layers == 2


@pytest.mark.parametrize(("text", "name"), [(FLAGS, "flags.txt"), (DUMPED, "args.json")])
def test_megatron_arguments_are_the_preset(text, name, tmp_path):
    (tmp_path / name).write_text(text)
    assert alike(model_of(str(tmp_path / name)), "llama3-8b")


def test_latent_attention_and_experts_of_megatron():
    model = from_megatron(
        megatron_arguments(
            "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 "
            "--vocab-size 129280 --swiglu --untie-embeddings-and-output-weights "
            "--disable-bias-linear "
            "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
            "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 "
            "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
            "--moe-layer-freq '([0]*3+[1]*58)' --mtp-num-layers 1"
        ),
        "x",
    )
    assert alike(model, "deepseek-v3")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("config.json", "{\n 'a': 1}", "config.json must be JSON.*line 2 column 2"),
        ("config.json", json.dumps({**LLAMA, "rope_theta": float("nan")}), "have no NaN.*got nan"),
        ("config.json", "[1]", r"must be a table.*got \[1\]"),
        ("config.json", json.dumps({**LLAMA, "hidden_size": "wide"}), "'hidden_size'.*'wide'"),
        ("config.json", '{"num_attention_head": 4}', "heads, .*did you mean 'num_att"),
        ("config.json", json.dumps({**LLAMA, "num_key_value_heads": 5}), "heads must divide que"),
        ("config.json", json.dumps({**LLAMA, "vocab_size": 0}), "vocab 0; correct .*config.json$"),
        ("flags.txt", "--num-layers 2 --hidden-size 8", "a number 'num_attention_heads'"),
        ("flags.txt", FLAGS.replace("--vocab-size 128256", ""), "'vocab_size'.*got None"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_in_a_sentence(name, text, match, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(BurstError, match=f"(?s){match}"):
        model_of(str(tmp_path / name))


def test_an_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(BurstError, match=r"got 'llama-8b', did you mean 'llama3-8b'\?"):
        model_of("llama-8b")
    with pytest.raises(BurstError, match="did you mean 'qwen3-8b'.*, hf:ORG/NAME"):
        model_of("Qwen/Qwen3-8")
    for other in ("llama2-7b", "deepseek-v2", "internlm3-8b", "minicpm4-8b"):
        with pytest.raises(BurstError, match=f"got '{other}'; choose"):
            model_of(other)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1M", 1 << 20), ("1048576", 1 << 20), ("128k", 1 << 17), ("1.5m", 3 << 19), ("1_000", 1000)],
)
def test_units(text, number):
    assert whole_number(text, "--seq-length") == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1MB", "many", "0.3k", "1e6"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(BurstError, match="--gpus must be a positive whole number.*128k or 1M"):
        whole_number(text, "--gpus")


def test_numbers_in_words():
    numbers = (64 << 10, 1 << 20, 3 << 30, 1536, 7)
    assert [in_units(n) for n in numbers] == ["64K", "1M", "3G", "1536", "7"]


@given(st.integers(1, 1 << 40))
def test_numbers_are_read_as_they_are_written(number):
    assert whole_number(in_units(number), "--seq-length") == number


@pytest.mark.parametrize(("gate", "ffn"), [("", 4096), (" --swiglu", 2688)])
def test_width_of_the_feed_forward_that_megatron_takes_by_itself(gate, ffn):
    """Source: validate_args in megatron/training/arguments.py, core_v0.19."""
    text = "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --vocab-size 9" + gate
    assert from_megatron(megatron_arguments(text), "x").ffn == ffn


def test_the_nearest_multiples_are_named_but_never_none_at_all():
    assert nearest_multiples(60, 8) == "multiple of 8, such as 56 or 64"
    assert nearest_multiples(5, 8) == "multiple of 8, such as 8"
