"""TRL's GRPOTrainer on context-parallel ranks, without Megatron.

pip install trl
torchrun --nproc-per-node 2 examples/trl_grpo.py [--cp 2] [--steps 3]

TRL refuses GRPO with accelerate's cp_size. So accelerate sees data-parallel ranks only. The ranks
of a group get the same prompts and take the first one's answers; these are packed without padding
and sharded for the log-probabilities, which come back whole. Answers are generated with "sdpa". The
losses do not depend on the number of ranks in a group.
"""

import argparse

import torch
import torch.distributed as dist
from datasets import Dataset
from trainer import context_parallel
from transformers import AutoModelForCausalLM, Qwen3Config, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler
from trl_rows import values_of_rows
from trl_sft import TINY, bytes_tokenizer

from megatron_burst.hf import ContextParallelMixin


class BurstGRPOTrainer(ContextParallelMixin, GRPOTrainer):
    """GRPOTrainer whose log-probabilities are computed on shards."""

    def __init__(self, *arguments, cp_group, **options):
        super().__init__(*arguments, cp_group=cp_group, **options)
        self.ranks = 1 if cp_group is None else cp_group.size()
        # TRL's differ between ranks; a group generates and shuffles as one
        set_seed(self.args.seed + self.accelerator.process_index // self.ranks)

    def shard_inputs(self, inputs):
        return inputs  # prompts; their answers are sharded below

    def _get_train_sampler(self, dataset=None):
        args, steps = self.args, self.args.steps_per_generation
        return RepeatSampler(
            self.train_dataset if dataset is None else dataset, self.num_generations,
            batch_size=args.generation_batch_size // self.num_generations // self.ranks,
            repeat_count=self.num_iterations * steps, shuffle=self.shuffle_dataset, seed=args.seed,
        )  # fmt: skip

    def _generate_single_turn(self, *arguments, **options):
        self.model.set_attn_implementation("sdpa")
        answers = list(super()._generate_single_turn(*arguments, **options))
        self.model.set_attn_implementation("burst")
        if self.cp_group is not None:
            dist.broadcast_object_list(answers, group=self.cp_group.get_group(), group_src=0)
        return tuple(answers)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
        compute_entropy=False, compute_aux_loss=False, **images,
    ):  # fmt: skip
        assert not compute_aux_loss and not any(x is not None for x in images.values())
        labels = input_ids.clone()
        labels[:, :-logits_to_keep] = -100  # only answers are scored
        with self.accelerator.autocast():
            values = values_of_rows(model, self.cp_group, input_ids=input_ids,
                                    attention_mask=attention_mask, labels=labels)  # fmt: skip
        entropy = values.entropy[:, -logits_to_keep:] if compute_entropy else None
        return values.log_probs[:, -logits_to_keep:], entropy, None


def vowels(completion_ids, **others) -> list[float]:
    """A reward: how many of the answer's tokens are vowels."""
    known = bytes_tokenizer().convert_tokens_to_ids(list("aeiouAEIOU"))
    return [float(sum(token in known for token in ids)) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, help="ranks that shard a batch; default: all")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    args = GRPOConfig(
        output_dir="grpo", use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        per_device_train_batch_size=8, num_generations=4, max_completion_length=24,
        max_steps=options.steps, logging_steps=1, report_to="none", save_strategy="no",
        learning_rate=1e-3, disable_tqdm=True,
    )  # fmt: skip
    set_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation="burst")
    prompts = [f"{number} vowels, please" for number in range(1, 40, 7)] * 2
    trainer = BurstGRPOTrainer(
        model, vowels, args, cp_group=context_parallel(args, options.cp),
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=bytes_tokenizer(),
    )  # fmt: skip
    trainer.train()
    if args.process_index == 0:
        for step in trainer.state.log_history[: options.steps]:
            named = "loss", "reward", "grad_norm", "entropy"
            print(f"step {step['step']}", *(f"{name} {step[name]:.6f}" for name in named))


if __name__ == "__main__":
    main()
