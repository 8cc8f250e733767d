"""`megatron-burst plan` for a script: plans what the script specifies, options override it, and the
script accepts its plan."""

import shlex

import pytest

from megatron_burst.mcore.plan_file import check_plan
from tests.cli.test_plan import run
from tests.test_examples import megatrons_parser

SCRIPT = """
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --swiglu \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --vocab-size 128256 \\
  --ffn-hidden-size 14336 --untie-embeddings-and-output-weights --seq-length 131072 \\
  --global-batch-size 8 --tensor-model-parallel-size 2 --context-parallel-size 4 """


def test_a_script_is_planned_as_it_says(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        SCRIPT + "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --burst-keep all --burst-keep-offload results --sft"
    )
    text = run(str(path), "--gpus", "8")
    said = "TP 2, CP 4, recompute full, keep all on host, packed samples, THD"
    assert f"read from the script: {said}" in text
    assert "TP 2 CP 4 PP 1 DP 1, recompute full, keep all on host" in text
    assert "the only strategy with the given options" in text
    assert "documents are taken to be usual ones, with 10% of a causal sequence's pairs" in text
    assert "recompute full, keep none" in run(str(path), "--gpus", "8", "--keep", "none",
                                              "--no-offload")  # fmt: skip
    assert "recompute none" in run(str(path), "--gpus", "8", "--recompute", "none")


def test_a_plan_has_recomputation_in_the_words_of_its_script(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT + "--recompute-activations")
    text = run(str(path), "--gpus", "8")
    assert "recompute core_attn" in text and "computing again" in text
    assert "--recompute-activations" in text and "--recompute-modules" not in text


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
SELECTIVE = "--recompute-granularity selective "


@pytest.fixture
def plan_of(tmp_path):
    """Plans the script's job with extra arguments and options; writes `plan.json`."""

    def plan(more, options="", code=0):
        path = tmp_path / "run.sh"
        path.write_text(SCRIPT + more)
        out = tmp_path / "plan.json"
        return run(str(path), "--gpus", "8", "--json", str(out), *options.split(), code=code)

    return plan


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        (f"{SELECTIVE}--burst-keep all", "", "recompute none"),
        (f"{SELECTIVE}--burst-keep all", "--keep all", "recompute none"),
        (SELECTIVE, "--keep all", "recompute none"),
        (f"{SELECTIVE}--recompute-modules mlp layernorm", "", "recompute selective"),
        (f"{SELECTIVE}--recompute-modules mlp core_attn", "", "recompute selective and core_attn"),
        ("--recompute-activations", "", "recompute core_attn"),
        (f"{FULL}--burst-keep all --burst-keep-offload both", "",
         "recompute full, keep all on host, inputs on host"),
        (FULL.replace("uniform", "block").replace("layers 1", "layers 4"), "--recompute full",
         "recompute full, keep none"),
        (FULL.replace("layers 1", "layers 2"), "--keep all", "recompute full, keep all"),
    ],
)  # fmt: skip
def test_a_script_takes_the_plan_that_was_made_of_it(plan_of, tmp_path, more, options, words):
    assert f"TP 2 CP 4 PP 1 DP 1, {words}" in plan_of(more, options)
    words = shlex.split((SCRIPT + more).replace("\\\n", " "))[4:]
    parser = megatrons_parser()
    args = parser.parse_args([*words, "--burst-plan", str(tmp_path / "plan.json")])
    check_plan(args)
    alone = parser.parse_args(words)
    for name in ("granularity", "modules", "method", "num_layers"):
        assert getattr(args, f"recompute_{name}") == getattr(alone, f"recompute_{name}")
    if "keep all" in options:
        assert args.burst_keep == "all"


@pytest.mark.parametrize(
    ("more", "options", "read", "planned"),
    [
        (f"{FULL}--burst-keep all --burst-keep-offload results", "--recompute full",
         "TP 2, CP 4, keep all on host", "recompute full, keep all on host"),
        (f"{FULL}--burst-keep all --burst-keep-offload both", "--keep none",
         "TP 2, CP 4, recompute full, inputs on host", "recompute full, keep none, inputs on host"),
        (f"{FULL}--burst-keep all", "--recompute none", "TP 2, CP 4", "recompute none"),
        (f"{SELECTIVE}--burst-keep all", "--recompute full --no-offload --no-offload-inputs",
         "TP 2, CP 4, keep all", "recompute full, keep all"),
        (f"{SELECTIVE}--burst-keep all", "--keep none", "TP 2, CP 4, recompute core_attn",
         "recompute core_attn"),
        ("--recompute-activations", "--recompute selective", "TP 2, CP 4, recompute core_attn",
         "recompute selective and core_attn"),
        (FULL, "--tp 4 --cp 2", "recompute full, keep none", "recompute full, keep none"),
    ],
)  # fmt: skip
def test_an_option_drops_what_it_makes_meaningless(plan_of, more, options, read, planned):
    text = plan_of(more, options)
    assert f"read from the script: {read}\n" in text
    layout = "TP 4 CP 2" if "--tp" in options else "TP 2 CP 4"
    assert f"\n{layout} PP 1 DP 1, {planned}\n" in text


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        (f"{SELECTIVE}--recompute-modules mlp", "--keep all",
         "got recompute selective from the script; leave --keep out, or pass --recompute full"),
        (SELECTIVE, "--offload", "got recompute core_attn from the script; leave --offload out"),
        (FULL, "--offload", "got keep none from the script; pass --keep all"),
        (f"{SELECTIVE}--recompute-modules mlp,moe", "", "between them"),
    ],
)  # fmt: skip
def test_what_a_script_rules_out_is_said_to_come_from_it(plan_of, more, options, words):
    assert words in " ".join(plan_of(more, options, code=2).split())
