"""Launch scripts: they parse, and every flag in them exists. Guards against renamed flags."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

from megatron_burst.errors import BurstError
from megatron_burst.mcore.launch import with_flags
from megatron_burst.mcore.plan_file import check_plan
from megatron_burst.tools.job.flags import as_words
from megatron_burst.tools.job.hugging_face import PRESETS, from_hugging_face
from megatron_burst.tools.job.model_flags import model_flags
from megatron_burst.tools.main import app
from tests.tools.job.configs import GEMMA_3_27B, GPT_OSS_20B, PRINTED

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")])
MODEL = EXAMPLES / "torchrun" / "llama3_8b.sh"


def flags_in(text):
    return set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", text))


def code_of(path):
    return "\n".join(x for x in path.read_text().splitlines() if not x.lstrip().startswith("#"))


def options(parser):
    return set(parser._option_string_actions)


def megatrons_parser():
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(conflict_handler="resolve")
    return with_flags(add_megatron_arguments, parser, lambda args: None)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def expanded(**variables):
    """The flags that the scripts pass on to 64 GPUs, as bash expands them."""
    command = f"source {shlex.quote(str(MODEL))}; printf '%s\\n' \"${{ALL_FLAGS[@]}}\""
    done = subprocess.run(
        ["bash", "-euc", command], env={"PATH": "/usr/bin:/bin", "WORLD": "64"} | variables,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize("variables", [{}, {"DATA_PATH": "data", "TOKENIZER": "tokenizer"}])
def test_megatron_and_burst_take_the_flags(variables):
    args = megatrons_parser().parse_args(expanded(**variables))
    assert args.context_parallel_impl == "burst" and args.seq_length == 2**20
    assert (args.context_parallel_size, args.burst_plan) == (64, None)


def test_megatron_takes_the_flags_of_every_model():
    """What plan prints for a model, with windows in the layers where Megatron then has them."""
    from megatron.core.transformer.utils import is_layer_window_attention

    parser = megatrons_parser()
    printed = (config for config, _ in PRINTED.values())
    described = [from_hugging_face(c, "x") for c in (GEMMA_3_27B, GPT_OSS_20B, *printed)]
    for model in (*PRESETS.values(), *described):
        args = parser.parse_args(shlex.split(" ".join(as_words(model_flags(model)))))
        assert (args.num_layers, args.vocab_size) == (model.layers, model.vocab)
        windows = model.windows.layers if model.windows else (False,) * model.layers
        asked = args.window_size, args.window_attn_skip_freq
        found = [is_layer_window_attention(*asked, n) for n in range(1, model.layers + 1)]
        assert tuple(map(bool, found)) == windows
        assert not model.windows or args.window_size == (model.windows.size - 1, 0)
        assert (args.softmax_type == "learnable") == model.sinks


def test_megatron_takes_the_flags_of_each_sharding():
    from megatron_burst.tools.job.flags import SHARDING

    parser = megatrons_parser()
    for kind, flags in SHARDING.items():
        args = parser.parse_args(shlex.split(" ".join(as_words(flags))))
        assert (args.use_torch_fsdp2, args.use_megatron_fsdp, args.use_distributed_optimizer) == (
            kind == "torch", kind == "megatron", kind == "none",
        )  # fmt: skip


def test_the_check_above_can_fail(capsys):
    with pytest.raises(SystemExit):
        megatrons_parser().parse_args([*expanded(), "--burst-plann", "x"])
    assert "--burst-plann" in capsys.readouterr().err


def test_flags_of_the_launchers_exist():
    doctor = {o for p in get_command(app).commands["doctor"].params for o in p.opts}
    srun = {"--ntasks", "--ntasks-per-node", "--kill-on-bad-exit"}
    for path in SCRIPTS:
        if path == MODEL or path.name == "quiet.sh":  # which takes no flags
            continue
        known = options(get_args_parser()) | doctor | (srun if path.suffix == ".sbatch" else set())
        if path.name in ("packed.sh", "burstengine.sh"):  # they train without llama3_8b.sh
            known |= options(megatrons_parser())
            for script in ("pretrain_gpt.py", "data.py"):
                known |= flags_in((EXAMPLES / script).read_text())
        assert flags_in(code_of(path)) and flags_in(code_of(path)) <= known, path


BURST_ENGINE = EXAMPLES / "torchrun" / "burstengine.sh"


def burst_engine(**variables):
    """What the script of BurstEngine's tables does, with these variables set."""
    environment = {name: x for name, x in os.environ.items() if name != "MEGATRON"}
    return subprocess.run(
        ["bash", str(BURST_ENGINE)], env=environment | variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("sharding", ["fsdp2", "optimizer"])
@pytest.mark.parametrize("model", ["7b", "14b"])
def test_burst_engines_models_have_the_sizes_of_the_planners(model, sharding):
    """Those of their sweep: two of the four rows; nothing that burst refuses."""
    rows = {"7b": ("4M", 64), "14b": ("1M", 32)}
    length, ranks = rows[model]
    variables = {"MODEL": model, "SHARDING": sharding, "SEQ_LENGTH": length, "KEEP": "half"}
    variables |= {"PYTHON": "echo", "MEGATRON": "there", "NODES": f"{ranks // 8}"}
    words = burst_engine(**variables).stdout.split()
    args = megatrons_parser().parse_args(words[words.index("there/pretrain_gpt.py") + 1 :])
    preset = PRESETS[f"burstengine-{model}"]
    sizes = args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_attention_heads
    assert sizes == (preset.layers, preset.hidden, preset.ffn, preset.heads_q)
    assert preset.heads_q == preset.heads_kv and not args.group_query_attention
    assert args.vocab_size + 1 == preset.vocab  # the tokenizer adds a token
    assert args.seq_length == int(length[0]) << 20 and args.context_parallel_size == ranks
    assert (args.use_torch_fsdp2, args.use_distributed_optimizer) == (
        sharding == "fsdp2", sharding == "optimizer",
    )  # fmt: skip
    assert args.context_parallel_impl == "burst" and args.burst_keep == "half"
    assert args.burst_fused_loss
    if sharding == "fsdp2":  # with this flag its gradient norms are wrong, also without burst
        assert not args.calculate_per_token_loss
    assert "got 3b" in burst_engine(MODEL="3b", MEGATRON="there").stderr


@pytest.mark.whole
@pytest.mark.parametrize("sharding", ["fsdp2", "optimizer"])
def test_burst_engines_script_trains_on_processes(sharding):
    tiny = {"TINY": "1", "PYTHON": sys.executable, "STEPS": "2", "MASTER_PORT": "29617"}
    done = burst_engine(**tiny, SHARDING=sharding)
    losses = re.findall(r"lm loss: (\S+)", done.stdout)
    assert done.returncode == 0 and len(losses) == 2, done.stderr
    assert all(abs(float(loss) - 5.55) < 0.1 for loss in losses)  # log 256: labels are random


def test_the_image_has_the_versions_of_the_project():
    """Its base has the torch of constraints.txt, and needs no --build-arg."""
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    text = code_of(EXAMPLES / "docker" / "Dockerfile")
    (torch,) = re.findall(r"^ARG BASE_IMAGE=[\w/]+:([\d.]+)-cuda", text, re.MULTILINE)
    assert "FROM ${BASE_IMAGE}" in text and f"torch=={torch}" in pins
    named = set(re.findall(r"[\w-]+==[\w.]+", text))
    assert named and named <= pins


def test_the_image_gets_the_files_that_its_commands_name():
    text = code_of(EXAMPLES / "docker" / "Dockerfile")
    copied = {
        name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()
    }
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "setup.py", "README.md", *project["license-files"]} <= copied
    ran = set(re.findall(r"\b(scripts)/(\w+\.sh)", text))
    assert ran and all((ROOT / folder / name).exists() and folder in copied for folder, name in ran)


