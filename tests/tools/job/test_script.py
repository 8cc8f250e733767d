"""What a script says about a job: a plan with other recomputation, or for one causal sequence where
documents are packed, is for another job."""

import json

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.model_file import megatron_arguments, model_of
from megatron_burst.tools.job.script import arguments_in, read_script

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def read(text, **options):
    return read_script(megatron_arguments(text), options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FULL, "recompute full, keep none"),
        (f"{FULL} --burst-keep all", "recompute full, keep all"),
        (f"{FULL} --burst-keep half --burst-keep-offload results",
         "recompute full, keep half on host"),
        (f"{FULL} --burst-keep all --burst-keep-offload both",
         "recompute full, keep all on host, inputs on host"),
        (f"{FULL} --burst-keep-offload inputs", "recompute full, keep none, inputs on host"),
        ("--recompute-activations --swiglu", "recompute core_attn"),
        ("--recompute-granularity selective", "recompute core_attn"),
        ("--recompute-granularity selective --burst-keep all", "recompute none"),
        ("--recompute-granularity selective --recompute-modules mlp", "recompute selective"),
        ("--recompute-granularity selective \\\n --recompute-modules mlp core_attn",
         "recompute selective and core_attn"),
        ("--num-experts 8 --recompute-granularity selective --recompute-modules moe layernorm",
         "recompute selective"),
        ("--num-experts 8 --recompute-granularity selective --recompute-modules mlp",
         "recompute none"),
        ("--recompute-modules mlp --tensor-model-parallel-size 2", "TP 2"),
    ],
)  # fmt: skip
def test_recomputation_is_read(text, words):
    assert read(text).in_words == words


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("--sft --seq-length 4096", Layout.DOCUMENTS),
        ("--dataloader-inter-document-masking", Layout.ZIGZAG),
        ("--reset-attention-mask", Layout.ZIGZAG),
        ("--reset-position-ids", None),
    ],
)
def test_packing_is_read(text, layout):
    assert read(text).layout is layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{FULL} --burst-keep all", []),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", []),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
         ["--recompute-method uniform --recompute-num-layers 4 is counted as uniform 1"]),
        ("--recompute-granularity selective --recompute-modules mlp layernorm moe_act",
         ["recomputation of layernorm, moe_act is not counted"]),
        (f"{FULL} --burst-keep all --burst-keep-layers 3", ["--burst-keep-layers 3 is not"]),
        (f"--hybrid-layer-pattern M-*- {FULL}", []),
        (f"--hybrid-layer-pattern *-*- {FULL}", [f"{FULL[29:]} is counted as uniform 2: every"]),
        ("--hybrid-layer-pattern *-*- --recompute-granularity full --recompute-num-layers 2", []),
        (f"{FULL} --burst-keep auto --burst-keep-budget-gib 4", []),
        ("--optimizer adam", []),
        ("--optimizer muon", ["--optimizer muon is counted as adam"]),
        ("--fp8-format hybrid --fp8-recipe mxfp8",
         ["linear layers in fp8 (mxfp8) are counted as bf16"]),
        ("--fp4-format e2m1", ["linear layers in fp4 are counted as bf16"]),
        ("--reset-attention-mask", ["burst attention refuses --reset-attention-mask"]),
    ],
)  # fmt: skip
def test_what_is_counted_otherwise_is_said(text, words):
    notes = read(text).notes
    assert len(notes) == len(words)
    assert all(note.startswith(start) for note, start in zip(notes, words, strict=True))


def test_keep_auto_has_its_budget_and_block_its_layers():
    text = f"{FULL} --burst-keep auto --burst-keep-budget-gib 4.5"
    full = {"recompute": "full", "offload_inputs": False}
    assert read(text).policy == full | {"keep": "auto", "keep_budget_gib": 4.5}
    assert read(text).in_words == "recompute full, keep auto within 4.5 GiB"
    assert "keep_budget_gib" not in read(text, keep="all").policy
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 4"
    assert read(block).policy["again_layers"] == 4
    assert read(block).in_words == "recompute full in 4 layers of a stage, keep none"
    for pattern, layers in (("*-*-*-", 2), ("M-*-*-", 4)):  # two letters are a layer of a GPT
        assert read(f"{block} --hybrid-layer-pattern {pattern}").policy["again_layers"] == layers
    assert read("--swiglu").policy == {}
    with pytest.raises(BurstError, match="must be a number"):
        read(f"{FULL} --burst-keep auto --burst-keep-budget-gib much")


SELECTIVE = {"recompute_granularity": "selective"}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"recompute_activations": False}, ""),
        ({"recompute_activations": True}, "recompute core_attn"),
        ({"recompute_granularity": None, "recompute_activations": True}, "recompute core_attn"),
        (SELECTIVE | {"recompute_modules": None}, "recompute core_attn"),
        (SELECTIVE | {"recompute_modules": []}, "recompute none"),
        (SELECTIVE | {"recompute_modules": ["mlp", "core_attn"]},
         "recompute selective and core_attn"),
        ({"tensor_model_parallel_size": 2, "sft": False, "reset_attention_mask": None}, "TP 2"),
        ({"sft": True}, "packed samples, THD"),
    ],
)  # fmt: skip
def test_what_a_run_wrote_down_is_read(tmp_path, written, words):
    (path := tmp_path / "args.json").write_text(json.dumps({"megatron_arguments": written}))
    found = read_script(arguments_in(str(path)))
    assert found.in_words == words and found.notes == ()


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("--recompute-granularity selective --recompute-modules mlp,moe", "mlp,moe"),
        ("--recompute-granularity selective --recompute-modules mlp moe,layernorm",
         "mlp moe,layernorm"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_read_are_refused(text, got):
    with pytest.raises(BurstError, match=f"modules of the script must be names.*got '{got}'"):
        read(text)


def test_modules_matter_to_selective_recomputation_alone():
    found = read(f"{FULL} --recompute-modules mlp,moe")
    assert found.in_words == "recompute full, keep none"
    assert "--recompute-modules" not in found.flags


def test_lines_of_flags_are_read():
    text = """# a comment's quote
--num-layers 32 --hidden-size "4096"  # of a layer
  --swiglu \\

--foo=3 --moe-layer-freq '([0]*3+[1]*58)' --window-size 127 0
--bar-
"""
    assert megatron_arguments(text) == {
        "num_layers": "32", "hidden_size": "4096", "swiglu": True, "foo": "3",
        "moe_layer_freq": "([0]*3+[1]*58)", "window_size": "127 0", "bar_": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "torchrun pretrain_gpt.py --num-layers 2",
        "ARGS=(",
        "--tensor-model-parallel-size $TP",
        "--train-iters `cat steps`",
        '--data "a',
        '--data="a',
        "4096",
        "source common.sh",
        "num_layers: 2",
        "--num-layers: 2",
        "- mlp",
    ],
)
def test_shell_scripts_and_yaml_are_refused(tmp_path, line):
    path = tmp_path / "run.sh"
    path.write_text(f"--num-layers 2\n{line}\n")
    change = "start the job once with --burst-dump-args args.json, and plan args.json"
    for read_file in (arguments_in, model_of):
        with pytest.raises(BurstError) as refused:
            read_file(str(path))
        assert f"got {line}; {change}" in str(refused.value)


def test_nothing_is_said_of_what_an_option_overrules():
    text = "--recompute-granularity full --recompute-method block --burst-keep-layers 3"
    assert len(read(text).notes) == len(read(text, recompute="full").notes) == 1
    assert read(text, recompute="none", keep="none").notes == ()
