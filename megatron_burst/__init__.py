"""megatron_burst: BurstAttention as the context parallelism of Megatron-LM, without a fork.

Importing the package loads neither torch nor megatron; the names below load what they need.
`__init__.pyi` has the same names for type checkers.
"""

from megatron_burst.version import __version__

_HOME_OF = {
    "BalancedBatches": "megatron_burst.mcore.balanced",
    "BurstConfig": "megatron_burst.config",
    "Force": "megatron_burst.force",
    "BurstError": "megatron_burst.errors",
    "CPGroups": "megatron_burst.comm.cp_groups",
    "SlicedSeqParams": "megatron_burst.mcore.sliced",
    "burst_attention": "megatron_burst.attention",
    "cp_groups": "megatron_burst.comm.cp_groups",
    "count_supervised": "megatron_burst.loss.supervised",
    "distillation_loss": "megatron_burst.loss.distillation",
    "fuse_loss": "megatron_burst.mcore.fused_loss",
    "linear_cross_entropy": "megatron_burst.loss.linear",
    "next_tokens": "megatron_burst.loss.next_tokens",
    "position_ids": "megatron_burst.shards",
    "shard": "megatron_burst.shards",
    "class_log_probs": "megatron_burst.loss.distillation",
    "token_log_probs": "megatron_burst.loss.linear",
    "top_k_kl": "megatron_burst.loss.distillation",
    "top_k_log_probs": "megatron_burst.loss.distillation",
    "burst_spec": "megatron_burst.spec",
    "keep": "megatron_burst.recompute.keep",
    "unshard": "megatron_burst.shards",
}
__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name]), name)
