"""`megatron-burst plan`: tables, flags, JSON round trip, pictures, refusals."""

import json
import re
from pathlib import Path

import pytest

from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.flags import as_json, as_words, flag_values
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.job.peer import GAIN_ERROR
from megatron_burst.tools.job.search import search
from megatron_burst.tools.job.strategy import Job, Strategy
from tests.tools.planning import run

PICTURE = str(Path(__file__).parents[2] / "docs" / "accuracy.png")
JOB_OF_16 = Job(PRESETS["llama3-8b"], 1 << 18, 16, 8, 16, preset("h200"))
JOB = Job(PRESETS["llama3-8b"], 1 << 18, 16, 8, 8, preset("h200"))


def megatron_flags(*of):
    return as_words(flag_values(*of))


def test_a_search_prints_the_best_the_others_and_flags():
    text = run("llama3-8b", "--seq-length", "256k", "--gpus", "16", "--cp", "8", "--search")
    assert "16 sequences of 256K tokens (the default), llama3-8b (8.03 B weights)" in text
    head, *rows = text.split("the best of each kind:\n")[1].splitlines()[:13]
    assert head.split()[:6] == ["TP", "CP", "PP", "DP", "recompute", "keep"]
    kinds = [tuple(row.split()[:6]) for row in rows if row.strip()]
    assert 4 < len(kinds) == len(set(kinds)) and kinds[0][1] == "8"
    assert "--context-parallel-impl burst" in text and "--seq-length 262144" in text


def test_without_search_the_best_is_shown_with_its_reason():
    options = "llama3-8b", "--seq-length", "256k", "--gpus", "16"
    alone, searched = run(*options), run(*options, "--search")
    best = search(JOB_OF_16)[0]
    assert f"{best.strategy.layout}, {best.strategy.policy}" in alone
    assert re.search(
        r"fastest of \d+ that leave 8% of memory; next: TP .*% slower \(--search\)", alone
    )
    assert "most of it" not in alone and "most of it" in searched
    assert (
        alone[alone.index("Flags of the run") :] == searched[searched.index("Flags of the run") :]
    )
    assert "the only strategy" in run(
        *options, "--tp", "2", "--cp", "8", "--pp", "1", "--recompute", "none"
    )


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ("64", None),
        ("36", None),
        ("144", None),
        ("128", "64 GPUs on each of 2 nodes and leaves 8 idle on each; start 64 ranks on each"),
        ("256", "so the plan uses 64 GPUs on each of 4 nodes"),
    ],
)
def test_a_part_of_racks_is_planned(gpus, words):
    text = run(
        "llama3-8b", "--seq-length", "256k", "--gpus", gpus,
        "--hardware", "gb200-nvl72", "--keep", "all",
    )  # fmt: skip
    flat = " ".join(text.split())
    assert ("warning" in text) == (words is not None) and (words or "") in flat
    if gpus == "128":
        assert "on nodes of 72 and 56 would be a flat ring" in flat
        assert "would send 127 shards between nodes instead of 1" in flat
    assert "flat ring of" not in text and "fastest of" in text


@pytest.mark.whole
def test_sixteen_thousand_gpus_are_planned():
    text = run(
        "llama3-405b", "--seq-length", "1M", "--gpus", "16k", "--hardware", "h100",
        "--search", "--tp", "8",
    )  # fmt: skip
    assert "16384 GPUs" in text and "--tensor-model-parallel-size 8" in text


def test_one_strategy_that_does_not_fit_says_by_how_much():
    job = ("llama3-70b", "--seq-length", "1M", "--gpus", "8", "--hardware", "h100")
    text = run(*job, "--tp", "8", "--pp", "1", "--cp", "1", "--dp", "1", code=3)
    assert re.match("does not fit: .* a GPU lacks", text) and "of 76.1 usable" in text


