"""TRL's SFTTrainer with packing on context-parallel ranks, without Megatron.

pip install trl
torchrun --nproc-per-node 2 examples/trl_sft.py [--cp 2] [--steps 4]

TRL refuses packing with accelerate's cp_size, which replaces attention by torch's own. So
accelerate sees data-parallel ranks only: `ContextParallelMixin` gives the ranks of a group the same
batches, and shards them. The losses do not depend on the number of ranks in a group. TRL computes
the loss without logits itself.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainer import context_parallel, print_steps
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, set_seed
from trl import SFTConfig, SFTTrainer

from megatron_burst import BurstConfig
from megatron_burst.hf import ContextParallelMixin

TINY = dict(
    vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


class BurstSFTTrainer(ContextParallelMixin, SFTTrainer):
    """SFTTrainer whose batches are sharded over a context-parallel group."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, help="ranks that shard a batch; default: all")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    args = SFTConfig(
        output_dir="sft", use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        packing=True, max_length=510, per_device_train_batch_size=1, max_steps=options.steps,
        logging_steps=1, report_to="none", save_strategy="no", learning_rate=1e-3,
        gradient_checkpointing=True, disable_tqdm=True, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    group = context_parallel(args, options.cp)
    files = sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    texts = [path.read_text()[: 200 - 17 * place % 190] for place, path in enumerate(files)]
    set_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation="burst")
    trainer = BurstSFTTrainer(
        model, args, cp_group=group,
        # gradient checkpointing then recomputes all of a layer but attention
        shard_options={"config": BurstConfig(keep="all")},
        train_dataset=Dataset.from_dict({"text": texts[:-9]}),
        eval_dataset=Dataset.from_dict({"text": texts[-9:]}), processing_class=bytes_tokenizer(),
    )  # fmt: skip
    trainer.train()
    print_steps(trainer)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )  # fmt: skip


if __name__ == "__main__":
    main()
