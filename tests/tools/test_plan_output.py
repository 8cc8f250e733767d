"""What `megatron-burst plan` prints, as a user reads it: sums, speed, warnings, exit codes."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

import pytest
from typer.testing import CliRunner

from megatron_burst.tools.hardware import GIB
from megatron_burst.tools.hardware_file import preset
from megatron_burst.tools.job.hugging_face import PRESETS
from megatron_burst.tools.job.search import layouts, search
from megatron_burst.tools.job.strategy import Job
from megatron_burst.tools.main import app
from megatron_burst.tools.plan_notes import warnings_of
from tests.sampling import whole
from tests.tools import planning
from tests.tools.job.configs import (
    GEMMA_3_27B,
    GRANITE_4_H_SMALL,
    LLAMA_3_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    NEMOTRON_3_NANO,
    QWEN_3_NEXT_80B,
)

LLAMA = "llama3-8b --seq-length 256k --gpus 16"
JOB = Job(PRESETS["llama3-8b"], 1 << 18, 16, 8, 16, preset("h200"))
USABLE = JOB.hardware.gpu.usable_bytes


def run(options: str, code: int = 0, **environment: str) -> str:
    return planning.run(*options.split(), code=code, **environment)


@pytest.fixture
def config(tmp_path):
    """Writes a config.json and returns its path."""

    def write(values: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return str(tmp_path / "config.json")

    return write


def memory_of(text: str) -> dict[str, float]:
    """Rows of a GPU's memory table."""
    lines = text.splitlines()
    (head,) = (line for line in lines if "a GPU's memory" in line)
    cells = (line[head.index("a GPU's memory") :] for line in lines[lines.index(head) + 1 :])
    rows = (re.match(r"(\S.*?) +(\d+\.\d+) *$", cell) for cell in cells)
    return {row[1]: float(row[2]) for row in takewhile(bool, rows)}


@pytest.mark.parametrize(
    ("options", "code", "earlier"),
    [
        ("llama3-8b --seq-length 1M --gpus 64", 0, "LM head and loss"),
        ("llama3-8b --seq-length 16k --gpus 8 --cp 8 --recompute full", 0, "a layer in backward"),
        ("llama3-405b --seq-length 1M --gpus 64", 3, "LM head and loss"),
        *whole(("deepseek-v3 --seq-length 128k --gpus 512 --tp 2", 0, "a layer in backward")),
    ],
)
def test_rows_of_memory_add_up_to_the_peak(options, code, earlier):
    """It once printed a peak of 90.5 GiB over rows of 93.0: the head and a layer's backward do not
    peak at the same time."""
    rows = memory_of(run(f"{options} -v", code))
    (peak,) = (gib for name, gib in rows.items() if name.startswith("peak"))
    before = list(rows)[: list(rows).index(next(name for name in rows if name[:4] == "peak"))]
    assert sum(rows[name] for name in before) == pytest.approx(peak, abs=0.005 * len(before))
    later = list(rows)[len(before) + 1 :]
    assert later[:2] == [f"not at the peak: {earlier}", "not at the peak: attention's buffers"]


def test_json_is_written_whatever_becomes_of_the_tables(tmp_path):
    """A pipe's reader may end before the last table: `megatron-burst plan ... | head`."""
    plain = json.loads(run(f"{LLAMA} --json -"))
    assert plain["flags"]["--burst-fused-loss"] is True
    file = tmp_path / "plan.json"
    command = f"-m megatron_burst.tools plan {LLAMA} --json {file}"
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" {command} | true'], capture_output=True, text=True
    )
    assert json.loads(file.read_text()) == plain, done.stderr


def test_speed_and_mfu_are_said_without_a_search():
    time = search(JOB)[0].time
    text = run(LLAMA)
    speed = f"{time.tokens} tokens/s per GPU ({16 * time.tokens_per_gpu:,.0f} on all)"
    assert text.startswith(f"fits: {speed}, MFU {time.mfu:.1%} (")
    assert f"\na step takes {time.seconds:.4g} s: 16 sequences" in text


@pytest.mark.parametrize(("share", "warned"), [(0.91, False), (0.93, True), (1.01, False)])
def test_little_room_is_warned_of(share, warned):
    best = search(JOB, (("cp", 8),))[0]
    more = share * USABLE - best.memory.peak
    memory = replace(best.memory, weights=best.memory.weights + more)
    found = replace(best, memory=memory, share=share, over_gib=max(0.0, share - 1))
    said = warnings_of(JOB, [found], (), {})
    assert [f"{share:.1%} of the usable memory" in one for one in said] == [True] * warned


