"""transformers' Trainer on context-parallel ranks, without Megatron: packed text, and a stream.

pip install accelerate transformers
torchrun --nproc-per-node 2 examples/trainer.py [--cp 2] [--steps 4] [--stream]

`ContextParallelMixin` gives all ranks of a group the same batches and shards them, in training and
in evaluation. The losses do not depend on the number of ranks in a group.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Qwen3Config,
    Trainer,
    TrainingArguments,
    set_seed,
)  # fmt: skip

from megatron_burst import BurstConfig
from megatron_burst.hf import ContextParallelMixin

TINY = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


class BurstTrainer(ContextParallelMixin, Trainer):
    """Trainer whose batches are sharded over a context-parallel group."""


class Stream(IterableDataset):
    """Documents one after the other, as from a file that is being read."""

    def __init__(self, documents: list[dict]) -> None:
        self._documents = documents

    def __iter__(self):
        return iter(self._documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, help="ranks that shard a batch; default: all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stream", action="store_true", help="read a data set without a length")
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir="trainer", use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(), per_device_train_batch_size=4, max_steps=options.steps,
        gradient_accumulation_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2,
        report_to="none", save_strategy="no", learning_rate=1e-3, gradient_checkpointing=True,
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    files = sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    texts = [path.read_bytes()[: 300 - 17 * place % 290] for place, path in enumerate(files)]
    documents = [{"input_ids": list(text)} for text in texts if len(text) > 1]
    train, test = documents[:-9], documents[-9:]
    set_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation="burst")
    trainer = BurstTrainer(
        model, args, cp_group=context_parallel(args, options.cp),
        # no logits; gradient checkpointing recomputes all of a layer but attention
        shard_options={"fused_loss": True, "config": BurstConfig(keep="all")},
        train_dataset=Stream(train) if options.stream else train, eval_dataset=test,
        data_collator=DataCollatorWithFlattening(),
    )  # fmt: skip
    trainer.train()
    print_steps(trainer)


def print_steps(trainer: Trainer) -> None:
    """Losses and gradient norms of training, and losses of evaluation."""
    if trainer.args.process_index:
        return
    for step in trainer.state.log_history:
        if "loss" in step:
            print(f"step {step['step']} loss {step['loss']} gradient norm {step['grad_norm']}")
        elif "eval_loss" in step:
            print(f"step {step['step']} evaluation loss {step['eval_loss']:.6f}")


def context_parallel(args: TrainingArguments, cp: int | None) -> dist.DeviceMesh | None:
    """Groups of `cp` ranks next to each other, or of all; None for one process."""
    if args.world_size == 1:
        return None
    sizes = args.world_size // (cp or args.world_size), cp or args.world_size
    return dist.init_device_mesh(args.device.type, sizes, mesh_dim_names=("dp", "cp"))["cp"]


if __name__ == "__main__":
    main()
