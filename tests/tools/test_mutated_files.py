"""Whatever is in a file: each command that reads it ends, soon and without a bare exception.

Guards against files of another kind, cut off, of other types, too deep, with numbers or names
without end, and with what a terminal would obey.
"""

import json
import signal
import struct
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from megatron_burst.balance import Costs
from megatron_burst.errors import BurstError
from megatron_burst.files import harmless
from megatron_burst.mcore import plan_file
from megatron_burst.mcore.launch import with_flags
from megatron_burst.mcore.plan_file import check_plan, own_flags
from megatron_burst.tools.hardware import Calibration, KernelRow, LinkRow
from megatron_burst.tools.hardware_file import preset, preset_text, to_toml
from megatron_burst.tools.job.candidate import candidate
from megatron_burst.tools.job.flags import as_json
from megatron_burst.tools.job.model_file import model_of
from megatron_burst.tools.job.script import arguments_in, given, read_script
from megatron_burst.tools.job.strategy import Job, Strategy
from megatron_burst.tools.lengths import lengths_in
from megatron_burst.tools.main import app
from megatron_burst.tools.plan_flags import Shown
from megatron_burst.tools.plan_notes import warnings_of
from megatron_burst.tools.plan_table import show
from tests.mcore.test_plan_file import FLAGS, megatron_arguments
from tests.tools import planning
from tests.tools.doctor.test_explain import ring_of_deaths
from tests.tools.job import configs
from tests.tools.mutations import mutated, placed

SECONDS = 2.0  # that none may take
_JOB = "--gpus 4 --seq-length 16k --tp 1 --cp 4 --pp 1 --recompute full --keep none".split()
_SMALL = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 2, "vocab_size": 512,
          "ffn_hidden_size": 512, "swiglu": True, "bf16": True, "seq_length": 16384}  # fmt: skip
_SCRIPT = {
    **_SMALL, "group_query_attention": True, "num_query_groups": 1, "kv_channels": 128,
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128,
    "moe_layer_freq": "([0]*1+[1]*3)", "window_size": "127,0", "window_attn_skip_freq": 2,
    "context_parallel_size": 4, "global_batch_size": 4, "recompute_granularity": "selective",
    "recompute_modules": "core_attn mlp", "burst_keep": "all", "mtp_num_layers": 1,
}  # fmt: skip
_CALIBRATION = Calibration(
    "ours", "NVIDIA H200", 139.8, 690.0,
    tuple(KernelRow("fa4", way, 128, seq, 550.0) for way in ("forward", "backward")
          for seq in (2048, 8192)),
    tuple(LinkRow(kind, size << 20, 300.0, 9.5) for kind in ("intra", "inter", "host")
          for size in (1, 64)),
)  # fmt: skip


def check_harmless(text: str) -> None:
    """Nothing that a terminal obeys, and no text without end."""
    strange = {char for char in text if not char.isprintable() and char != "\n"}
    assert not strange, strange
    assert len(text) < 20_000


def command(*words: object) -> int:
    """Run it in this process; what it prints must be harmless and, if it is refused, an error."""
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2, 3)
    check_harmless(done.output)
    assert done.exit_code != 2 or "error: " in done.output
    return done.exit_code


def of_model(path: Path) -> int:
    """What `plan` does for one strategy; a search, also for more GPUs, would take longer."""
    asked = {"tp": 1, "cp": 4, "pp": 1, "recompute": "full", "keep": "none"}
    described, in_file = model_of(str(path)), arguments_in(str(path))
    script = read_script(in_file, asked)
    strategy = Strategy(**dict(given(script, asked)))
    job = Job(described, 16384, 4, 4, 4, preset("h200"))
    found = [candidate(job, strategy)]
    warnings = [*script.notes, *warnings_of(job, found, (), in_file)]
    with redirect_stdout(StringIO()) as printed:
        show(Shown(job, found, script, in_file, warnings, "", True, True, "", "", True, None))
    check_harmless(printed.getvalue() + as_json(job, found, script.flags))
    return 0


def of_machine(path: Path) -> int:
    return command("plan", "qwen3-0.6b", *_JOB, "--hardware", path)


def of_documents(path: Path) -> int:
    return command("plan", "qwen3-0.6b", "--gpus", 2, "--cu-seqlens", path)


def of_lengths(path: Path) -> int:
    """With a draw of a step's documents; to compare assignments of them would take longer."""
    assert len(lengths_in(path).of_step(16384, 4, 32, seed=0)) > 0
    return 0


def of_run(path: Path) -> int:
    """As a training process reads a plan: with the parser's own words for a wrong value."""
    parser = with_flags(megatron_arguments, ArgumentParser(), lambda args: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_file, "log_message_once", check_harmless)
        args = parser.parse_args(["--burst-plan", str(path)])
    check_plan(args)
    own_flags(path)
    return 0


def of_faults(path: Path) -> int:
    return command("doctor", "--explain", path.parent)


def of_cache(path: Path) -> int:
    """The commit that a cache of Hugging Face's names as a model's."""
    home = path.parent / "hub"
    place = home / "models--a--b"
    for folder in (place / "refs", place / "snapshots" / "c0ffee"):
        folder.mkdir(parents=True, exist_ok=True)
    (place / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(configs.QWEN_3_8B))
    (reference := place / "refs" / "main").exists() and reference.unlink()
    path.rename(reference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(home))
        return command("plan", "hf:a/b", *_JOB)


