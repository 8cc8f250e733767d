"""Megatron's in-process restart, by nvidia-resiliency-ext itself, of a training through burst.

Guards against anything of burst that outlives the group of a training that failed. Processes are
started without torchrun, which ends all of them when one dies.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcore.lacking import needs
from tests.mcore.pretraining import FLAGS
from tests.ranks import new_store

pytest.importorskip("nvidia_resiliency_ext", reason="make test-integrations FRAMEWORKS=restarted")

pytestmark = needs("training")
ROOT = Path(__file__).parents[2]
BURST = """--train-iters 5 --eval-iters 0 --context-parallel-impl burst --context-parallel-size 2
    --inprocess-restart --inprocess-granularity rank --inprocess-active-world-size 2"""


def outputs(folder: Path, how: str, ranks: int) -> list[str]:
    """Of each process."""
    store = new_store()
    port = store.port + 10  # Megatron takes the next ones too
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HOW": how,
        "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = ROOT / "tests" / "integrations" / "restarted_pretrain.py"
    command = [sys.executable, "-m", "megatron_burst", str(script), *f"{FLAGS} {BURST}".split()]
    processes = []
    for rank in range(ranks):
        own = environ | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        with (folder / f"{rank}.txt").open("w") as file:
            processes.append(
                subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=file)
            )
    try:
        for process in processes:
            process.wait(timeout=300)
    finally:
        for process in processes:
            process.kill()
    return [(folder / f"{rank}.txt").read_text() for rank in range(ranks)]


@pytest.mark.parametrize("how, ranks, last", [("raise", 2, 1), ("kill", 3, 2)])
def test_a_restart_in_the_processes_trains_to_the_end(how, ranks, last, tmp_path):
    """The rank that raised starts again; a spare one takes the place of one that was killed."""
    said = outputs(tmp_path, how, ranks)
    losses = [re.findall(r"lm loss: ([\d.E+-]+)", text) for text in said]
    before = losses[1][:2]
    after = losses[last][2 if last == 1 else 0 :]
    assert len(before) == 2 and len(after) == 5, said[last][-3000:]
    assert after[:2] == before
