"""Megatron's pretrain() in processes forked with Megatron loaded, which saves seconds per run."""

import importlib
import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.mcore import gpt  # noqa: F401  (its processes start with Megatron loaded)
from tests.mcore.children import end_children, let_children_write
from tests.mcore.older_pretrain import EXAMPLES, provide
from tests.ranks import preload, run_ranks
from tests.said import hearing

# Rounding must not grow from step to step. Adam's step is lr * m / (sqrt(v) + eps), so rounding of
# a gradient moves a weight by up to lr / eps times as much: with the usual eps of 1e-8 by lr, if
# the gradient is no larger than its rounding. Losses after three steps were 1e-5 apart on some
# CPUs. An eps of 1 is above all gradients, as their norm is clipped to 1. Then the factor is at
# most 0.5, and a wrong gradient moves weights in proportion, as under SGD with momentum.
FLAGS = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 0.5 --min-lr 0.05 --adam-eps 1
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--use-cpu-initialization --distributed-backend gloo --log-interval 1 --eval-iters 1
--eval-interval 1000 --num-workers 0 --split 98,1,1
"""

preload("megatron.training.training", "megatron.training.checkpointing")
preload("megatron.core.datasets.gpt_dataset", "megatron.core.tokenizers.text.models")
preload("megatron.core.datasets.blended_megatron_dataset_builder", "megatron.core.models.mimo")


@dataclass(frozen=True)
class Pretrained:
    """Results of a run.

    Attributes:
        steps: of each training step what examples/step_log.py writes.
        evaluated: the loss of each evaluation, on the last rank.
        said: what the first rank told the user.
    """

    steps: list[dict]
    evaluated: list[float]
    said: list[str] = field(default_factory=list)


def pretrain(
    folder: Path, ranks: int, flags: str, documents: int = 2000, script: str = "pretrain_gpt"
) -> Pretrained:
    """Run examples/pretrain_gpt.py, or another script, in a folder on some ranks, with FLAGS and
    extra flags.

    `documents`: of mock data; Megatron's own number, 100,000, takes longer to shuffle.
    """
    folder.mkdir(exist_ok=True)
    log = folder / "steps.jsonl"
    log.unlink(missing_ok=True)
    environment = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # 1 is refused with FSDP
    usual = FLAGS.replace("--mock-data", "") if "--data-path" in flags else FLAGS
    flags = f"{usual} {flags}"
    (_, said), *_ = ends = run_ranks(
        _main, ranks, str(folder), flags, documents, script, environment=environment
    )
    lines = log.read_text().splitlines() if log.exists() else []
    return Pretrained([json.loads(line) for line in lines], ends[-1][0], said)


def assert_same(got: Pretrained, truth: Pretrained) -> None:
    """Equal to float32 rounding: of losses near 5, which are stored to 5e-7, four such steps; of
    gradient norms, sums of squares, sixteen."""
    for step, true in zip(got.steps, truth.steps, strict=True):
        assert step["iteration"] == true["iteration"]
        assert step["lm loss"] == pytest.approx(true["lm loss"], abs=2e-6)
        assert step["grad norm"] == pytest.approx(true["grad norm"], rel=2e-6)
    assert got.evaluated == pytest.approx(truth.evaluated, abs=2e-6)


def _main(
    rank: int, folder: str, flags: str, documents: int, script: str = "pretrain_gpt"
) -> tuple[list[float], list[str]]:
    from megatron.core.datasets import gpt_dataset

    gpt_dataset.MockGPTLowLevelDataset.size = documents
    if "--save" in flags:
        let_children_write()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    os.chdir(folder)
    sys.argv = ["pretrain_gpt.py", *shlex.split(flags), "--step-log", "steps.jsonl"]
    sys.path.insert(0, str(EXAMPLES))
    from megatron_burst.mcore.launch import prepare

    prepare(sys.argv)
    provide()
    from megatron.training import training

    evaluated, evaluate = [], training.evaluate

    def noted(*args, **options):
        result = evaluate(*args, **options)
        if result[0]:  # from a pipeline's last stage
            evaluated.append(float(result[0]["lm loss"]))
        return result

    training.evaluate = noted
    try:
        with hearing() as said:
            module = importlib.import_module(script)
            if script == "pretrain_masks":
                module.main(module.add_mask, module.forward_step)
            else:
                module.main()
    finally:
        end_children()
    return evaluated, said
