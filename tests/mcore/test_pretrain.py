"""A Megatron-style pretrain script through each of the four entry points, end to end.

Guards against what no part shows alone: flags that do not reach the layers, patches that are
applied too late, ranks that build different models. The reference is the same script at CP=1
without burst. Entry points that depend on import order run under torchrun; runs on more ranks start
with Megatron loaded.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcore.lacking import needs, why_not
from tests.mcore.older_pretrain import SCRIPT
from tests.mcore.patched import patch_megatron
from tests.mcore.pretraining import FLAGS, pretrain

pytestmark = needs("training")
MEGATRONS_DOCUMENTS = 100_000  # of mock data, under torchrun
LONGER = """--seq-length 64 --max-position-embeddings 64 --global-batch-size 8 --train-iters 3
    --calculate-per-token-loss"""
ROOT = Path(__file__).parents[2]
OWN_SCRIPT = f"""import megatron_burst.patch
import runpy, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
BY_FLAG = "--context-parallel-impl burst --context-parallel-size"
BY_SPEC = """--spec megatron_burst.spec layer_spec --cp-comm-type burst --context-parallel-size 4
    --no-create-attention-mask-in-dataloader --burst-tune nodes=2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""
KEEP = """--recompute-granularity full --recompute-method block --recompute-num-layers 2
    --burst-keep all --burst-keep-layers 1 --burst-keep-offload both
    --burst-tune keep_debug=true"""
RING = "ring (on CPUs fewer kernel calls gain nothing)"
PLAN = {
    "--context-parallel-size": 2,
    "--seq-length": 64,
    "--context-parallel-impl": "burst",
    "--burst-tune": "circulate=q",
}
TORCHRUN = {  # what two ranks start, their flags
    "launcher": (["-m", "megatron_burst", str(SCRIPT)], f"{BY_FLAG} 2 --burst-fused-loss"),
    "import": (["own_script.py"], f"{BY_FLAG} 2 --burst-plan plan.json"),
    "diff": ([str(SCRIPT)], f"{BY_FLAG} 2 --burst-tune circulate=kv"),
}
LOADED = {  # ranks and flags of runs that start with Megatron loaded
    "megatron": (1, ""),
    "flag": (4, f"{BY_FLAG} 4 --burst-tune nodes=2 --burst-fused-loss {KEEP}"),
    "spec": (4, BY_SPEC),
}
if why_not("--spec"):
    del LOADED["spec"]


def started(name: str, folder: Path) -> subprocess.Popen:
    """Start a run under torchrun, which writes steps.jsonl and output.txt to its folder."""
    program, flags = TORCHRUN[name]
    folder.mkdir()
    (folder / "own_script.py").write_text(OWN_SCRIPT)
    (folder / "plan.json").write_text(json.dumps({"flags": PLAN}))
    path = [str(patch_megatron(folder))] if name == "diff" else []
    path += [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = f"{FLAGS} {LONGER} {flags} --step-log steps.jsonl".split()
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [*torchrun, "--nproc-per-node=2", *program, *flags], cwd=folder, stdout=output,
            stderr=output, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Steps and output of each run; those under torchrun run concurrently, as imports dominate."""
    folder = tmp_path_factory.mktemp("pretrain")
    processes = {name: started(name, folder / name) for name in TORCHRUN}
    results = {}
    try:
        for name, (ranks, flags) in LOADED.items():
            run = pretrain(folder / name, ranks, f"{LONGER} {flags}", MEGATRONS_DOCUMENTS)
            results[name] = run.steps, "\n".join(run.said)
        for name, process in processes.items():
            status = process.wait(timeout=400)
            output = (folder / name / "output.txt").read_text()
            assert status == 0, f"{name}: {output[-4000:]}"
            steps = (folder / name / "steps.jsonl").read_text().splitlines()
            results[name] = [json.loads(step) for step in steps], output
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks
                process.wait()
    return results


def test_the_truth_is_a_training_run_of_megatrons_own(runs):
    steps, output = runs["megatron"]
    losses = [step["lm loss"] for step in steps]
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    assert 4.5 < losses[0] < 5.2 and losses[2] < losses[0] - 0.1  # log(128) is 4.85
    assert "burst attention" not in output


@pytest.mark.parametrize(
    "name, said",
    [
        pytest.param("launcher", RING, id="python -m megatron_burst, CP2, fused loss"),
        pytest.param("flag", f"2 nodes x 2 ranks; {RING}", id="CP4 on two nodes, all kept"),
        pytest.param(
            "spec",
            f"2 nodes x 2 ranks; {RING}",
            marks=needs("--spec"),
            id="--spec, CP4 on two nodes",
        ),
        pytest.param("import", f"{RING}; circulate q (asked for", id="imported, CP2, a plan"),
        pytest.param("diff", f"{RING}; circulate kv (asked for", id="patched Megatron-LM, CP2"),
    ],
)
def test_every_step_has_the_loss_and_gradient_norm_of_the_run_without_burst(runs, name, said):
    steps, output = runs[name]
    for step, truth in zip(steps, runs["megatron"][0], strict=True):
        assert step["lm loss"] == pytest.approx(truth["lm loss"], abs=2e-6)
        assert step["grad norm"] == pytest.approx(truth["grad norm"], rel=2e-5)
    lines = {line for line in output.splitlines() if "burst attention: " in line}
    assert any(said in line for line in lines), lines