def test_files_that_scripts_name_are_there():
    for path in SCRIPTS:
        for name in re.findall(r'source "\$here/([^"]+)"', path.read_text()):
            base = EXAMPLES if path.suffix == ".sbatch" else path.parent
            assert (base / name).exists(), (path, name)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"job": {"gpus": 128}}, "world_size 128 in the plan and 64 in the run; plan again"),
        ({"job": {"model": {"layers": 80}}}, "num_layers 80 in the plan and 32 in the run"),
        (
            {"best": {"fits": False, "why": "out of memory by 3 GiB"}},
            "must fit in memory.* got out of memory by 3 GiB; plan other",
        ),
    ],
)
def test_plans_of_other_jobs_are_refused(change, match, tmp_path):
    """A plan's figures are for its own model, GPUs and memory."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"flags": {"--burst-keep": "all"}} | change))
    args = megatrons_parser().parse_args(["--num-layers", "32", "--burst-plan", str(path)])
    args.world_size = 64
    with pytest.raises(BurstError, match=match):
        check_plan(args)


def test_megatron_and_burst_take_the_flags_of_slices():
    """Guards against a training step benchmark that would fail on its target machine."""
    from benchmarks.slice_cases import RUNS, SEED_RUNS, flags_of

    parser = megatrons_parser()
    for what, impl in (*RUNS, *SEED_RUNS):
        args = parser.parse_args([*what.flags, *flags_of(impl, 4)])
        own_loss = impl in ("megatron-own-loss", "base", "backward", "nested")
        assert args.seq_length == what.seq and args.burst_fused_loss != own_loss
        assert args.tensor_model_parallel_size == (4 if impl.startswith("tp") else 1)


def test_megatron_and_burst_take_the_flags_of_loss_curves():
    from benchmarks.loss_curves import MODELS, flags_of, runs

    for run in runs("megatron"):
        args, ours = megatrons_parser().parse_known_args(
            flags_of(run, MODELS["8b"], 300, Path("text"))
        )
        assert args.train_iters == 300 and args.burst_fused_loss == (run.impl == "burst")
        packs = ["--pack-documents"] if run.sample == "packed" else []
        assert ours == ["--data-seed", "4321" if run.order == "other" else "1234", *packs]


STARTED = """
import runpy, sys
loaded = set(sys.modules)
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert not ended.code, module
    for name in set(sys.modules) - loaded:
        if name.split(".")[0] in ("benchmarks", "megatron_burst"):
            del sys.modules[name]
