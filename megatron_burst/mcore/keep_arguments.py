"""What must hold for attention's results to be kept across recomputation."""

from argparse import Namespace

from megatron_burst.errors import BurstError


def check_keep_args(args: Namespace) -> None:
    """Refuse arguments under which nothing could be kept, or a replay would differ.

    Raises:
        BurstError: on every rank alike, naming the flag to change.
    """
    who = "--burst-keep"
    if args.recompute_granularity is None:
        raise BurstError(
            f"{who}: activations must be recomputed, because results are kept for the replay; got "
            "no --recompute-granularity; pass --recompute-granularity full, or leave it out"
        )
    if args.burst_keep in (None, "none"):  # only the inputs of layers wait on the host
        return
    modules = getattr(args, "recompute_modules", None)
    if args.recompute_granularity == "selective" and modules and "core_attn" not in modules:
        raise BurstError(
            f"{who}: attention must be among what is recomputed, because its results are kept for "
            f"the replay; got --recompute-modules {' '.join(modules)}; add core_attn, or leave "
            f"{who} out"
        )
    if args.attention_dropout:
        raise BurstError(
            f"{who}: attention must not drop weights, because a replay that does not run it would "
            f"not draw its random numbers; got --attention-dropout {args.attention_dropout}; pass "
            "--attention-dropout 0"
        )
    if args.burst_keep == "half" and args.context_parallel_impl != "burst":
        raise BurstError(
            f"{who} half: attention must be burst's, because no other deals out rows anew; got "
            f"--context-parallel-impl {args.context_parallel_impl}; pass --burst-keep all, or "
            "--context-parallel-impl burst"
        )
