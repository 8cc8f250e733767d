"""Pretrain a GPT with Megatron-LM 0.19: a short script in the form of its own pretrain_gpt.py.

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --context-parallel-size 8 ...
    torchrun --nproc-per-node 8 -m megatron_burst examples/pretrain_gpt.py \
        --context-parallel-size 8 --context-parallel-impl burst ...

Nothing here knows about burst attention: the second command switches it on. The flags are
Megatron's plus --step-log FILE, --data-seed N, and two that pack samples: --document-lengths FILE
for --mock-data and --pack-documents for --data-path. Without a GPU, Megatron runs on the CPU
(megatron_burst.tools.cpu_mode).
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

if not torch.cuda.is_available():
    from megatron_burst.tools import cpu_mode

    cpu_mode.install()

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split
from packed_data import (
    PackedDataset,
    PackedMockDataset,
    TextDataset,
    check_packing,
    params_of,
)
from step_log import StepLog

from megatron_burst.mcore import patches

Batch = dict[str, torch.Tensor]
# Defaults that a first run would otherwise have to set; flags override them.
DEFAULTS = {
    "micro_batch_size": 1, "lr": 1e-3, "eval_iters": 0, "eval_interval": 1000, "log_interval": 1,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "tokenizer_type": "NullTokenizer", "vocab_size": 257,
}  # fmt: skip


def of_what_is_installed() -> dict[str, bool | str]:
    """Megatron's defaults need Apex and TransformerEngine: replace those that are not installed."""
    has_te, has_apex = bool(find_spec("transformer_engine")), bool(find_spec("apex"))
    return {
        "transformer_impl": "transformer_engine" if has_te else "local",
        "gradient_accumulation_fusion": bool(find_spec("fused_weight_gradient_mlp_cuda")),
        "masked_softmax_fusion": has_apex, "no_persist_layer_norm": not has_apex,
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's own flags to Megatron's."""
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="a JSON object per step")
    parser.add_argument(
        "--data-seed", type=int, metavar="N", help="of the order of samples; default: --seed"
    )
    parser.add_argument(
        "--document-lengths", type=Path, metavar="FILE",
        help="tokens of each document of a sample: those of --mock-data are packed so",
    )  # fmt: skip
    parser.add_argument(
        "--pack-documents", action="store_true",
        help="documents of --data-path see only themselves; each a multiple of 2 * CP tokens",
    )  # fmt: skip
    parser.set_defaults(**DEFAULTS, **of_what_is_installed())
    return parser


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the training, validation and test sets of --data-path (or of --mock-data).

    Every rank builds them and reads its own samples, so no batch is broadcast: the ranks of a
    tensor-parallel or context-parallel group have the same data-parallel rank, hence the same ones.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed if args.data_seed is None else args.data_seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # A causal model needs no mask, and a dense one takes sequence length squared bytes.
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        **({"inter_document_masking": True} if args.pack_documents else {}),  # 0.19's
    )
    dataset = MockGPTDataset if args.mock_data else TextDataset
    if args.pack_documents:
        dataset = PackedDataset
    if args.document_lengths:
        dataset = PackedMockDataset.of(args.document_lengths)
    return BlendedMegatronDatasetBuilder(dataset, num_samples, lambda: True, config).build()


def next_batch(data_iterator: Iterator[Batch]) -> Batch:
    """Return this context-parallel rank's chunks of the next micro-batch.

    Each is [micro_batch_size, s_local], in Megatron's zigzag layout: of the sample, or of each of
    its documents. "packed_seq_params" is what tells Megatron's attention about the documents.
    """
    samples = next(data_iterator)
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    batch = {name: samples[name].cuda(non_blocking=True) for name in names if name in samples}
    group = mpu.get_context_parallel_group()
    if "cu_seqlens" in batch:
        batch["cu_seqlens_padded"] = None
        shard = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        packed = params_of(batch["cu_seqlens"][0], samples["max_seqlen"])
        return shard | {"packed_seq_params": packed}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple:
    """Return the summed loss, its number of tokens, and both for the report."""
    loss_mask = loss_mask.float()
    loss = torch.sum(losses.float() * loss_mask)
    num_tokens = loss_mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens))}


def forward_step(data_iterator: Iterator[Batch], model: GPTModel) -> tuple:
    """Run the model on the next micro-batch; Megatron calls the loss function returned here."""
    return losses_of(next_batch(data_iterator), model)


def losses_of(batch: Batch, model: GPTModel) -> tuple:
    """Run the model on this rank's part of a micro-batch; the losses, and their loss function."""
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=batch.get("packed_seq_params"),
    )
    return losses, partial(loss_func, batch["loss_mask"])


def main(add_arguments: Callable = add_arguments, forward_step: Callable = forward_step) -> None:
    """Parse Megatron's flags and train; other scripts add flags, or call the model otherwise."""
    patches.apply("helpers")  # Megatron need not run make if its wheel has them built
    args = parse_and_validate_args(add_arguments)
    check_packing(args)
    train(args, gpt_config_from_args(args), datasets_provider, forward_step)


def train(
    args: argparse.Namespace, model: object, provider: Callable, forward_step: Callable
) -> None:
    """Train the model of a configuration on what a provider of data sets or loaders builds."""
    if args.step_log:
        StepLog(args.step_log)
    provider.is_distributed = True  # else only tensor-parallel rank 0 builds them
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