def test_a_written_plan_has_what_was_asked(tmp_path):
    path = tmp_path / "plan.json"
    run(
        "llama3-8b", "--seq-length", "256k", "--gpus", "16", "--tp", "2", "--dp", "2",
        "--keep", "all", "--offload", "--json", str(path),
    )  # fmt: skip
    plan = json.loads(path.read_text())
    flags, strategy = plan["flags"], plan["best"]["strategy"]
    assert (strategy["tp"], strategy["cp"], strategy["keep"]) == (2, 4, "all")
    assert flags["--seq-length"] == plan["job"]["seq"] == 1 << 18
    assert flags["--burst-keep-offload"] == "results" and flags["--burst-keep"] == "all"
    assert plan["job"]["gpus"] == 16


def test_keep_auto_is_shown_as_a_run_will_choose(tmp_path):
    path, picture = tmp_path / "plan.json", tmp_path / "frontier.png"
    text = run(
        *"qwen3-8b --seq-length 64k --gpus 8 --dp 8 --keep auto --keep-budget-gib 12".split(),
        "--json", str(path), "--frontier", str(picture),
    )  # fmt: skip
    assert "--burst-keep auto chooses within 12.00 GiB (given)" in text
    plan = json.loads(path.read_text())
    strategy = plan["best"]["strategy"]
    placed = dict(strategy["placed"]) | {"all of a layer": dict(device=strategy["whole"], host=0)}
    assert len(placed) == 5 == len(plan["kept"]) and strategy["whole"]
    for row in plan["kept"]:
        assert placed[row["name"]] == {"device": row["device"], "host": row["host"]}
        line = next(line for line in text.splitlines() if line.startswith(f"{row['name']} "))
        assert line.split()[-5:] == [
            str(row["device"]), str(row["host"]), f"{row['device_gib']:.2f}",
            f"{row['host_gib']:.2f}", f"{row['saved_ms']:.1f}",
        ]  # fmt: skip
    flags = plan["flags"]
    assert flags["--burst-keep"] == "auto" and flags["--burst-keep-budget-gib"] == 12
    assert "--burst-tune" not in flags  # a limit of host memory would be another choice
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_gathering_inside_nodes_is_shown_with_both_links():
    text = run(
        "llama3-8b",
        "--seq-length",
        "256k",
        "--gpus",
        "16",
        "--cp",
        "16",
        "--keep",
        "all",
        "--verbose",
    )
    assert "gather inside nodes, ring between them, on 2 nodes x 8 ranks" in text
    (second,) = (line for line in text.splitlines() if line.startswith("node 1 "))
    assert second.split() == ["node", "1", *map(str, range(8, 16))]
    lines = [line for line in text.splitlines() if "a rank sends" in line]
    assert len(lines) == 2 and all("NVLink" in line and "network" in line for line in lines)


def test_keeping_half_says_whether_rows_are_resharded_between_nodes():
    options = "llama3-8b --gpus 16 --cp 16 --keep half --seq-length".split()
    said = {"64k": " ".join(run(*options, "64k").split())}
    assert "keep half: plain (not resharded: rows would go between nodes" in said["64k"]


def test_a_way_that_a_strategy_fixes_is_among_its_flags():
    flags = megatron_flags(JOB, Strategy(cp=16, intra="ring"))
    assert "--burst-intra ring" in flags
    assert not any("--burst-intra" in flag for flag in megatron_flags(JOB, Strategy(cp=16)))


def test_json_of_a_search_has_all_that_was_asked():
    found = search(JOB)
    written = json.loads(as_json(JOB, found))
    flags = megatron_flags(JOB, found[0].strategy, found[0].memory.node)
    assert as_words(written["flags"]) == flags
    assert as_words(written["model_flags"]) == as_words(model_flags(JOB.model))
    assert written["rates"].keys() == {"matmul_tflops", "attention_tflops", "host_gbs"}
    assert len(written["others"]) == 49 and written["job"]["model"]["layers"] == 32
    assert sum(written["best"]["parts_s"].values()) == pytest.approx(written["best"]["step_s"])


