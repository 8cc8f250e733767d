"""What must hold when Megatron's arguments ask for burst, and what then follows."""

import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Container, Iterator

from megatron_burst.config import BurstConfig, FusedLossConfig, given_tuning
from megatron_burst.errors import BurstError, Need, require
from megatron_burst.mcore.argument_values import OFF, other_value
from megatron_burst.mcore.attention_backend import say_attention_backend, with_attention_backend
from megatron_burst.mcore.flags import add_flags
from megatron_burst.mcore.keep_arguments import check_keep_args
from megatron_burst.mcore.loss_arguments import check_loss_args, loss_patches, wants_fused_loss
from megatron_burst.mcore.plan_arguments import check_plan, take_plans
from megatron_burst.mcore.switch import WHO, switch_on_burst
from megatron_burst.mcore.unused_flags import check_unused
from megatron_burst.plan.units import nearest_multiples
from megatron_burst.say import say


def with_flags(add_megatron_arguments, on_impl: str | type[Action] = "store"):
    """Replacement of `add_megatron_arguments` that adds burst's flags.

    Args:
        add_megatron_arguments: Megatron's.
        on_impl: what parsing --context-parallel-impl does.
    """

    def add_all(parser: ArgumentParser) -> ArgumentParser:
        parser = add_megatron_arguments(parser)
        add_flags(parser, on_impl)
        take_plans(parser)
        return parser

    return add_all


def validate_flags(validate_args):
    """Replacement of `validate_args` that checks burst's needs first and switches burst on."""

    def validate_all(args: Namespace, defaults=None):
        check_plan(args)
        wants_burst = getattr(args, "context_parallel_impl", "megatron") == "burst"
        check_unused(args)
        burst = BurstConfig.from_args(args)
        keeps = burst.keep != "none" or burst.keep_offload_inputs
        if wants_burst:
            check_args(args)
            force_args(args)
        if keeps:
            check_keep_args(args)
        if wants_fused_loss(args):
            check_loss_args(args)
        validated = validate_args(args, {} if defaults is None else defaults)
        if wants_burst:
            switch_on_burst()
            say_attention_backend(args)
        if keeps:
            from megatron_burst.mcore.keep import switch_on

            switch_on(burst)
        if wants_fused_loss(args):
            for patch in loss_patches(FusedLossConfig.from_args(args)):
                patch.apply()
        return validated

    return validate_all


def refuse_yaml(load_yaml):
    """Replacement of `load_yaml` that refuses burst: its result replaces the command line."""

    def load(yaml_path):
        own = any(word.startswith("--burst-") for word in sys.argv)
        if own or {"burst", "--context-parallel-impl=burst"} & set(sys.argv):
            raise BurstError(
                f"{WHO}: cannot run with --yaml-cfg, because Megatron then drops the command line; "
                f"got --yaml-cfg {yaml_path}; pass the file's values as flags"
            )
        return load_yaml(yaml_path)

    return load


def check_args(args: Namespace, who: str = WHO) -> None:
    """Refuse arguments under which burst attention would be wrong or meaningless.

    Every door comes here: the flag's before Megatron validates, all when core attention is built.

    Args:
        args: Megatron's.
        who: for the message.

    Raises:
        BurstError: on every rank alike, naming the flag to change.
    """
    require(who, _needs(args))
    with_attention_backend(BurstConfig.from_args(args), getattr(args, "attention_backend", None))
    mixed = len(args.cp_comm_type or ()) > 1  # layers then see to their windows one by one
    check_options(args, who, skip=("window_size",) if mixed else ())


