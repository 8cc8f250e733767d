"""accelerate's FSDP2, TRL's SFTTrainer and GRPOTrainer on two ranks, against one: our examples.

Guards against a loss or gradients that depend on how many ranks shard a batch, and against TRL
taking packing and GRPO together with accelerate's context parallelism, which our examples avoid.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="make test-integrations FRAMEWORKS=hf")
EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(example: str, ranks: int, folder: Path, *options: str) -> list[list[float]]:
    """The numbers that an example prints in each step."""
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *port, "--nproc-per-node", str(ranks),
         str(EXAMPLES / example), *options],
        cwd=folder, capture_output=True, text=True, timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return [[float(x) for x in re.findall(r"-?\d+\.\d+", line)] for line in steps]


@pytest.mark.parametrize("example", ["accelerate_fsdp2.py", "trl_sft.py", "trl_grpo.py"])
def test_steps_on_two_ranks_are_those_on_one(example, tmp_path):
    two, one = (printed(example, ranks, tmp_path, "--steps", "3") for ranks in (2, 1))
    assert len(two) == len(one) == 3 and all(len(step) >= 2 for step in one)
    for ours, theirs in zip(two, one, strict=True):
        # float32; an optimizer step in between multiplies rounding by less than 100
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("loss", ["sft", "grpo"])
def test_trl_refuses_accelerates_context_parallelism(loss):
    """If this fails, TRL has it: tell of it in docs/how-to/without-megatron.md."""
    import inspect

    from trl.trainer import grpo_config, sft_trainer

    text = inspect.getsource(sft_trainer if loss == "sft" else grpo_config)
    assert ("Packing is not compatible with context parallelism" if loss == "sft" else
            "does not support sequence-dim parallelism") in text  # fmt: skip