def test_burst_that_is_not_used_is_said():
    words = "with CP 1 no two ranks share a sequence, so burst attention is not used"
    text = run("llama3-8b --seq-length 16k --gpus 8 --cp 1")
    assert words in text and "--context-parallel-impl" not in text
    assert "--cp 2 or more; --burst-fused-loss of this plan runs without it" in text
    assert words not in run("llama3-8b --seq-length 16k --gpus 8 --cp 2")


def test_pinned_memory_that_a_node_lacks_is_said():
    few = replace(JOB.hardware, node=replace(JOB.hardware.node, memory_gib=64))
    job = replace(JOB, hardware=few)
    found = search(job, (("keep", "all"), ("offload", True), ("cp", 8), ("tp", 1), ("pp", 1)))
    (said,) = (one for one in warnings_of(job, found[-1:], (), {}) if "pinned" in one)
    assert f"needs {found[-1].memory.node / GIB:.0f} GiB of pinned host memory on a node" in said
    assert "80 % of the 64 GiB that 8 GPUs of an h200 node have" in said


@pytest.mark.parametrize("options", ["", "--cp 4", "--tp 2 --pp 2", "--cp 8 --tp 2"])
def test_lengths_that_are_proposed_leave_every_layout(options):
    """1000002, once proposed, is a multiple of 2 but fits no CP above 1."""
    sizes = dict(re.findall(r"--(\w+) (\d+)", options))
    sizes = {name: int(size) for name, size in sizes.items()}
    job = Job(PRESETS["llama3-8b"], 1 << 20, 64, 8, 4, preset("h200"))
    every = len(list(layouts(job, sizes)))
    for length, code in (("1000001", 2), ("1000002", None)):
        done = CliRunner().invoke(
            app, ["plan", "llama3-8b", "--gpus", "64", "--seq-length", length, *options.split()]
        )
        assert code in (None, done.exit_code)
        near = re.search(r"multiple of \d+, such as (\d+) or (\d+)", " ".join(done.output.split()))
        for proposed in map(int, near.groups()):
            assert len(list(layouts(replace(job, seq=proposed), sizes))) == every > 0


def test_a_length_that_leaves_out_layouts_is_warned_of():
    assert "rules out every strategy whose 2 x CP x TP" in run(
        "llama3-8b --seq-length 1000000 --gpus 64"
    )
    assert "warning" not in run("llama3-8b --seq-length 1M --gpus 72 --hardware gb200-nvl72")


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("llama3-70b --seq-length 1M --hardware h100", 8),
        ("llama3-405b --seq-length 1M", 64),
        *whole(("deepseek-v3 --seq-length 1M --tp 8", 64)),
    ],
)
def test_as_many_gpus_as_are_said_do_and_half_of_them_do_not(options, gpus):
    text = run(f"{options} --gpus {gpus}", code=3)
    said = rf"does not fit: (\d+) GPUs would be enough, .*; on {gpus} a GPU lacks [\d.]+ GiB\n"
    enough = int(re.match(said, text)[1])
    assert enough > gpus and f"\n{enough} GPUs (" in text and "\nfits: " in text
    assert text[text.index("fits: ", 9) :] == run(f"{options} --gpus {enough}")
    run(f"{options} --gpus {enough // 2}", code=3)


def test_options_that_keep_a_job_from_fitting_are_named():
    text = run(f"{LLAMA} --tp 1 --cp 1 --pp 1 --recompute none", code=3)
    head, rest = text.split("\n", 1)
    assert head.startswith("does not fit: without --cp --pp --recompute --tp it does, as planned")
    assert rest == run(LLAMA)


def test_models_with_windows_are_planned_by_the_keys_that_queries_see(config):
    path = config(GEMMA_3_27B)
    text = run(f"{path} --seq-length 512k --gpus 64")
    assert "refuses" not in text and "--context-parallel-impl burst" in text
    seconds = float(re.search(r"a step takes ([\d.]+) s", text)[1])
    assert seconds < 60  # far over 120 if all layers saw all keys


def test_a_model_with_windows_in_all_layers_is_planned(config):
    """It once divided by the time of layers without a window."""
    text = run(f"{config(MISTRAL_7B)} --seq-length 128k --gpus 8 --cp 8")
    assert "--window-size 4095,0" in text and "--context-parallel-impl burst" in text
    assert "Megatron's fastest mode" not in text and "attention of a layer" not in text


@pytest.mark.parametrize("words", ["", "--for bridge"])
def test_towers_are_named_as_not_counted(words, config):
    """With --for, which prints no model flags, nothing once told of them."""
    path = config(GEMMA_3_27B | {"vision_config": {"depth": 27}})
    text = run(f"{path} --seq-length 128k --gpus 64 {words}")
    (line,) = (line for line in text.splitlines() if line.startswith("warning: only the language"))
    assert "time and memory of vision_config" in line


