"""Megatron's arguments in CPU mode: what needs CUDA is turned off, or refused where nothing can
stand in for it."""

from argparse import Namespace

from megatron_burst.errors import BurstError
from megatron_burst.mcore.argument_values import other_value


def adjust_args(args: Namespace) -> list[str]:
    """Turn off in Megatron's arguments what needs CUDA; return the flags that say the same.

    install(training=True) has validate_args do this, so nobody needs to pass these flags.

    Raises:
        BurstError: if an argument asks for what only GPUs have; on every rank alike.
    """
    _refuse_what_gpus_have(args)
    wanted = {
        "transformer_impl": ("local", "--transformer-impl local"),
        "distributed_backend": ("gloo", "--distributed-backend gloo"),
        # CUDA extensions: core/tensor_parallel/layers.py:51, core/fusions/fused_softmax.py:31
        "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
        "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
        # Transformer Engine's: core/transformer/transformer_config.py:2184
        "apply_rope_fusion": (False, "--no-rope-fusion"),
    }
    if getattr(args, "use_megatron_fsdp", False):
        # NCCL's: core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:4748
        wanted["gradient_reduce_div_fusion"] = (False, "--no-gradient-reduce-div-fusion")
    if other_value(args, "attention_backend") == "fused":  # the others have kernels for CPUs
        auto = type(args.attention_backend)["auto"]
        wanted["attention_backend"] = (auto, "--attention-backend auto")
    changed = []
    for name, (value, flag) in wanted.items():
        if getattr(args, name, value) != value:
            setattr(args, name, value)
            changed.append(flag)
    return changed


_OFF = (False, "none", [])
_CUDA_GRAPHS = "CUDA graphs"
_FOR_GPUS = (  # argument, values that CPUs can do, the flag, what others ask for
    ("fp8", _OFF, "--fp8-format", "8-bit kernels"),
    ("fp4", _OFF, "--fp4-format", "4-bit kernels"),
    ("cuda_graph_impl", _OFF, "--cuda-graph-impl", _CUDA_GRAPHS),
    ("enable_cuda_graph", _OFF, "--enable-cuda-graph", _CUDA_GRAPHS),
    ("external_cuda_graph", _OFF, "--external-cuda-graph", _CUDA_GRAPHS),
    ("tp_comm_overlap", _OFF, "--tp-comm-overlap", "TransformerEngine's layers"),
    ("moe_grouped_gemm", _OFF, "--moe-grouped-gemm", "grouped matrix products"),
    ("moe_permute_fusion", _OFF, "--moe-permute-fusion", "TransformerEngine's kernels"),
    (
        "moe_token_dispatcher_type", ("allgather", "alltoall"), "--moe-token-dispatcher-type",
        "all-to-alls by DeepEP or HybridEP",
    ),
    ("optimizer_cpu_offload", _OFF, "--optimizer-cpu-offload", "memory beside the host's"),
)  # fmt: skip


def _refuse_what_gpus_have(args: Namespace) -> None:
    for name, allowed, flag, needed in _FOR_GPUS:
        value = other_value(args, name, allowed)
        if value is not None:
            raise BurstError(
                f"CPU mode: {flag} must not ask for {needed}, because only GPUs have that; got "
                f"{name}={value}; leave it out, or run on GPUs"
            )
