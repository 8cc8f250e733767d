"""What a script says about a job: a plan with other recomputation, or for one causal sequence where
documents are packed, is for another job."""

import pytest

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.job.arguments import megatron_arguments
from megatron_burst.tools.job.script import read_script

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
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4",
         ["--recompute-method block --recompute-num-layers 4 is counted as uniform 1"]),
        ("--recompute-granularity selective --recompute-modules mlp layernorm moe_act",
         ["recomputation of layernorm, moe_act is not counted"]),
        (f"{FULL} --burst-keep all --burst-keep-layers 3", ["--burst-keep-layers 3 is not"]),
        (f"{FULL} --burst-keep auto --burst-keep-budget-gib 4", ["--burst-keep auto is counted"]),
        ("--reset-attention-mask", ["burst attention refuses --reset-attention-mask"]),
    ],
)  # fmt: skip
def test_what_is_counted_otherwise_is_said(text, words):
    notes = read(text).notes
    assert len(notes) == len(words)
    assert all(note.startswith(start) for note, start in zip(notes, words, strict=True))


def test_keep_auto_is_left_to_the_search():
    policy = read(f"{FULL} --burst-keep auto --burst-keep-budget-gib 4").policy
    assert policy == {"recompute": "full", "offload_inputs": False}
    assert read("--swiglu").policy == {}


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


def test_modules_end_where_a_shell_goes_on():
    text = "--recompute-granularity selective --recompute-modules mlp ${MORE[@]} 2>&1 | tee log"
    assert read(text).in_words == "recompute selective"


def test_nothing_is_said_of_what_an_option_overrules():
    text = "--recompute-granularity full --recompute-method block --burst-keep-layers 3"
    assert len(read(text).notes) == len(read(text, recompute="full").notes) == 2
    assert read(text, recompute="none", keep="none").notes == ()