def _npy() -> bytes:
    np.save(file := BytesIO(), np.array([0, 4096, 6144, 8192]))
    return file.getvalue()


def _pt() -> bytes:
    torch.save(torch.tensor([0, 4096, 6144, 8192]), file := BytesIO())
    return file.getvalue()


def _idx() -> bytes:
    """Megatron's index of four documents of five sequences."""
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 5)
    lengths = np.array([700, 10, 20, 5000, 12], "<i4").tobytes()
    firsts = np.array([0, 1, 3, 4, 5], "<i8").tobytes()
    return head + lengths + np.arange(5, dtype="<i8").tobytes() + firsts


def _plan() -> bytes:
    """A plan whose flags are those of a small parser."""
    found = json.loads(planning.run("qwen3-0.6b", *_JOB, "--json", "-"))
    return _text(found | {"flags": FLAGS})


def _flags() -> bytes:
    lines = (f"--{name.replace('_', '-')} {value}" for name, value in _SCRIPT.items())
    return "\n".join(lines).encode()


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def of_costs(path: Path) -> int:
    Costs.from_plan(path)
    return 0


KINDS: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], int]]] = {
    "dense": ("config.json", lambda: _text(configs.LLAMA_3_1_8B), of_model),
    "latent": ("config.json", lambda: _text(configs.DEEPSEEK_V3), of_model),
    "windows": ("config.json", lambda: _text(configs.GPT_OSS_20B), of_model),
    "delta": ("config.json", lambda: _text(configs.QWEN_3_5_35B), of_model),
    "hybrid": ("config.json", lambda: _text(configs.NEMOTRON_3_NANO), of_model),
    "dumped": ("args.json", lambda: _text({"megatron_arguments": _SCRIPT}), of_model),
    "flags": ("flags.txt", _flags, of_model),
    "commit": ("main", lambda: b"c0ffee\n", of_cache),
    "hardware": ("ours.toml", lambda: preset_text("h200").encode(), of_machine),
    "calibration": ("ours.toml", lambda: to_toml(_CALIBRATION).encode(), of_machine),
    "plan": ("plan.json", _plan, of_run),
    "costs": ("plan.json", _plan, of_costs),
    "faults": (
        "rank-1.jsonl",
        lambda: "\n".join(map(json.dumps, ring_of_deaths(13))).encode(),
        of_faults,
    ),
    "documents": ("a.txt", lambda: b"0, 4096, 6144\n8192", of_documents),
    "npy": ("a.npy", _npy, of_documents),
    "pt": ("a.pt", _pt, of_documents),
    "histogram": (
        "a.csv",
        lambda: b"shortest,longest,documents\n0,99,5\n100,999,60\n1000,9999,30\n",
        of_lengths,
    ),
    "lengths": ("a.jsonl", lambda: b'700\n{"id": 1, "length": 30}\n30\n5000\n', of_lengths),
    "index": ("a.idx", _idx, of_lengths),
}


def faults_of(kind: str, seeds, folder: Path) -> tuple[Counter, dict[str, int]]:
    """How mutations of a file end, and the first seed of each that is a fault."""
    name, valid, read = KINDS[kind]
    content, ends, faults = valid(), Counter(), {}
    for seed in seeds:
        (inside := folder / f"{kind}-{seed}").mkdir()
        path = placed(mutated(content, crc32(f"{kind} {seed}".encode())), inside / name)
        begin, end = time.process_time(), "read"
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * SECONDS)
        try:
            end = "refused" if read(path) == 2 else "read"
        except BurstError as error:
            end = "refused"
            try:
                check_harmless(harmless(str(error)))
            except AssertionError as wrong:
                faults.setdefault(end := str(wrong), seed)
        except BaseException as error:
            end = f"{type(error).__name__}: {str(error)[:90]}"
            faults.setdefault(end, seed)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if (took := time.process_time() - begin) > SECONDS:
            faults.setdefault("slow", seed)
            ends["slow"] += 1
        ends[end] += 1
        ends["ms"] += round(1000 * took)
    return ends, faults


@pytest.fixture
def limited():
    """Ends what takes too long."""

    def end(*_):
        raise TimeoutError(f"{2 * SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, end)
    yield
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused(kind, draw, tmp_path, limited):
    name, valid, read = KINDS[kind]
    assert read(placed(valid(), tmp_path / name)) < 2
    ends, faults = faults_of(kind, draw(range(1000), 50), tmp_path)
    assert not faults, (faults, ends)
    assert ends["refused"] + ends["read"] == sum(
        count for end, count in ends.items() if end != "ms"
    )


if __name__ == "__main__":  # python -m tests.tools.test_mutated_files FOLDER COUNT KIND...
    signal.signal(signal.SIGVTALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("slow")))
    for each in sys.argv[3:] or KINDS:
        found, wrong = faults_of(each, range(int(sys.argv[2])), Path(sys.argv[1]))
        print(each, dict(found), wrong, sep="\n  ", flush=True)
