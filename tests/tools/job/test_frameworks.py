"""Plans in frameworks' own words: what their parsers, or Megatron's configuration, make of them.

Guards against names that no such option has, and against decisions that get lost on the way.
"""

import dataclasses
import os
import re
import shlex
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.flags import flag_values
from megatron_burst.tools.job.frameworks import FRAMEWORKS, takes_logits, words_of
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.plan import Framework
from tests.tools.planning import run

OTHERS = sorted(FRAMEWORKS.keys() - {"megatron"})
MODEL = PRESETS["qwen3-30b-a3b"]
JOB = Job(MODEL, 1 << 18, 32, 8, 16, preset("h200"))
FULL = Strategy(tp=2, cp=4, pp=4, ep=2, keep="all", offload=True)
SELECTIVE = Strategy(tp=2, cp=4, pp=4, recompute="selective", fused_loss=False)
NONE = Strategy(tp=2, cp=4, pp=4, recompute="none")


def words(framework, strategy=FULL, model=MODEL):
    job = dataclasses.replace(JOB, model=model)
    return words_of(framework, job, strategy, flag_values(job, strategy, strategy.offload * 2**30))


def pairs(text):
    """Names and values, whatever separates them, without the names' folders."""
    found = re.findall(r"([\w.+-]+)(?: = |=|: | )([^\s\\]+)", text.replace("'", ""))
    return {re.split(r"[.-]", name)[-1] if "." in name else name.strip("-").replace("-", "_"): value
            for name, value in found}  # fmt: skip


def test_every_framework_of_the_table_can_be_asked_for():
    assert set(get_args(Framework)) == FRAMEWORKS.keys()


@pytest.mark.parametrize("framework", OTHERS)
def test_sizes_and_recomputation_are_said(framework):
    said = pairs(words(framework))
    sizes = ("tensor_model", 2), ("context", 4), ("pipeline_model", 4), ("expert_model", 2)
    for name, size in sizes:
        assert said[f"{name}_parallel_size"] == str(size)
    assert said["expert_tensor_parallel_size"] == "1"
    again = said.get("activation_checkpointing") or said["recompute_granularity"]
    assert again in ("true", "full")
    assert "burst" in words(framework) and "cp_comm_type" in words(framework).replace("-", "_")


@pytest.mark.parametrize("framework", OTHERS)
def test_selective_recomputation_names_its_modules_and_none_is_switched_off(framework):
    text = words(framework, SELECTIVE)
    assert re.search(r"recompute.modules.*mlp.*moe", text) and "selective" in text
    assert "MEGATRON_BURST" not in text  # nothing is kept, and nothing fused
    off = words(framework, NONE)
    assert "full" not in off and "selective" not in off
    if framework in ("ms-swift", "bridge", "nemo-rl"):  # whose default, or recipes, recompute
        assert re.search("granularity (= None|none)|checkpointing=false", off)


@pytest.mark.parametrize("framework", OTHERS)
def test_burst_takes_its_options_from_the_variable(framework):
    from megatron_burst.mcore.options import environment_args

    value = re.search(r"MEGATRON_BURST\W{1,6}(keep|fused_loss)(=[^\"]*)", words(framework))
    with mock.patch.dict(os.environ, {"MEGATRON_BURST": value[1] + value[2]}):
        taken = environment_args()
    assert (taken.burst_keep, taken.burst_keep_offload) == ("all", "results")
    assert taken.burst_fused_loss is True and taken.burst_tune == ["keep_host_gib=1"]


def test_bridge_lines_run_and_set_fields_that_megatrons_configuration_has():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parts = ("model", "dataset", "train", "ddp")
    cfg = SimpleNamespace(**{name: SimpleNamespace() for name in parts})
    loading = "import megatron_burst.auto"  # it would change Megatron for the tests that follow
    assert words("bridge").splitlines()[1].startswith(loading)
    with mock.patch.dict(os.environ):
        exec(words("bridge").replace(loading, ""), {"cfg": cfg, "os": os})
        assert os.environ["MEGATRON_BURST"].startswith("fused_loss=1,keep=all")
    assert cfg.model.seq_length == cfg.dataset.seq_length == 1 << 18
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert vars(cfg.model).keys() - fields == {"seq_length"}  # of the provider
    assert vars(cfg.ddp).keys() <= {
        field.name for field in dataclasses.fields(DistributedDataParallelConfig)
    }
    assert cfg.model.cp_comm_type == "burst" and cfg.model.sequence_parallel is True


def test_slimes_words_are_megatrons_flags():
    from megatron.training.arguments import add_megatron_arguments

    line = " ".join(words("slime").replace("\\", "").split())
    given, beside = add_megatron_arguments(ArgumentParser()).parse_known_args(shlex.split(line))
    assert (given.tensor_model_parallel_size, given.context_parallel_size) == (2, 4)
    assert given.recompute_granularity == "full" and given.recompute_num_layers == 1
    assert given.cp_comm_type == ["burst"] and given.sequence_parallel
    own = {word for word in beside if word.startswith("--")}
    assert own == {
        "--train-env-vars", "--custom-megatron-init-path", "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
    }  # fmt: skip
    assert beside[beside.index("--max-tokens-per-gpu") + 1] == str((1 << 18) // 4)


def test_an_uneven_last_stage_is_said():
    for framework in OTHERS:
        text = words(framework, model=dataclasses.replace(MODEL, layers=47))
        assert re.search(r"(last.pipeline|pipeline.stage).*11", text)


@pytest.mark.parametrize("framework", ["verl", "megatron"])
def test_plans_are_shown_in_these_words_and_the_model_is_left_to_the_framework(framework):
    options = f"qwen3-8b --seq-length 128k --gpus 8 --cp 4 --for {framework}"
    text = run(*options.split())
    assert "--num-layers" not in text and "Model flags" not in text
    if framework == "megatron":
        assert "--context-parallel-size 4" in text and "--burst-fused-loss" in text
    else:
        assert "For verl" in text and "ppo_max_token_len_per_gpu=32768" in text
        assert "verl takes all logits" in text and "fused_loss" not in text


def test_sharded_weights_in_other_words_are_refused():
    options = "qwen3-8b --seq-length 128k --gpus 8 --fsdp torch --for bridge"
    assert "--for bridge must come without --fsdp" in run(*options.split(), code=2)
    assert not takes_logits("bridge") and takes_logits("verl") and not takes_logits(None)
    assert not takes_logits("megatron", "torch")
