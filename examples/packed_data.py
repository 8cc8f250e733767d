"""Samples of several documents, and how Megatron's attention learns of them (THD)."""

import sys
from argparse import Namespace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams


def check_packing(args: Namespace) -> None:
    """Stop a run whose samples would not be packed as its flags say.

    Megatron's own packing flags belong to its pretrain_gpt.py; the script here would ignore them.
    """
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            sys.exit(
                f"error: --{name.replace('_', '-')} must be left out, because this script would "
                "train on whole samples; pass --pack-documents with --data-path or "
                "--document-lengths FILE with --mock-data, or run Megatron-LM's own pretrain_gpt.py"
            )
    if args.document_lengths:
        tokens = sum(PackedMockDataset.of(args.document_lengths).lengths)
        if tokens != args.seq_length:
            sys.exit(
                f"error: the lengths in {args.document_lengths} must sum to --seq-length "
                f"{args.seq_length}, because a sample is full; got {tokens}; change either"
            )


class PackedMockDataset(MockGPTDataset):
    """Megatron's mock samples, packed: all have the same document lengths, shuffled per sample, so
    that steps take equally long and boundaries change with each one."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, path: Path) -> type["PackedMockDataset"]:
        """Return the dataset whose document lengths (whole numbers) are read from a file."""
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
        return type("PackedMockDataset", (cls,), {"lengths": tuple(map(int, words))})

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Add boundaries, int32 [documents + 1], and positions that restart at each document."""
        lengths = list(self.lengths)
        Random(idx).shuffle(lengths)
        return super().__getitem__(idx) | {
            "position_ids": torch.cat([torch.arange(length) for length in lengths]),
            "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            "max_seqlen": max(lengths),
        }


class TextDataset(GPTDataset):
    """Samples of --data-path, of a split that has documents.

    Of one without, Megatron counts epochs for ever (gpt_dataset.py, _get_num_epochs).
    """

    def __init__(self, indexed_dataset, dataset_path, documents, samples, split, config) -> None:
        if not len(documents):
            sys.exit(
                f"error: --split {config.split} must leave each part documents, because samples "
                f"are made of them; got none for {split.name} of {dataset_path}; pass "
                "--split 100,0,0 --eval-iters 0, or more documents"
            )
        super().__init__(indexed_dataset, dataset_path, documents, samples, split, config)


class PackedDataset(TextDataset):
    """Samples of --data-path whose documents do not see each other.

    Megatron's own data set says where they end. Each must be a multiple of 2 * CP tokens (data.py
    --multiple): TransformerEngine's sharding assumes this and does not check.
    """

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Add boundaries, int32 [documents + 1], and positions that restart at each document."""
        sample = super().__getitem__(idx)
        boundaries = sample["cu_seqlens"].unique_consecutive()  # the last one is repeated
        pieces = 2 * self.config.context_parallel_size
        if (boundaries % pieces).any():
            raise ValueError(
                f"--pack-documents needs documents of multiples of {pieces} tokens, because each "
                f"rank holds two chunks of each; got boundaries {boundaries[:8].tolist()}; write "
                f"the data with data.py --multiple {pieces}"
            )
        # the same bound in every step: some kernels compile for it
        return sample | {"cu_seqlens": boundaries, "max_seqlen": self.config.sequence_length}


def params_of(cu_seqlens: torch.Tensor, max_seqlen: torch.Tensor) -> PackedSeqParams:
    """Parameters of documents without padding, as Megatron's pretrain_gpt.py makes them.

    Args:
        cu_seqlens: int32 [documents + 1], on the device of the tokens.
        max_seqlen: [1], on the CPU, so that nothing waits for the GPU.
    """
    longest = int(max_seqlen)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens, cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
