"""TRL's DPOTrainer on context-parallel ranks, without Megatron.

pip install trl
torchrun --nproc-per-node 2 examples/trl_dpo.py [--cp 2] [--steps 3]

accelerate sees data-parallel ranks only. The ranks of a group get the same pairs of answers; the
rows of a pair are packed without padding and sharded for the log-probabilities, of the model and of
its reference, which come back whole. The losses do not depend on the number of ranks in a group.
"""

import argparse
from functools import partial

import torch
from datasets import Dataset
from trainer import context_parallel
from transformers import AutoModelForCausalLM, Qwen3Config, set_seed
from trl import DPOConfig, DPOTrainer
from trl_rows import values_of_rows
from trl_sft import TINY, bytes_tokenizer

from megatron_burst.hf import ContextParallelMixin


class BurstDPOTrainer(ContextParallelMixin, DPOTrainer):
    """DPOTrainer whose log-probabilities are computed on shards."""

    def shard_inputs(self, inputs):
        return inputs  # pairs of answers; their rows are sharded below

    def _compute_loss(self, model, inputs, return_outputs):
        reference = self.ref_model
        self.ref_model = partial(values_of_rows, reference, self.cp_group)
        try:
            on_shards = partial(values_of_rows, model, self.cp_group)
            return super()._compute_loss(on_shards, inputs, return_outputs)
        finally:
            self.ref_model = reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, help="ranks that shard a batch; default: all")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    args = DPOConfig(
        output_dir="dpo", use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        per_device_train_batch_size=2, max_steps=options.steps, logging_steps=1,
        report_to="none", save_strategy="no", learning_rate=1e-3, disable_tqdm=True,
    )  # fmt: skip
    group = context_parallel(args, options.cp)
    pairs = {
        "prompt": [f"Count to {number}: " for number in range(2, 9)] * 4,
        "chosen": [" ".join(map(str, range(1, number + 1))) for number in range(2, 9)] * 4,
        "rejected": ["no " * number for number in range(2, 9)] * 4,
    }
    set_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation="burst")
    set_seed(0)
    reference = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation="burst")
    trainer = BurstDPOTrainer(
        model, reference, args, cp_group=group, train_dataset=Dataset.from_dict(pairs),
        processing_class=bytes_tokenizer(),
    )  # fmt: skip
    trainer.train()
    if args.process_index == 0:
        for step in trainer.state.log_history[: options.steps]:
            named = "loss", "grad_norm", "rewards/margins"
            print(f"step {step['step']}", *(f"{name} {step[name]:.6f}" for name in named))


if __name__ == "__main__":
    main()
