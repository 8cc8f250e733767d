"""`megatron-burst plan` for the arguments of a script: plans what they specify, options override
them, and the script accepts its plan."""

import re
import shlex

import pytest

from megatron_burst.mcore.plan_file import check_plan
from tests.test_examples import megatrons_parser
from tests.tools.test_plan import run

SCRIPT = """
--num-layers 32 --hidden-size 4096 --swiglu
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --vocab-size 128256
  --ffn-hidden-size 14336 --untie-embeddings-and-output-weights --seq-length 131072
  --global-batch-size 8 --tensor-model-parallel-size 2 --context-parallel-size 4 """


def test_a_script_is_planned_as_it_says(tmp_path):
    path = tmp_path / "flags.txt"
    path.write_text(
        SCRIPT + "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --burst-keep all --burst-keep-offload results --sft"
    )
    text = run(str(path), "--gpus", "8")
    said = "TP 2, CP 4, recompute full, keep all on host, packed samples, THD"
    assert f"read from the script: {said}" in text
    assert "TP 2 CP 4 PP 1 DP 1, recompute full, keep all on host" in text
    assert "the only strategy with the given options" in text
    assert "published distribution, with 9% of the query-key pairs" in text
    assert "recompute full, keep none" in run(str(path), "--gpus", "8", "--keep", "none",
                                              "--no-offload")  # fmt: skip
    assert "recompute none" in run(str(path), "--gpus", "8", "--recompute", "none")


def test_a_plan_has_recomputation_in_the_words_of_its_script(tmp_path):
    path = tmp_path / "flags.txt"
    path.write_text(SCRIPT + "--recompute-activations")
    text = run(str(path), "--gpus", "8")
    assert "recompute core_attn" in text and "recomputation of attention" in text
    assert "--recompute-activations" in text and "--recompute-modules" not in text


def test_a_recomputation_that_never_ends_is_not_chosen(plan_of):
    """Megatron's, of a feed-forward whose linear layers have biases."""
    never = "Megatron's backward never ends where --recompute-modules has mlp"
    wide, selective = "--bf16", " selective "
    assert selective in plan_of(f"{wide} --disable-bias-linear", "--search")
    with_biases = plan_of(wide, "--search")
    assert selective not in with_biases and never not in with_biases
    assert never in plan_of(wide, "--recompute selective")
    assert never not in plan_of(f"{wide} --disable-bias-linear", "--recompute selective")


@pytest.mark.parametrize(
    ("more", "words"), [("", "in fp32, this"), ("--fp16", "in fp16, this"), ("--bf16", "")]
)
def test_a_plan_says_that_it_changes_the_dtype(plan_of, more, words):
    said = plan_of(more)
    assert words in said and ("the script trains in" in said) == bool(words)


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
SELECTIVE = "--recompute-granularity selective "


@pytest.fixture
def plan_of(tmp_path):
    """Plans the script's job with extra arguments and options; writes `plan.json`."""

    def plan(more, options="", code=0):
        path = tmp_path / "flags.txt"
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
         "recompute full in 4 layers of a stage, keep none"),
        (FULL.replace("layers 1", "layers 2"), "--keep all", "recompute full, keep all"),
    ],
)  # fmt: skip
def test_a_script_takes_the_plan_that_was_made_of_it(plan_of, tmp_path, more, options, words):
    assert f"TP 2 CP 4 PP 1 DP 1, {words}" in plan_of(more, options)
    words = shlex.split(SCRIPT + more)
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
        (f"{SELECTIVE}--recompute-modules mlp,moe", "", "separated by spaces"),
    ],
)  # fmt: skip
def test_what_a_script_rules_out_is_said_to_come_from_it(plan_of, more, options, words):
    assert words in " ".join(plan_of(more, options, code=2).split())


