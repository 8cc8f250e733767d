"""What Megatron's users switch on beside context parallelism, and what only GPUs run: expert
all-to-alls that overlap, layer-wise optimizers, weights in shards (GTP).

Each run has its twin with one context-parallel rank and Megatron's own attention, and continues
from the twin's checkpoint. Guards against a schedule that calls attention's parts elsewhere, and
parameters that burst's layers name otherwise.
"""

import importlib
import json
import os
import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu import needs_gpus, needs_transformer_engine
from tests.mcore.children import end_children, let_children_write
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(), needs_transformer_engine()]
EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = """
--num-layers 2 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 256
--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3
--min-lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --bf16
--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 1 --eval-interval 1000
--num-workers 0 --split 98,1,1 --transformer-impl transformer_engine --ckpt-format torch_dist
--no-gradient-accumulation-fusion --untie-embeddings-and-output-weights
"""
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-ffn-hidden-size 256 --expert-model-parallel-size 2 --moe-grouped-gemm"""
OVERLAP = f"{EXPERTS} --overlap-moe-expert-parallel-comm"
MUON = "--optimizer muon --use-distributed-optimizer"
GTP = "--tensor-parallel-num-weight-shards 2"
BURST = "--context-parallel-impl burst --context-parallel-size 2"
RUNS = {  # ranks and flags of the twin, ranks and flags with burst
    "expert all-to-alls overlapped": ((2, EXPERTS), (2, f"{OVERLAP} {BURST}")),
    "layer-wise Muon": ((2, MUON), (2, f"{MUON} {BURST} --burst-fused-loss")),
    "weights in shards (GTP)": ((2, GTP), (4, f"{GTP} {BURST}")),
}


def why(name: str) -> str:
    """Why a run is not possible here."""
    lacking = "Muon" in name and find_spec("emerging_optimizers") is None
    return "emerging-optimizers is not installed" if lacking else ""


def trained(rank: int, folder: str, log: str, flags: str) -> list[dict]:
    """Steps of examples/pretrain_gpt.py on GPUs that ranks may share."""
    import torch

    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{torch.cuda.current_device()}"}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.chdir(folder)
    sys.argv = ["pretrain_gpt.py", *shlex.split(f"{FLAGS} {flags}"), "--step-log", log]
    sys.path.insert(0, str(EXAMPLES))
    from megatron_burst.mcore.launch import prepare

    prepare(sys.argv)
    let_children_write()
    script = importlib.import_module("pretrain_gpt")
    script.main(script.add_arguments, partial(planned, script))
    torch.distributed.barrier()
    end_children()
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def planned(script, data_iterator, model, return_schedule_plan: bool = False) -> tuple:
    """A forward step; or its plan, for the schedule that overlaps all-to-alls of experts."""
    if not return_schedule_plan:
        return script.forward_step(data_iterator, model)
    batch = script.next_batch(data_iterator)
    plan = model.build_schedule_plan(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )  # fmt: skip
    return plan, partial(script.loss_func, batch["loss_mask"])


def run(folder: Path, ranks: int, flags: str) -> list[dict]:
    log = f"steps-{len(list(folder.glob('steps-*')))}.jsonl"
    return in_ranks(trained, ranks, str(folder), log, flags)[0]


def in_ranks(function, ranks: int, *args: str) -> list:
    environment = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    return run_ranks(function, ranks, *args, backend="nccl", environment=environment, fresh=True)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_burst_gives_what_one_context_parallel_rank_gives(name, tmp_path):
    """To bf16: 2^-8 of losses near 5, and of gradient norms four times that."""
    if why(name):
        pytest.skip(why(name))
    (ranks, flags), got = RUNS[name]
    truth = run(tmp_path, ranks, f"{flags} --save saved --save-interval 2")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    whole, later = run(tmp_path, *got), run(tmp_path, got[0], f"{got[1]} --load saved")
    print(name, [[step["lm loss"] for step in steps] for steps in (truth, whole, later)])
    assert [step["iteration"] for step in later] == [3, 4] and len(truth) == len(whole) == 4
    assert truth[-1]["lm loss"] < truth[0]["lm loss"] - 0.05
    for mine, theirs in zip([*whole, *later], [*truth, *truth[2:]], strict=True):
        assert mine["lm loss"] == pytest.approx(theirs["lm loss"], abs=2e-2)
        assert mine["grad norm"] == pytest.approx(theirs["grad norm"], rel=2e-2)


def refusal(rank: int, folder: str) -> str:
    from megatron_burst.errors import BurstError

    try:
        trained(rank, folder, "steps.jsonl", f"{GTP} {BURST} --burst-fused-loss")
    except BurstError as error:
        return str(error)
    return ""


def test_the_fused_loss_is_refused_with_weights_in_shards(tmp_path):
    said = in_ranks(refusal, 4, str(tmp_path))
    assert all("a weight that is sharded over other ranks" in sentence for sentence in said)
