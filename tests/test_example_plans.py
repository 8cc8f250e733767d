"""Plans of `megatron-burst plan`, through the launch scripts, to Megatron's validated arguments.

As a user would: a plan is written, a script runs with it, and Megatron parses and validates with
burst's flags what the script starts. Only torchrun and srun are stand-ins that record their
arguments. Guards against a planned flag that a run does not get, script flags that contradict a
plan, and sizes that the scripts compute wrongly.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.flags import as_words
from megatron_burst.tools.job.model_file import model_of
from megatron_burst.tools.job.script import arguments_in, read_script
from megatron_burst.tools.main import app
from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)
from tests.ranks import run_ranks
from tests.tools.job.configs import MIXTRAL_8X7B

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = """#!/usr/bin/env bash
printf '%s\\0' "$CUDA_DEVICE_MAX_CONNECTIONS" "$@" >>"$CALLS"; printf '\\n' >>"$CALLS"
"""
SRUN = """#!/usr/bin/env bash
while [[ "$1" != python && "$1" != bash ]]; do shift; done
if [[ "$1" == bash ]]; then SLURM_NODEID=0 "$@"; else torchrun "$@"; fi
"""
SCRIPTS = {  # by nodes of 8 GPUs: the script and its variables
    1: ("torchrun/one_node.sh", {}),
    2: ("torchrun/many_nodes.sh", {"NODES": "2", "NODE": "0", "MASTER_ADDR": "node0"}),
    4: (
        "slurm/pretrain.sbatch",
        {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]", "SLURM_JOB_ID": "7"},
    ),
}
PLANS = {  # nodes, options of plan
    "alone": (1, "--seq-length 128k"),
    "tensor parallel": (2, "--seq-length 256k --tp 2 --keep all --offload"),
    "pipeline": (4, "--seq-length 256k --tp 2 --pp 3 --dp 1 --gpus 24"),
    "half": (2, "--seq-length 1M --cp 16 --keep half"),
    "no recomputation": (1, "--seq-length 64k --cp 8 --recompute none"),
    "feed-forward": (4, "--seq-length 128k --recompute selective"),
    "experts": (4, "--seq-length 128k --ep 8 --tp 2"),
    "experts, selective": (4, "--seq-length 32k --recompute selective"),
    "FSDP2": (1, "--seq-length 128k --cp 4 --fsdp torch"),
    "Megatron-FSDP": (2, "--seq-length 128k --cp 4 --fsdp megatron"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A copy of the examples, stand-ins for launchers, and a model's config."""
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(EXAMPLES, folder / "examples")
    (folder / "bin").mkdir()
    for name, text in (
        ("torchrun", TORCHRUN),
        ("srun", SRUN),
        ("scontrol", "#!/bin/sh\necho node0"),
    ):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    (folder / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    return folder


def started(bench: Path, nodes: int, **variables: str) -> list[str]:
    """CUDA_DEVICE_MAX_CONNECTIONS of the run that a script starts after the doctor, and its
    arguments behind the training script."""
    script, own = SCRIPTS[nodes]
    calls = bench / "calls.txt"
    calls.unlink(missing_ok=True)
    paths = {"PATH": f"{bench / 'bin'}:/usr/bin:/bin", "CALLS": str(calls), "MEGATRON": "/m"}
    paths["SLURM_SUBMIT_DIR"] = str(bench)
    subprocess.run(
        ["bash", str(bench / "examples" / script)], env=paths | own | variables, check=True,
        capture_output=True,
    )  # fmt: skip
    doctor, run = (line.split("\0")[:-1] for line in calls.read_text().splitlines())
    assert doctor[-1] == "doctor" and "/m/pretrain_gpt.py" in run
    return [run[0], *run[run.index("/m/pretrain_gpt.py") + 1 :]]


def planned(bench: Path, name: str) -> tuple[Path, dict, int]:
    """A plan's file, its content, and the nodes of its job."""
    nodes, options = PLANS[name]
    model = str(bench / "config.json") if "experts" in name else "llama3-8b"
    path = bench / f"{name}.json"
    words = ["plan", model, "--gpus", str(8 * nodes), *options.split(), "--json", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return path, json.loads(path.read_text()), nodes


def with_model(bench: Path, flags: dict) -> None:
    """Change the scripts' model, as their first lines tell a user to do."""
    path = bench / "examples" / "torchrun" / "llama3_8b.sh"
    text = (EXAMPLES / "torchrun" / "llama3_8b.sh").read_text()
    start = text.index("MODEL_FLAGS=(")
    end = text.index("\n)\n", start)
    path.write_text(f"{text[:start]}MODEL_FLAGS=({' '.join(as_words(flags))}{text[end:]}")


def validated(rank: int, runs: list[tuple[int, list[str]]]) -> list[dict | str]:
    """Megatron's validated arguments of each run, or what refused it."""
    from megatron.training import arguments

    from megatron_burst.mcore import launch
    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    launch.prepare([])
    found = []
    for world, words in runs:
        os.environ |= {"WORLD_SIZE": str(world), "RANK": "0"}
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = words[0]
        sys.argv = ["pretrain_gpt.py", *words[1:], "--distributed-backend", "gloo"]
        try:
            args = arguments.parse_args()
            arguments.validate_args(args, {})
        except BurstError as error:
            found.append(str(error))
            continue
        simple = (int, float, str, bool, list, type(None))
        found.append(
            {name: value for name, value in vars(args).items() if isinstance(value, simple)}
        )
    return found


def test_a_run_gets_all_that_its_plan_decides(bench):
    plans, runs = {}, []
    for name in PLANS:
        path, plans[name], nodes = planned(bench, name)
        with_model(bench, plans[name]["model_flags"])
        runs.append((plans[name]["job"]["gpus"], started(bench, nodes, PLAN=str(path))))
    (found,) = run_ranks(validated, 1, runs)
    for (name, plan), args in zip(plans.items(), found, strict=True):
        assert isinstance(args, dict), f"{name}: {args}"
        check(plan, args)
    kinds = [plan["best"]["strategy"] for plan in plans.values()]
    assert any(k["tp"] > 1 and k["cp"] > 1 for k in kinds) and any(k["pp"] > 1 for k in kinds)
    assert any(k["dp"] > 1 for k in kinds) and any(k["ep"] > 1 for k in kinds)


def check(plan: dict, args: dict) -> None:
    """Check validated arguments against the strategy, which the planner has from elsewhere."""
    strategy, job = plan["best"]["strategy"], plan["job"]
    for size, name in (("tp", "tensor_model"), ("cp", "context"), ("pp", "pipeline_model")):
        assert args[f"{name}_parallel_size"] == strategy[size]
    assert args["data_parallel_size"] == strategy["dp"]
    assert (args["seq_length"], args["global_batch_size"]) == (job["seq"], job["batch"])
    assert args["num_layers"] == job["model"]["layers"]
    assert args["sequence_parallel"] == (strategy["tp"] > 1)
    full = strategy["recompute"] == "full"
    assert args["recompute_granularity"] == (
        None if strategy["recompute"] == "none" else strategy["recompute"]
    )
    assert not full or args["recompute_method"] == "uniform"
    assert (args["burst_keep"] or "none") == strategy["keep"]
    offloaded = args["burst_keep_offload"]
    assert (offloaded in ("results", "both")) == strategy["offload"]
    assert (offloaded in ("inputs", "both")) == strategy["offload_inputs"]
    assert args["burst_fused_loss"] == strategy["fused_loss"] and args["bf16"]
    assert (args["context_parallel_impl"] == "burst") == (strategy["cp"] > 1)
    whole = strategy["fsdp"] == "none"
    assert not whole or (args["overlap_grad_reduce"] and args["overlap_param_gather"])
    # with it FSDP2's gradients are too large, also without burst
    assert args["calculate_per_token_loss"] == (strategy["fsdp"] != "torch")
    if job["model"]["experts"]:
        assert args["moe_token_dispatcher_type"] == "alltoall"
        assert (args["expert_model_parallel_size"], args["num_experts"]) == (strategy["ep"], 8)
        selective = strategy["recompute"] == "selective"
        assert not selective or {"mlp", "moe"} <= set(args["recompute_modules"])


def test_sizes_that_are_given_without_a_plan_leave_the_rest_to_context_parallelism(bench):
    with_model(bench, {"--num-layers": 32, "--hidden-size": 4096, "--num-attention-heads": 32})
    runs = []
    for nodes, variables in ((4, {"TP": "2"}), (2, {"TP": "2", "PP": "2"}), (1, {"CP": "4"})):
        runs.append((8 * nodes, started(bench, nodes, **variables)))
    (found,) = run_ranks(validated, 1, runs)
    sizes = [(a["context_parallel_size"], a["data_parallel_size"]) for a in found]
    assert sizes == [(16, 1), (4, 1), (4, 2)]
    assert [a["sequence_parallel"] for a in found] == [True, True, False]
    assert {a["context_parallel_impl"] for a in found} == {"burst"}


def dumped(rank: int, runs: list[tuple[int, list[str]]], folder: str) -> None:
    """Start each run with --burst-dump-args."""
    from megatron.training import arguments

    from megatron_burst.mcore import launch
    from megatron_burst.tools import cpu_mode

    cpu_mode.install()
    launch.prepare([])
    for number, (world, words) in enumerate(runs):
        os.environ |= {"WORLD_SIZE": str(world), "RANK": "0"}
        path = os.path.join(folder, f"{number}.json")
        sys.argv = ["pretrain_gpt.py", *words[1:], "--burst-dump-args", path]
        with pytest.raises(SystemExit) as end:
            arguments.parse_args()
        assert end.value.code == 0


def test_the_arguments_of_our_scripts_are_planned(bench, tmp_path):
    """A run writes them down, however its script puts them together."""
    shutil.copy(EXAMPLES / "torchrun" / "llama3_8b.sh", bench / "examples" / "torchrun")
    cases = [
        (1, {}, (1, 8, 1, "131072")), (1, {"TP": "2", "SEQ_LENGTH": "65536"}, (2, 4, 1, "65536")),
        (2, {"TP": "2"}, (2, 8, 1, "1048576")), (4, {"PP": "2"}, (1, 16, 2, "1048576")),
    ]  # fmt: skip
    runs = [(8 * nodes, started(bench, nodes, **own)) for nodes, own, _ in cases]
    run_ranks(dumped, 1, runs, str(tmp_path))
    for number, (nodes, _, sizes) in enumerate(cases):
        path = str(tmp_path / f"{number}.json")
        found = arguments_in(path)
        read = read_script(found)
        assert (*(read.sizes[name] for name in ("tp", "cp", "pp")), found["seq_length"]) == sizes
        assert found["burst_keep"] == "all" and found["context_parallel_impl"] == "burst"
        assert ("sequence_parallel" in found) == (sizes[0] > 1)
        model = model_of(path)
        assert (model.layers, model.heads_kv, model.vocab) == (32, 8, 128256)
        done = CliRunner().invoke(app, ["plan", path, "--gpus", str(8 * nodes)])
        assert f"TP {sizes[0]} CP {sizes[1]} PP {sizes[2]}" in done.output, done.output


def test_variables_that_contradict_a_plan_and_other_models_are_refused(bench):
    path, plan, nodes = planned(bench, "tensor parallel")
    with_model(bench, plan["model_flags"])
    words = [started(bench, nodes, PLAN=str(path), TP="4")]
    with_model(bench, plan["model_flags"] | {"--num-layers": 16})
    words.append(started(bench, nodes, PLAN=str(path)))
    (found,) = run_ranks(validated, 1, [(16, one) for one in words])
    assert "--tensor-model-parallel-size 2 in the plan and 4 in the run" in found[0]
    assert "num_layers 32 in the plan and 16 in the run" in found[1]