def test_sizes_that_make_up_no_job_are_named_as_the_script_has_them(plan_of):
    text = " ".join(plan_of(FULL, "--gpus 6", code=2).split())
    assert "; change --tensor-model-parallel-size in the script, --context-parallel-size" in text
    assert "leave out" not in text
    assert "leave out --tp, or change --context-parallel-size in the script" in " ".join(
        plan_of(FULL, "--gpus 6 --tp 4", code=2).split()
    )


def test_what_is_new_stands_before_what_a_script_has(plan_of):
    text = plan_of(f"{FULL} --attention-dropout 0.0", "--cp 2 --tp 4")
    head = "Flags to add or change, started with -m megatron_burst:"
    new, there = text.split(head)[1].split("Flags that the script has already:")
    assert "--context-parallel-size 2" in new and "--context-parallel-impl burst" in new
    assert "--seq-length" not in new and "--recompute-method uniform" in there
    assert "--attention-dropout" not in new and "--attention-dropout 0" in there


def test_keeping_is_proposed_where_a_script_does_not_speak_of_it(plan_of):
    found = re.search(
        r"\nwith --burst-keep all, a step takes ([\d.]+) s, and the peak is ([\d.]+) GiB\n",
        plan_of(FULL),
    )
    kept = plan_of(FULL, "--keep all")
    assert f"a step takes {found[1]} s" in kept and f" {found[2]} " in kept
    assert "with --burst-keep all," not in kept + plan_of(f"{FULL} --burst-keep none")


def test_attention_adds_up(plan_of):
    text = plan_of(FULL)
    named = ("attention kernels", "recomputation of attention", "waiting for NVLink",
             "waiting for the network")  # fmt: skip
    rows = [re.search(rf"^{name} +([\d.]+) ", text, re.MULTILINE) for name in named]
    (said,) = re.findall(r"predicted gain .* takes ([\d.]+) s of a step", text)
    assert sum(float(row[1]) for row in rows if row) == pytest.approx(float(said), rel=0.01)


def test_a_batch_that_nobody_gave_and_documents_that_are_repeated_are_said(tmp_path):
    lengths, path = tmp_path / "lengths.txt", tmp_path / "flags.txt"
    lengths.write_text("100 200 300")
    path.write_text(SCRIPT.replace("--global-batch-size 8", "") + FULL)
    text = run(str(path), "--gpus", "8", "--cu-seqlens", str(lengths))
    assert "32 sequences of 128K tokens (the default)" in text
    assert "600 tokens in 3 documents, repeated 219 times" in text
    path.write_text(SCRIPT + FULL)
    assert "(the default)" not in run(str(path), "--gpus", "8")
    refused = run(str(path), "--gpus", "8", "--cu-seqlens", "nope.txt", code=2)
    assert "nope.txt must be a readable file" in refused


def test_pictures_name_the_file_without_folders(tmp_path):
    path, lengths = tmp_path / "a-script-with-a-long-name.txt", tmp_path / "lengths.txt"
    path.write_text(SCRIPT + f"{FULL}--sft")
    lengths.write_text("30000 2000 33536")
    job, sample = tmp_path / "job.svg", tmp_path / "sample.svg"
    run(str(path), "--gpus", "8", "--picture", str(job))
    title = (
        "a-script-with-a-long-name.txt 128K, predicted for h200, packed documents, "
        "TP 2 CP 4 PP 1 DP 1: one layer's attention"
    )
    assert title in job.read_text() and "<!-- gather on 1 node x 4 ranks -->" in job.read_text()
    assert re.search(r"<!-- forward: [\d.]+ ms -->", job.read_text())
    path.write_text((SCRIPT + FULL).replace("--seq-length 131072", ""))
    run(str(path), "--gpus", "8", "--cu-seqlens", str(lengths), "--picture", str(sample))
    assert (
        "<!-- a-script-with-a-long-name.txt, h200: a packed sample of 65,536" in sample.read_text()
    )
    assert str(tmp_path) not in job.read_text() + sample.read_text()