"""


def test_one_script_draws_every_picture():
    """Its commands, printed and not run: each names the picture, its CSV or its program."""
    script = ROOT / "benchmarks" / "redraw.sh"
    there = os.environ | {"PYTHON": "true"}
    done = subprocess.run([script], env=there, capture_output=True, text=True, check=True)
    pictures = {*ROOT.glob("docs/*.png"), *ROOT.glob("benchmarks/results/*.png")}
    ways = {"planner_errors": "benchmarks.validate_plan", "schedule": "draw_ring.py",
            "soak_gpu": "draw_soak.py"}  # fmt: skip

    def drawn(path):
        name, csvs = path.stem, re.findall(r"results/(\w+)\.csv", done.stdout)
        way = ways.get(name, f"draw_{name}.py")
        made = path.parent.name == "results" and any(name.startswith(csv) for csv in csvs)
        return made or way in done.stdout or f"docs/{path.name}" in done.stdout

    assert len(pictures) > 20
    assert not [path.name for path in pictures if not drawn(path)]


def test_every_benchmark_has_a_command_line():
    """All start alike, `python -m benchmarks.NAME`, with a line that says what they do."""
    files = (ROOT / "benchmarks").glob("*.py")
    names = sorted(path.stem for path in files if "\n    app()\n" in path.read_text())
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *(f"benchmarks.{name}" for name in names)], cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(names) > 20 and done.stdout.count("Usage: ") == len(names), done.stdout


def test_the_demo_tells_what_burst_chose(tmp_path, monkeypatch):
    """Log lines begin with the handler's prefix."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from demo_report import choices_in

    output = tmp_path / "run.log"
    output.write_text(
        "INFO:megatron_burst:burst attention: adds --cp-comm-type burst\n"
        "INFO:megatron_burst:burst attention: 1 node x 2 ranks; backend fa4 (fast)\n"
        "burst attention: 2 nodes x 2 ranks; backend flash\n"
    )
    assert choices_in(output) == [
        "1 node x 2 ranks; backend fa4 (fast)",
        "2 nodes x 2 ranks; backend flash",
    ]


