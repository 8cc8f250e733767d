"""The flags of keeping attention's results across recomputation, and what must hold for them."""

from argparse import Namespace
from typing import get_args, get_type_hints

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError


def add_keep_flags(group) -> None:
    """The flags of keeping attention's results across recomputation."""
    group.add_argument(
        "--burst-keep",
        choices=get_args(get_type_hints(BurstConfig)["keep"]),
        help="which of attention's results stay for the replay of a recomputed layer",
    )
    group.add_argument(
        "--burst-keep-layers", type=int, metavar="N", help="of a stage; the others recompute"
    )
    for name, meaning in (
        ("offload", "put what is kept into pinned host memory"),
        ("offload-inputs", "and the inputs of recomputed layers too"),
        ("debug", "compare a replay's inputs with the first pass's"),
    ):
        flag = f"--burst-keep-{name}"
        group.add_argument(flag, action="store_true", default=None, help=meaning)
    for name, meaning in (
        ("host-gib", "most host memory of a rank for what is kept"),
        ("budget-gib", "device memory of a rank that --burst-keep auto may fill"),
    ):
        group.add_argument(f"--burst-keep-{name}", type=float, metavar="GIB", help=meaning)


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
