"""What a script says about a job: a plan with other recomputation, or for one causal sequence where
documents are packed, is for another job."""

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.arguments import megatron_arguments
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
        ("ARGS=(--recompute-granularity selective \\\n --recompute-modules mlp core_attn)",
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
        ("sft: true", Layout.DOCUMENTS),
        ("sft: false", None),
        ("reset_attention_mask: False", None),
        ("dataloader_inter_document_masking: null", None),
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
        (f"{FULL} --burst-keep auto --burst-keep-budget-gib 4", []),
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
    assert read("--swiglu").policy == {}
    with pytest.raises(BurstError, match="must be a number"):
        read(f"{FULL} --burst-keep auto --burst-keep-budget-gib much")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recompute_activations: false", ""),
        ("recompute_activations: true", "recompute core_attn"),
        ("recompute_granularity: null\nrecompute_activations: true", "recompute core_attn"),
        ("recompute_granularity: selective\nrecompute_modules: null", "recompute core_attn"),
        ("recompute_granularity: selective\nrecompute_modules: []", "recompute none"),
        ("recompute_granularity: selective\nrecompute_modules: [mlp, core_attn]  # both",
         "recompute selective and core_attn"),
        ("recompute_granularity: selective\nrecompute_modules: ['mlp',\n  \"core_attn\"]",
         "recompute selective and core_attn"),
        ("train:\n  recompute_granularity: selective\n  recompute_modules:  # both\n"
         "  - mlp\n\n  # and\n  - 'core_attn'\n  tensor_model_parallel_size: 2",
         "TP 2, recompute selective and core_attn"),
        ("recompute_modules:\n    - mlp\nrecompute_granularity: selective", "recompute selective"),
    ],
)  # fmt: skip
def test_truths_and_lists_of_yaml_are_read(text, words):
    assert read(text).in_words == words
    assert read(text).notes == ()


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("--recompute-granularity selective --recompute-modules mlp,moe", "mlp,moe"),
        ("--recompute-granularity selective --recompute-modules mlp moe,layernorm",
         "mlp moe,layernorm"),
        ("--recompute-granularity selective --recompute-modules $MODULES", r"\$MODULES"),
        ("recompute_granularity: selective\nrecompute_modules: *modules", r"\*modules"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_read_are_refused(text, got):
    with pytest.raises(BurstError, match=f"modules of the script must be names.*got '{got}'"):
        read(text)


def test_modules_matter_to_selective_recomputation_alone():
    found = read(f"{FULL} --recompute-modules $MODULES")
    assert found.in_words == "recompute full, keep none"
    assert "--recompute-modules" not in found.flags
    none = read("recompute_granularity: selective\nrecompute_modules: []")
    assert none.flags["--recompute-modules"] == []


SHELL = """#!/bin/bash
# a comment's quote
MODEL=(--num-layers 32 \\
  --hidden-size "4096"  # of a layer
  --swiglu)
OPTIONS="--bf16 --tensor-model-parallel-size $TP_OF_MINE
  --seq-length ${LENGTH_OF_MINE} --lr ${LR_OF_MINE:-2}"
CP=4
cd here && torchrun x.py ${MODEL[@]} $OPTIONS --foo=3 --context-parallel-size $CP \\
  --data "$(cat --baz 3)" | tee log; echo done
"""


def test_a_script_has_its_flags_and_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("TP_OF_MINE", "2")
    monkeypatch.setenv("CP", "8")  # which the script sets
    assert megatron_arguments(SHELL) == {
        "num_layers": "32", "hidden_size": "4096", "swiglu": True, "bf16": True,
        "tensor_model_parallel_size": "2", "seq_length": "${LENGTH_OF_MINE}", "lr": "2", "foo": "3",
        "context_parallel_size": "$CP", "data": "$?",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("--tensor-model-parallel-size $MINE", r'"\$MINE" in run.sh; pass --tp, or start it with'),
        ("--hidden-size $1", r'"\$1" in run.sh; write its value there, or start it with'),
        ("X; if [ $X ]; then Y=--sft; fi", r'"True if \$\(...\)" in run.sh; write its'),
        ("X; [[ $X ]] && Y=--sft", "--sft must have a value.*True if"),
        ("X; for cp in 2 4; do run --context-parallel-size 4; done", r"--context-par.*4 if \$"),
        (
            "--a\nsource common.sh",
            "sources common.sh; write them there, or start it with --burst-d",
        ),
        ("--a\n. ./common.sh", "sources ./common.sh; write them there"),
    ],
)
def test_what_only_a_shell_knows_is_refused(tmp_path, text, got):
    path = tmp_path / "run.sh"
    path.write_text(text.replace("X;", "run --num-layers 2\n"))
    with pytest.raises(BurstError, match=f"^plan: .*{got}"):
        arguments_in(str(path))


def test_options_say_what_a_script_leaves_open(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("run --seq-length $1 --num-layers 2 --train-iters $2")
    assert arguments_in(str(path), ["seq_length"]) == {"num_layers": "2"}


def test_modules_end_where_a_shell_goes_on():
    text = "--recompute-granularity selective --recompute-modules mlp ${MORE[@]} 2>&1 | tee log"
    assert read(text).in_words == "recompute selective"


def test_nothing_is_said_of_what_an_option_overrules():
    text = "--recompute-granularity full --recompute-method block --burst-keep-layers 3"
    assert len(read(text).notes) == len(read(text, recompute="full").notes) == 1
    assert read(text, recompute="none", keep="none").notes == ()
