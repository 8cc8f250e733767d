"""accelerate's FSDP2, Trainer, TRL's SFT, DPO and GRPO on two ranks, against one: our examples.

Guards against a loss, an evaluation or gradients that depend on how many ranks shard a batch,
against a Trainer that reads labels of a shard, and against TRL taking packing and GRPO together
with accelerate's context parallelism, which our examples avoid.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_burst.errors import BurstError
from tests.ranks import preload, run_ranks

pytest.importorskip("trl", reason="make test-integrations FRAMEWORKS=hf")
preload("transformers", "megatron_burst.hf", "accelerate")
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


EXAMPLES_RUN = (
    "accelerate_fsdp2.py", "trl_sft.py", "trl_grpo.py", "trl_dpo.py", "trainer.py",
    "trainer.py --stream",
)  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES_RUN)
def test_steps_on_two_ranks_are_those_on_one(example, tmp_path):
    name, *more = example.split()
    two, one = (printed(name, ranks, tmp_path, "--steps", "3", *more) for ranks in (2, 1))
    assert len(two) == len(one) >= 3 and sum(len(step) >= 2 for step in one) == 3
    for ours, theirs in zip(two, one, strict=True):  # evaluations too
        # float32; an optimizer step in between multiplies rounding by less than 100
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def adapter_gradients(rank: int) -> torch.Tensor:
    """Of LoRA in examples/long_samples.py, after one backward."""
    sys.path.insert(0, str(EXAMPLES))
    import long_samples

    sys.argv = ["", "--tiny", "--layers", "2", "--seq", "64"]
    options = long_samples.options_of()
    model = long_samples.with_lora(options, torch.device("cpu")).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, 64))
    with long_samples.loss_of(model, ids, options, None) as loss:
        loss.backward()
    long_samples.average(trained)
    return torch.cat([weight.grad.flatten().float() for weight in trained])


def test_adapters_have_the_gradients_of_one_rank_on_two():
    """Guards against ranks that train adapters of their own."""
    (one,) = run_ranks(adapter_gradients, 1)
    for of_rank in run_ranks(adapter_gradients, 2):  # in bf16
        assert one.norm() > 0 and (of_rank - one).norm() < 0.02 * one.norm()


@pytest.mark.parametrize("loss", ["sft", "grpo"])
def test_trl_refuses_accelerates_context_parallelism(loss):
    """If this fails, TRL has it: tell of it in docs/how-to/without-megatron.md."""
    import inspect

    from trl.trainer import grpo_config, sft_trainer

    text = inspect.getsource(sft_trainer if loss == "sft" else grpo_config)
    assert ("Packing is not compatible with context parallelism" if loss == "sft" else
            "does not support sequence-dim parallelism") in text  # fmt: skip


# ---- what a Trainer may not read ---------------------------------------------------------------


def as_torchrun_would(rank: int, world: int) -> None:
    """Let accelerate see the process group."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def trainer_of(kind: type, folder: str, collate, **options):
    """A Trainer with a tiny model; options of its arguments have a name in capitals."""
    from transformers import TrainingArguments

    from tests.integrations.test_hf import model_of

    settings = {name.lower(): x for name, x in options.items() if name.isupper()}
    others = {name: x for name, x in options.items() if not name.isupper()}
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=2, max_steps=1,
        per_device_eval_batch_size=2, report_to="none", save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, **settings,
    )  # fmt: skip
    documents = [{"input_ids": list(range(3, 3 + n))} for n in (9, 17, 5, 12)]
    return kind(model_of("Llama", "burst").float(), args, train_dataset=documents,
                eval_dataset=documents, data_collator=collate, **others)  # fmt: skip


def trainers_that_are_refused(rank: int, folder: str) -> dict[str, str]:
    from transformers import DataCollatorWithFlattening, Trainer

    from megatron_burst.hf import ContextParallelMixin, prepare_data_loader, shard_batch

    class Mixed(ContextParallelMixin, Trainer):
        pass

    as_torchrun_would(rank, 2)
    flat = DataCollatorWithFlattening()
    metrics = {"compute_metrics": lambda x: {"accuracy": 0.0}}
    loss = {
        "compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()
    }
    smooth, local = {"LABEL_SMOOTHING_FACTOR": 0.1}, {"AVERAGE_TOKENS_ACROSS_DEVICES": False}
    noisy = {"NEFTUNE_NOISE_ALPHA": 5.0}
    sent = {"ACCELERATOR_CONFIG": {"dispatch_batches": True}}
    said = {}

    def refused(name, call):
        with pytest.raises(BurstError) as raised:
            call()
        said[name] = str(raised.value)

    for name, options in {
        "metrics": metrics,
        "loss": loss,
        "smooth": smooth,
        "local": local,
        "noisy": noisy,
        "sent": sent,
    }.items():
        refused(f"mixin, {name}", lambda o=options: trainer_of(Mixed, folder, flat, **o))
    for name, options in {"loss": loss, "smooth": smooth}.items():  # a Trainer that shards itself
        plain = trainer_of(Trainer, folder, lambda x: shard_batch(flat(x * 2)), **options)
        plain._get_train_sampler = lambda *_: [0, 0]
        refused(f"plain, {name}", plain.train)
    plain = trainer_of(Trainer, folder, flat, **metrics)
    batch = shard_batch(flat([{"input_ids": list(range(3, 20))}]))
    refused("plain, metrics", lambda: plain.prediction_step(plain.model, batch, False))
    refused("dispatched", lambda: prepare_data_loader(None, dispatch_batches=True))
    return said