@pytest.mark.parametrize(("cp", "keep"), [("8", "none"), ("16", "all")])
def test_pictures_are_drawn(cp, keep, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    run(
        "llama3-8b", "--seq-length", "256k", "--gpus", cp, "--cp", cp, "--keep", keep,
        "--picture", str(path),
    )  # fmt: skip
    text = path.read_text()
    lanes = text.count("<path")
    assert lanes > 8 * int(cp)  # at least kernels, transfers and merges of each rank, twice


def test_sizes_come_from_a_file_of_megatron_arguments(tmp_path):
    path = tmp_path / "flags.txt"
    path.write_text(
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 4096 "
        "--vocab-size 32000 --seq-length 65536 --context-parallel-size 2 "
        "--tensor-model-parallel-size 2"
    )
    text = run(str(path), "--gpus", "4")
    assert "TP 2 CP 2 PP 1 DP 1" in text and "64K tokens" in text
    assert "TP 4 CP 1" in run(str(path), "--gpus", "4", "--tp", "4", "--cp", "1")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--seq-length", "1MB"], "--seq-length must be a positive whole number"),
        (["--seq-length", ""], "--seq-length must be given"),
        (["--gpus", "x"], "--gpus must be a positive whole number"),
        (["llama9"], "MODEL must be a preset or a file"),
        (["llama9", "--seq-length", ""], "MODEL must be a preset or a file"),
        (
            [PICTURE],
            "accuracy.png must be a text file, because .*got a binary file; name",
        ),
        (["--hardware", "h300"], "did you mean"),
        (["--gpus", "12", "--gpus-per-node", "8"], "--gpus must be a multiple of --gpus-per-node"),
        (
            ["--gpus", "73", "--hardware", "gb200-nvl72"],
            "must spread evenly.*multiple of 72, such as 72 or 144",
        ),
        (["--tp", "3"], "and tp 3 (TP 3 does not divide the 8 GPUs of a node); leave out --tp"),
        (["--tp", "16"], "TP 16 does not divide the 8 GPUs of a node); leave out --tp"),
        (["--cp", "6"], "CP 6 does not divide the 16 GPUs of the job); leave out --cp"),
        (["--pp", "32"], "PP 32 does not divide the 16 GPUs of the job); leave out --pp"),
        (["--dp", "32"], "DP 32 does not divide the batch of 16); leave out --dp"),
        (["--ep", "4"], "EP 4 needs experts, and llama3-8b has none); leave out --ep"),
        (["deepseek-v3", "--ep", "3"], "EP 3 does not divide 256 experts); leave out --ep"),
        (
            ["--tp", "4", "--cp", "8", "--ep", "1"],
            "(CP 8 x TP 4 does not divide the 16 GPUs of the job); leave out --cp or --ep or --tp",
        ),
        (
            ["--tp", "16", "--cp", "1", "--pp", "1", "--dp", "1"],
            "(TP 16 does not divide the 8 GPUs of a node); leave out --cp or --dp or --pp or --tp",
        ),
        (
            ["--tp", "2", "--cp", "4", "--pp", "1", "--dp", "1"],
            "(TP 2 CP 4 PP 1 DP 1 needs 8 GPUs, not 16); leave",
        ),
        (["--recompute", "none", "--keep", "all"], "--keep must come with --recompute full"),
        (["--keep", "all", "--keep-budget-gib", "4"], "--keep-budget-gib must come with --keep"),
        (["--keep", "auto", "--offload"], "--offload must not come with --keep auto"),
        (["--frontier", "x.txt"], "--frontier must end in"),
        (["--offload-inputs", "--recompute", "none"], "--offload-inputs must come with"),
        (["--search", "--offload", "--keep", "none"], "--offload must come with --keep"),
        (["--search", "--recompute", "none", "--keep", "all"], "--keep must come with"),
        (
            ["--search", "--keep", "half", "--cp", "1"],
            "got 16 GPUs, 32/8 heads, 262144 tokens, a batch of 16 and cp 1, keep half; leave out",
        ),
        (["--seq-length", "9" * 400], "--seq-length must be a positive whole number"),
        (["--seq-length", "1025G"], "positive whole number up to 1024G"),
        (["--json", "x.svg", "--picture", "x.svg"], "a file of its own"),
        (["--picture", "x.txt"], "--picture must end in"),
        (
            ["--json", "/nowhere/at/all.json"],
            "--json must name a writable file.*folder is not there",
        ),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options, match):
    model = [] if options[:1] and not options[0].startswith("--") else ["llama3-8b"]
    given = {"--seq-length": "256k", "--gpus": "16"}
    names = [word for word in options if word.startswith("--")]
    kept = [word for name, value in given.items() if name not in names for word in (name, value)]
    text = run(*model, *kept, *options, code=2)
    assert text.count("error: ") == 1
    assert re.search(match.replace("(", r"\(").replace(")", r"\)"), text.replace("\n", " "))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_file_that_cannot_be_written_is_said_in_a_sentence(option, tmp_path):
    path = tmp_path / "full.png"
    path.symlink_to("/dev/full")
    text = run("llama3-8b", "--seq-length", "256k", "--gpus", "8", option, str(path), code=2)
    assert f"plan: {option} must name a writable file" in text