@pytest.mark.parametrize(
    ("published", "flag"),
    [
        (QWEN_3_NEXT_80B, "--linear-attention-freq 4"),
        (NEMOTRON_3_NANO, "--hybrid-layer-pattern 'MEMEM*E"),
        (GRANITE_4_H_SMALL, ""),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_model_with_linear_attention_is_planned(published, flag, config):
    text = run(f"{config(published)} --seq-length 128k --gpus 32 --tp 1 --cp 8 --pp 1")
    assert "linear attention" in text and "a layer with softmax attention" in text
    assert re.search("^MFU's error is not known: the time of linear attention", text, re.MULTILINE)
    assert ("--num-layers" in text) == bool(flag) and flag in text
    assert ("pretrain_hybrid.py" in text) == ("--hybrid-layer-pattern" in flag)
    assert "refuses" not in text and "--context-parallel-impl burst" in text


def test_flags_of_a_model_that_is_not_understood_are_not_printed(config, tmp_path):
    plan = tmp_path / "plan.json"
    options = f"--seq-length 128k --gpus 8 --json {plan}"
    text = run(f"{config(LLAMA_3_8B | {'brand_new_attention': 'yes'})} {options}")
    (line,) = (line for line in text.splitlines() if line.startswith("no model flags: "))
    assert "brand_new_attention yes" in line and "Megatron Bridge" in line
    assert "Llama" not in line  # experts and latent attention are counted as what they are
    assert "--num-layers" not in text and "--seq-length 131072" in text
    written = json.loads(plan.read_text())
    assert written["model_flags"] is None
    assert written["job"]["model"]["unknown"] == ["brand_new_attention yes"]


def test_a_plan_of_a_config_prints_the_models_flags(config, tmp_path):
    text = run(f"{config(MIXTRAL_8X7B)} --seq-length 64k --gpus 32")
    for wanted in (
        "--num-layers 32", "--num-query-groups 8", "--num-experts 8", "--moe-router-topk 2",
        "--swiglu", "--rotary-base 1000000", "--vocab-size 32000",
    ):  # fmt: skip
        assert wanted in text
    assert "--moe-token-dispatcher-type alltoall" in text and "warning" not in text
    words = re.findall(r"^ *(--.*?)(?: \\)?$", text[text.index("Flags of") :], re.MULTILINE)
    own = tmp_path / "flags.txt"
    own.write_text("\n".join(words))
    again = run(f"{own} --gpus 32")  # its flags are in the file, and are not printed again
    assert "Flags of the model" not in again and "Flags to add" in again
    assert re.search(r"fits: .*", again)[0] == re.search(r"fits: .*", text)[0]


def test_the_batch_of_a_file_counts(tmp_path):
    path = tmp_path / "flags.txt"
    sizes = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 32000"
    path.write_text(f"{sizes} --seq-length 65536 --global-batch-size 24")
    job = f"{path} --gpus 8 --cp 4"
    assert " s: 24 sequences of 64K tokens, " in run(job)
    assert " s: 8 sequences of 64K tokens, " in run(f"{job} --global-batch-size 8")


def test_progress_is_shown_on_terminals_only():
    def shown(**environment):
        done = CliRunner().invoke(
            app, ["plan", *LLAMA.split(), "--keep", "none"], env=environment | {"COLUMNS": "200"}
        )
        return done.stderr, done.stdout

    assert "comparing strategies" in shown(FORCE_COLOR="1")[0]
    search.cache_clear()
    quiet, text = shown()
    assert quiet == "" and "comparing strategies" not in text


def at_a_terminal(command: list[str]) -> tuple[str, str]:
    """Standard output, and what a terminal at standard error gets."""
    ours, theirs = pty.openpty()
    there = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=there) as process:
        os.close(theirs)
        out = process.stdout.read().decode()
        shown = b""
        with suppress(OSError):  # the terminal's other end is closed
            while piece := os.read(ours, 1 << 16):
                shown += piece
    assert process.returncode == 0
    return out, shown.decode()


@pytest.mark.whole
def test_what_takes_long_is_shown_on_a_terminal_only(tmp_path):
    command = [sys.executable, "-m", "megatron_burst.tools", "plan", *LLAMA.split()]
    command += ["--picture", str(tmp_path / "p.png")]
    out, shown = at_a_terminal(command)
    assert all(
        words in shown for words in ("comparing strategies", "comparing recomputation", "drawing")
    )
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "drawing" not in out and "drawing" not in piped.stdout and not piped.stderr