SAID = {
    "mixin, metrics": "compute_metrics must be None",
    "mixin, loss": "compute_loss_func must be None",
    "mixin, smooth": "label_smoothing_factor must be 0",
    "mixin, noisy": "neftune_noise_alpha must be None",
    "mixin, local": "average_tokens_across_devices must be on",
    "plain, loss": "shift_labels without labels",
    "plain, smooth": "shift_labels without labels",
    "plain, metrics": "evaluation must ask for the loss alone",
    "dispatched": "dispatch_batches must be off",
    "mixin, sent": "dispatch_batches must be off",
}


def test_trainers_that_read_labels_of_a_shard_are_refused(tmp_path):
    for said in run_ranks(trainers_that_are_refused, 2, str(tmp_path), fresh=True):
        for name, part in SAID.items():
            assert part in said[name], (name, said[name])


def batches_of(rank: int, cp: int, stream: bool, shuffle: bool) -> tuple[list, list]:
    """Batches of this rank, and of a process among as many as there are groups."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, IterableDataset

    from megatron_burst.hf import prepare_data_loader

    as_torchrun_would(rank, 4)
    Accelerator(cpu=True)
    mesh = dist.init_device_mesh("cpu", (4 // cp, cp), mesh_dim_names=("dp", "cp"))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(12))

    torch.manual_seed(rank)  # as if processes had drawn other numbers before
    loader = DataLoader(Stream() if stream else range(12), batch_size=2, shuffle=shuffle)
    prepared = prepare_data_loader(loader, group=mesh["cp"])
    return [x.tolist() for x in prepared], mesh["dp"].get_local_rank()


@pytest.mark.parametrize(("stream", "shuffle"), [(False, False), (False, True), (True, False)])
def test_ranks_of_a_group_read_the_same_batches(stream, shuffle):
    results = run_ranks(batches_of, 4, 2, stream, shuffle, fresh=True)
    by_group = {dp: [x for x, other in results if other == dp] for _, dp in results}
    assert all(one == two for one, two in by_group.values()) and len(by_group) == 2
    seen = [number for (one, _) in by_group.values() for batch in one for number in batch]
    assert sorted(seen) == list(range(12))
    if not shuffle:
        assert by_group[0][0] == [[0, 1], [4, 5], [8, 9]]


def evaluated(rank: int, world: int, cp: int, folder: str) -> float:
    """The evaluation loss of four documents, three at a time; of Trainer itself where cp is 0."""
    import torch.distributed as dist
    from transformers import DataCollatorWithFlattening, Trainer

    from megatron_burst.hf import ContextParallelMixin

    class Mixed(ContextParallelMixin, Trainer):
        pass

    if world > 1:
        as_torchrun_would(rank, world)
    flat, more = DataCollatorWithFlattening(), {}
    if cp:
        mesh = dist.init_device_mesh("cpu", (world // cp, cp), mesh_dim_names=("dp", "cp"))
        more = {"cp_group": mesh["cp"]}
    trainer = trainer_of(Mixed if cp else Trainer, folder, flat, **more)
    if not cp:
        trainer.model.set_attn_implementation("eager")
        trainer.model.config.use_cache = False
    trainer.args.per_device_eval_batch_size = 3
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(("world", "cp"), [(2, 2), (4, 2)])
def test_an_evaluation_is_that_of_plain_trainer_on_as_many_groups(world, cp, tmp_path):
    """Also where the last batch is not full: its samples count once."""
    ours = run_ranks(evaluated, world, world, cp, str(tmp_path), fresh=True)
    theirs = run_ranks(evaluated, world // cp, world // cp, 0, str(tmp_path), fresh=True)
    assert ours == pytest.approx([theirs[0]] * world, rel=1e-5)