def test_the_gain_over_megatrons_fastest_mode_has_its_error():
    said = (
        r"predicted gain over Megatron's fastest mode \((\S+)\): attention takes ([\d.]+) s of a "
        r"step instead of ([\d.]+), ([\d.]+) times as fast \((.*)\)"
    )
    job = "llama3-8b", "--seq-length", "256k", "--gpus"
    one = re.search(said, run(*job, "8", "--cp", "8", "--keep", "all"))
    mode, ours, theirs, ratio, error = one.groups()
    assert mode == "p2p" and float(theirs) / float(ours) == pytest.approx(float(ratio), abs=0.006)
    assert f"within {GAIN_ERROR:.0%}" in error and ("maybe none" in error) == (
        float(ratio) < 1 + GAIN_ERROR
    )
    between = re.search(said, run(*job, "16", "--cp", "16"))
    assert between[1] == "a2a+p2p" and "two emulated nodes 20% too high" in between[5]
    assert "predicted gain" not in run(
        "llama3-8b", "--seq-length", "32k", "--gpus", "8", "--cp", "1"
    )


def test_no_gain_is_told_over_a_ring_that_cannot_run_the_model():
    """TransformerEngine's ring has no attention sinks."""
    text = run("gpt-oss-20b", "--seq-length", "64k", "--gpus", "8", "--cp", "8")
    assert "it has no attention sinks" in text and "predicted gain" not in text
    text = run("gemma-3-27b", "--seq-length", "128k", "--gpus", "64", "--cp", "8")
    assert "attention without a window takes" in text


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ("--recompute selective", "the feed-forward of each layer\n"),
        ("--recompute full --keep none", "every layer\n"),
        ("--keep all --offload", "but attention; its results wait in host memory\n"),
        (
            "--keep half --offload-inputs",
            "later half; layers' inputs wait in host memory\n",
        ),
        ("--keep auto", "but what the table of --burst-keep auto below keeps\n"),
    ],
)
def test_what_a_policys_words_mean_is_told(options, meant):
    text = run(*f"llama3-8b --seq-length 64k --gpus 8 --cp 4 {options}".split())
    assert re.search(f"\nbackward recomputes .*{meant}", text)


def test_without_recomputation_nothing_is_computed_again():
    text = run(*"llama3-8b --seq-length 64k --gpus 8 --cp 4 --recompute none".split())
    assert "backward recomputes" not in text
