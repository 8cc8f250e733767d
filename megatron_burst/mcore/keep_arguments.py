"""What must hold for attention's results to be kept across recomputation."""

from argparse import Namespace

from megatron_burst.errors import BurstError
from megatron_burst.mcore.argument_values import other_value

_WHO = "--burst-keep"

# argument, values that are refused (None: all but off), what must hold and why, what to change
_GRAPHS = tuple(
    (name, None, "CUDA graphs must be off, because they run kernels again without the code that "
     "hands over what waits", "leave it out")
    for name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
)  # fmt: skip
_NOT_KEPT = (
    (
        "experimental_attention_variant", ("dsa",),
        "attention must be softmax attention over all keys, because no other is kept",
        f"leave {_WHO} out",
    ),
    (
        "use_kitchen_attention", None, "attention must be burst's, TransformerEngine's or "
        "Megatron's own, because no other is kept", f"leave {_WHO} out",
    ),
)  # fmt: skip


def check_keep_args(args: Namespace) -> None:
    """Refuse arguments under which nothing could be kept, or a replay would differ.

    Raises:
        BurstError: on every rank alike, naming the flag to change.
    """
    granularity = args.recompute_granularity
    if granularity is None and getattr(args, "recompute_activations", False):
        granularity = "selective"  # as Megatron will have it
    keeps = args.burst_keep not in (None, "none")
    who = _WHO if keeps else f"{_WHO}-offload-inputs"
    if granularity is None:
        raise BurstError(
            f"{who}: activations must be recomputed, because it is for the replay that something "
            "waits; got no --recompute-granularity; pass --recompute-granularity full, or leave "
            f"{who} out"
        )
    _refuse(args, who, _GRAPHS)
    if not keeps:
        return
    modules = getattr(args, "recompute_modules", None)
    if granularity == "selective" and modules and "core_attn" not in modules:
        raise BurstError(
            f"{_WHO}: attention must be among what is recomputed, because its results are kept for "
            f"the replay; got --recompute-modules {' '.join(modules)}; add core_attn, or leave "
            f"{_WHO} out"
        )
    if args.attention_dropout:
        raise BurstError(
            f"{_WHO}: attention must not drop weights, because a replay that does not run it would "
            f"not draw its random numbers; got --attention-dropout {args.attention_dropout}; pass "
            "--attention-dropout 0"
        )
    _refuse(args, _WHO, _NOT_KEPT)
    if args.burst_keep == "half":
        _check_half(args)


def _refuse(args: Namespace, who: str, unsupported: tuple) -> None:
    for name, refused, must, change in unsupported:
        value = other_value(args, name)
        if value is not None and (refused is None or value in refused):
            flag = f"--{name.replace('_', '-')}"
            raise BurstError(f"{who}: {must}; got {flag} {value}; {change}")


def _check_half(args: Namespace) -> None:
    """Refuse half where a layer that keeps would run other attention than burst's."""
    kinds, runs_burst = args.cp_comm_type or [], args.context_parallel_impl == "burst"
    got = f"--context-parallel-impl {args.context_parallel_impl}"
    if "burst" in kinds:
        runs_burst = set(kinds) == {"burst"} or args.burst_keep_layers is not None
        got = f"--cp-comm-type {' '.join(kinds)}"
    if not runs_burst:
        raise BurstError(
            f"{_WHO} half: attention must be burst's, because no other deals out rows anew; got "
            f"{got}; pass --burst-keep all, or --context-parallel-impl burst"
        )
