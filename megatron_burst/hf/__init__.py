"""Burst attention in transformers: importing this package registers `attn_implementation="burst"`.

`batch` shards a batch, `attention` computes with the shards, `calls` checks that a model uses them
and its loss is that of the whole batch, `fused` computes that loss without logits, `trainer` is for
accelerate's data loaders and transformers' Trainer. `refusals` has what is not supported.
"""

from megatron_burst.hf.attention import register
from megatron_burst.hf.batch import ShardedBatch, shard_batch
from megatron_burst.hf.trainer import ContextParallelMixin, prepare_data_loader

__all__ = ["ContextParallelMixin", "ShardedBatch", "prepare_data_loader", "shard_batch"]

register()