def _needs(args: Namespace) -> Iterator[Need]:
    cp_size, hosts = args.context_parallel_size, given_tuning(args).hosts
    yield (
        cp_size == 1 or args.seq_length is None or args.seq_length % (2 * cp_size) == 0,
        "needs a sequence length divisible by twice the context parallel size, because zigzag "
        "gives each rank two chunks",
        f"--seq-length {args.seq_length} and --context-parallel-size {cp_size}",
        f"choose a {nearest_multiples(args.seq_length or 0, 2 * cp_size)}",
    )
    yield (
        hosts is None or (hosts >= 1 and cp_size % hosts == 0),
        "needs a number of hosts that divides the context parallel size, because nested rings "
        "need equally many ranks on each",
        f"--burst-tune hosts={hosts} and --context-parallel-size {cp_size}",
        f"choose among the divisors of {cp_size}",
    )
    kinds, pattern = args.cp_comm_type, getattr(args, "hybrid_layer_pattern", None)
    yield (
        kinds in (None, ["p2p"]) or "burst" in kinds,
        "needs burst in --cp-comm-type, because no layer would run burst otherwise",
        f"--cp-comm-type {' '.join(kinds or ())}",
        "leave it out, or name burst for the layers that shall run it",
    )
    yield (
        not pattern or set("*+") & set(pattern),
        "needs layers of attention (* or +), because none would run burst otherwise",
        f"--hybrid-layer-pattern {pattern}",
        f"leave out {WHO}",
    )


def check_options(options: object, who: str, skip: Container[str] = ()) -> None:
    """Refuse options that burst attention would ignore or compute wrongly.

    Args:
        options: Megatron's arguments, or a configuration with fields of the same names.
        who: for the message.
        skip: names that are checked elsewhere.

    Raises:
        BurstError: naming the flag to change.
    """
    for name, allowed, flag, reason, change in _UNSUPPORTED:
        value = None if name in skip else other_value(options, name, allowed)
        if value is not None:
            raise BurstError(
                f"{who}: cannot run with {flag}, because {reason}; got {name}={value}; {change}"
            )


def force_args(args: Namespace) -> None:
    """Set what follows from burst and changes no result; says so once."""
    forced = []
    if args.cp_comm_type in (None, ["p2p"]):
        args.cp_comm_type = ["burst"]
        forced.append("--cp-comm-type burst")
    if args.create_attention_mask_in_dataloader:
        args.create_attention_mask_in_dataloader = False
        forced.append("--no-create-attention-mask-in-dataloader")
    if forced and args.rank == 0:
        say(f"burst attention: adds {' '.join(forced)}")


_LEAVE_OUT = "leave it out"

# argument, values that burst supports, the flag, why others are refused, what to change
_UNSUPPORTED = (
    (
        "attention_dropout", (0.0,), "--attention-dropout", "kernels of a ring drop no weights",
        "pass --attention-dropout 0",
    ),
    (
        "reset_attention_mask", OFF, "--reset-attention-mask", "it would silently be ignored",
        _LEAVE_OUT,
    ),
    (
        "dataloader_inter_document_masking", OFF, "--dataloader-inter-document-masking",
        "packed documents are not supported yet", _LEAVE_OUT,
    ),
    ("sft", OFF, "--sft", "packed documents are not supported yet", _LEAVE_OUT),
    (
        "hybrid_context_parallel", OFF, "--hybrid-context-parallel",
        "its groups change from batch to batch", _LEAVE_OUT,
    ),
    (
        "use_kitchen_attention", OFF, "--use-kitchen-attention",
        "it replaces core attention too", _LEAVE_OUT,
    ),
    (
        "softmax_type", ("vanilla",), "--softmax-type", "attention sinks are not supported yet",
        _LEAVE_OUT,
    ),
    ("window_size", (), "--window-size", "sliding windows are not supported yet", _LEAVE_OUT),
    ("qk_clip", OFF, "--qk-clip", "the largest logit is not tracked", _LEAVE_OUT),
    (
        "log_max_attention_logit", OFF, "--log-max-attention-logit", "it is not tracked",
        _LEAVE_OUT,
    ),
    *(
        (name, OFF, f"--{name.replace('_', '-')}", "hops are not captured in CUDA graphs",
         _LEAVE_OUT)
        for name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    ),
    (
        "flash_attention_version", (), "--flash-attention-version",
        "it names a kernel of Megatron's own attention", "leave it out, or pass --burst-backend",
    ),
    (
        "experimental_attention_variant", ("gated_delta_net",), "--experimental-attention-variant",
        "it picks keys by itself instead of attending to all", _LEAVE_OUT,
    ),
    (
        "batch_invariant_mode", OFF, "--batch-invariant-mode",
        "its kernels are Megatron's own", _LEAVE_OUT,
    ),
    (
        "transformer_impl", ("local", "transformer_engine"), "--transformer-impl",
        "only local and transformer_engine have layers to train with",
        "pass --transformer-impl transformer_engine",
    ),
)  # fmt: skip
