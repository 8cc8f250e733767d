"""A Megatron-style pretrain script through each of the four entry points, end to end.

Guards against what no part shows alone: flags that do not reach the layers, patches that are
applied too late, ranks that build different models. The reference is the same script at CP=1
without burst. Entry points that depend on import order run without Megatron loaded, one of them
under torchrun; runs on more ranks start with Megatron loaded.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.mcore.forked_scripts import Script
from tests.mcore.lacking import needs, why_not
from tests.mcore.older_pretrain import SCRIPT
from tests.mcore.patched import patch_megatron
from tests.mcore.pretraining import FLAGS, Pretrained, assert_same, pretrain
from tests.ranks import new_store

pytestmark = [pytest.mark.numeric, needs("training")]
MEGATRONS_DOCUMENTS = 100_000  # of mock data, where it is not replaced
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
GATHER, RING = "gather (few long kernel calls, merged once)", "ring (asked for)"
PLAN = {
    "--context-parallel-size": 2,
    "--seq-length": 64,
    "--context-parallel-impl": "burst",
    "--burst-intra": "ring",
    "--burst-tune": "force.circulate=q",
}
BY_TORCHRUN = f"{BY_FLAG} 2 --burst-fused-loss"
FORKED = {  # what two ranks start that have torch loaded, their flags
    "import": ("own_script.py", f"{BY_FLAG} 2 --burst-plan plan.json"),
    "diff": (str(SCRIPT), f"{BY_FLAG} 2 --burst-intra ring --burst-tune force.circulate=kv"),
}
LOADED = {  # ranks and flags of runs that start with Megatron loaded
    "megatron": (1, ""),
    "flag": (4, f"{BY_FLAG} 4 --burst-tune nodes=2 --burst-fused-loss {KEEP}"),
    "spec": (4, BY_SPEC),
}
if why_not("--spec"):
    del LOADED["spec"]


def words(flags: str) -> list[str]:
    return f"{FLAGS} {LONGER} {flags} --step-log steps.jsonl".split()


def start(module: str, *arguments: str, output: Path) -> subprocess.Popen:
    """Start `python -m module` in the folder of its output."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=output.parent, stdout=file, stderr=file,
            start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip


def start_torchrun(folder: Path) -> subprocess.Popen:
    """Start the launcher, which writes steps.jsonl and output.txt to a folder."""
    folder.mkdir()
    options = ["--standalone", "--nproc-per-node=2", "-m", "megatron_burst", str(SCRIPT)]
    output = folder / "output.txt"
    return start("torch.distributed.run", *options, *words(BY_TORCHRUN), output=output)


def start_forked(folder: Path, names: list[str], stores: list) -> subprocess.Popen:
    """Start the others, which write them to folders below. `stores` must live as long as they."""
    scripts = []
    for name in names:
        script, flags = FORKED[name]
        where = folder / name
        where.mkdir()
        (where / "own_script.py").write_text(OWN_SCRIPT)
        (where / "plan.json").write_text(json.dumps({"flags": PLAN}))
        path = [str(patch_megatron(where))] if name == "diff" else []
        stores.append(new_store())
        argv = [str(where / script), *words(flags)]  # an absolute path stays what it is
        scripts.append(asdict(Script(argv, str(where), path, stores[-1].port)))
    output = folder / "forked.txt"
    return start("tests.mcore.forked_scripts", json.dumps(scripts), output=output)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Steps and output of each run; those without Megatron loaded run at the same time."""
    folder, results, stores = tmp_path_factory.mktemp("pretrain"), {}, []
    names = [*FORKED] if request.config.getoption("--all") else ["import"]
    processes = [start_torchrun(folder / "launcher"), start_forked(folder, names, stores)]
    try:
        for name, (ranks, flags) in LOADED.items():
            run = pretrain(folder / name, ranks, f"{LONGER} {flags}", MEGATRONS_DOCUMENTS)
            results[name] = run.steps, "\n".join(run.said)
        status = [process.wait(timeout=400) for process in processes]
        outputs = {name: (folder / name / "output.txt").read_text()
                   for name in ("launcher", *names)}  # fmt: skip
        ends = {name: output[-4000:] for name, output in outputs.items()}
        assert not any(status), (ends, (folder / "forked.txt").read_text())
        for name, output in outputs.items():
            steps = (folder / name / "steps.jsonl").read_text().splitlines()
            results[name] = [json.loads(step) for step in steps], output
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and its ranks
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
        pytest.param("launcher", GATHER, id="python -m megatron_burst, CP2, fused loss"),
        pytest.param("flag", f"2 nodes x 2 ranks; {GATHER}", id="CP4 on two nodes, all kept"),
        pytest.param(
            "spec",
            f"2 nodes x 2 ranks; {GATHER}",
            marks=needs("--spec"),
            id="--spec, CP4 on two nodes",
        ),
        pytest.param("import", f"{RING}; circulate q (asked for", id="imported, CP2, a plan"),
        pytest.param(
            "diff",
            f"{RING}; circulate kv (asked for",
            marks=pytest.mark.whole,  # test_patches.py trains a step with the diff
            id="patched Megatron-LM, CP2",
        ),
    ],
)
def test_every_step_has_the_loss_and_gradient_norm_of_the_run_without_burst(runs, name, said):
    steps, output = runs[name]
    assert_same(Pretrained(steps, []), Pretrained(runs["megatron"][0], []))
    lines = {line for line in output.splitlines() if "burst attention: " in line}
    assert any(said in line for line in lines), lines