# what torchrun sets for one rank, without its own process; any free port
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def test_log_probabilities_of_packed_documents_do_not_depend_on_the_ranks():
    printed = {}
    for ranks in (1, 2):
        command = [str(EXAMPLES / "packed_log_probs.py")]
        if ranks > 1:
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = ["-m", *torchrun, *command]
        done = subprocess.run(
            [sys.executable, *command],
            env=os.environ | ALONE | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed[ranks] = re.findall(r"^\d+ tokens, \d+ predicted.*$", done.stdout, re.MULTILINE)
    assert len(printed[1]) == 5 and "40 tokens, 39 predicted" in printed[1][1]
    assert printed[1] == printed[2]


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(sft=True), "--sft must be left out"),
        (dict(dataloader_inter_document_masking=True), "--dataloader-inter-document-masking must"),
        (dict(seq_length=12), "must sum to --seq-length 12, .*; got 16; change either"),
        (dict(), ""),
    ],
)
def test_packing_that_the_script_would_ignore_ends_it(given, said, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    from packed_data import check_packing

    (tmp_path / "lengths").write_text("4, 8 4")
    args = Namespace(**dict(seq_length=16, document_lengths=tmp_path / "lengths") | given)
    if not said:
        assert check_packing(args) is None
        return
    with pytest.raises(SystemExit, match=said):
        check_packing(args)


def test_a_split_without_documents_ends_the_run(monkeypatch):
    """Megatron looks for its tokens for ever."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from packed_data import TextDataset

    config, split = Namespace(split="98,1,1"), Namespace(name="valid")
    with pytest.raises(SystemExit, match="--split 98,1,1 must.*none for valid of data; pass"):
        TextDataset(None, "data", [], 1, split, config)


@pytest.mark.parametrize(("files", "split"), [("a.txt b.txt", "100,0,0"), ("", "98,1,1")])
def test_few_text_files_are_all_for_training(files, split, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 0 || echo "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(EXAMPLES / "torchrun" / "packed.sh"), *files.split()]
    there = os.environ | {"PYTHON": str(python), "VERBOSE": "1"}
    done = subprocess.run(command, env=there, capture_output=True, text=True, check=True)
    made, trained = done.stdout.splitlines()
    assert files in made and f"--split {split} --pack-documents" in trained


TRAINED = r"""
import sys
print("  hidden_size ........ 192\n[rank 1] chatter")
print("INFO:megatron_burst:burst attention: ring")
print("block: 0.00 [2026-11-26 04:02:28] iteration        2/      20 | consumed samples: 2 | "
      "elapsed time per iteration (ms): 401.7 | learning rate: 9.5E-04 | lm loss: 5.68E+00 | x")
print("[rank1]: BurstError: one sentence\n[rank0]: BurstError: one sentence", file=sys.stderr)
print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_quiet_prints_bursts_lines_steps_and_errors(tmp_path, status):
    command = ["bash", str(EXAMPLES / "quiet.sh"), sys.executable, "-c", TRAINED, f"{status}"]
    there = {name: x for name, x in os.environ.items() if name != "VERBOSE"}
    there |= {"LOG": str(tmp_path / "logs" / "run.log")}
    done = subprocess.run(command, env=there, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout.splitlines() == ["burst attention: ring", "step 2/20  loss 5.68E+00  401 ms"]
    errors = done.stderr.splitlines()[2:]
    assert errors == (["BurstError: one sentence"] if status else [])
    assert "hidden_size" in (tmp_path / "logs" / "run.log").read_text()
    whole = subprocess.run(command, env=there | {"VERBOSE": "1"}, capture_output=True, text=True)
    assert whole.returncode == status and "hidden_size" in whole.stdout


QUICKSTART = ROOT / "docs" / "start" / "quickstart.md"


@pytest.mark.whole
def test_the_quickstarts_example_prints_what_matters(tmp_path):
    """Burst's lines and a line a step, where Megatron alone prints a thousand."""
    block = re.search(r"^examples/quiet\.sh (?:.*\\\n)*.*$", QUICKSTART.read_text(), re.M)
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    there = os.environ | {"LOG": str(tmp_path / "run.log"), "PATH": scripts}
    done = subprocess.run(
        ["bash", "-c", block[0]], cwd=ROOT, env=there, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) < 40 and lines[-1].startswith("step 20/20  loss "), done.stdout
    assert any(line.startswith("burst attention: 1 node x 2 ranks") for line in lines)
    assert len((tmp_path / "run.log").read_text().splitlines()) > 500
