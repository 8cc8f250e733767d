"""Burst's flags in Megatron's parser, what arguments ask of burst, and their checks.

Each flag sets the configuration field of its name, which defines type and legal values; help texts
are here. Nothing here loads Megatron.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_burst import config as configs
from megatron_burst.config import BurstConfig, tunings_of_args
from megatron_burst.errors import BurstError, require
from megatron_burst.kernels.backends import backends
from megatron_burst.logs import log_message
from megatron_burst.loss.options import FusedLossConfig
from megatron_burst.loss.statistics import LossOptions
from megatron_burst.mcore.refusals import FLAG, KEEP_FLAG, LOSS_FLAG, names_burst, refuse

_ATTENTION = {
    "intra": "inside a node: ring (pass shards from rank to rank), gather (all K and V of a few "
    "KV heads at a time) or a2a (all-to-all of heads, on several nodes over all ranks)",
    "inter": "between nodes: ring (around the mode inside nodes) or a2a (all-to-all of heads over "
    "all ranks); auto compares their bytes and how much of them kernels can hide",
    "invariant": "give the same bits on any number of ranks that divides the heads, with an "
    "all-to-all over all ranks; allows --batch-invariant-mode",
    "backend": "attention kernel",
    "keep": "which attention results to keep, so that attention is not recomputed: all, or those "
    "of the later half of the sequence; auto: whatever saves the most time in the memory that the "
    "first step leaves, including outputs of modules",
    "keep_layers": "keep only in the first N layers of a pipeline stage; the others recompute "
    "attention",
    "keep_offload": "offload to pinned host memory: kept results, the inputs of recomputed "
    "layers, or both",
    "keep_budget_gib": "device memory per rank that --burst-keep auto may add to full "
    "recomputation's peak; default: what the first step leaves",
}
_LOSS = {
    "label_smoothing": "probability that is spread over the other classes",
    "z_loss": "weight of the squared log-sum-exp in the loss",
    "softcap": "soft cap of the logits",
}


def add_flags(parser: ArgumentParser) -> None:
    """Add all of burst's flags to a parser."""
    group = parser.add_argument_group(
        "burst", "context parallelism with BurstAttention",
        conflict_handler="resolve",  # a Megatron with our diff already has the first one
    )  # fmt: skip
    group.add_argument(
        "--context-parallel-impl", choices=["megatron", "burst"], default="megatron",
        help="burst: use BurstAttention instead of Megatron's own context parallelism",
    )  # fmt: skip
    group.add_argument("--burst-plan", metavar="FILE", help="JSON file of a plan; sets all options "
                       "that the command line leaves out")  # fmt: skip
    group.add_argument(
        "--burst-dump-args", metavar="FILE",
        help="write the arguments of this run as JSON, for megatron-burst plan FILE, and exit",
    )  # fmt: skip
    _add_fields(group, "burst", BurstConfig, _ATTENTION)
    group.add_argument(
        "--burst-log", action="store_true", default=None,
        help="log time and bytes of attention's transfers in every step that Megatron logs",
    )  # fmt: skip
    group.add_argument("--burst-tune", action="append", type=_tuning, metavar="NAME=VALUE,...",
                       help=f"for experiments: {configs.legal_tunings()}")  # fmt: skip
    group = parser.add_argument_group("burst loss", "LM head and loss without storing the logits")
    group.add_argument(LOSS_FLAG, action="store_true", help="compute LM head and loss in tiles, "
                       "without ever storing all logits")  # fmt: skip
    _add_fields(group, "burst-loss", FusedLossConfig, _LOSS)


def _tuning(text: str) -> str:
    """The text, checked but unparsed, because checkpoints save it with the other arguments."""
    try:
        configs.parse_tunings(text)
    except BurstError as error:  # argparse would drop its message
        raise ArgumentTypeError(str(error)) from None
    return text


def _add_fields(group, prefix: str, config: type, meanings: Mapping[str, str]) -> None:
    kinds = get_type_hints(config)
    for name, meaning in meanings.items():
        flag = f"--{prefix}-{name}".replace("_", "-")
        group.add_argument(flag, help=meaning, **_options(name, kinds[name]))


def _options(name: str, kind: object) -> dict:
    """argparse options for a field's value; None if not given."""
    if name == "backend":
        return {"choices": ["auto", *backends()]}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": "store_true", "default": None}
    if int in get_args(kind):
        return {"type": int, "metavar": "N"}
    return {"type": float, "metavar": "GIB" if name.endswith("_gib") else "X"}


# ---- each feature's check of a command line -------------------------------------------------


def check_command(args: Namespace, who: str = FLAG) -> None:
    """`check_args` before Megatron validates, which also refuses what is checked only here.

    pretrain_vlm.py then sets `seq_length` to the number of its encoder's tokens.
    """
    refuse("command", args, who)
    check_args(args, who)


def check_args(args: Namespace, who: str = FLAG) -> None:
    """Refuse arguments under which burst attention would be wrong or meaningless.

    Every entry point calls this: the flag before Megatron validates, all when core attention is
    built.
    """
    nodes = tunings_of_args(args).get("nodes")
    refuse("run", Namespace(**vars(args) | {"burst_nodes": nodes}), who)
    with_attention_backend(BurstConfig.from_args(args), args)
    refuse("attention", args, who)


def check_keep_args(args: Namespace) -> None:
    """Refuse arguments under which nothing could be kept, or recomputation would differ."""
    keeps = args.burst_keep not in (None, "none")
    refuse("recompute", args, KEEP_FLAG if keeps else f"{KEEP_FLAG}-offload inputs")
    if keeps:
        refuse("keep", args, KEEP_FLAG)
    if args.burst_keep == "half":
        refuse("half", args, f"{KEEP_FLAG} half")
    if modules := tunings_of_args(args).get("keep_modules"):
        who = "--burst-tune keep_modules"
        refuse("modules", Namespace(**vars(args), burst_keep_modules=modules), who)


def check_loss_args(args: Namespace) -> None:
    """Refuse arguments under which the fused loss would be wrong or off."""
    config = FusedLossConfig.from_args(args)
    require(LOSS_FLAG, LossOptions(config.label_smoothing, config.z_loss, config.softcap).needs())
    refuse("loss", args, LOSS_FLAG)


def check_unused(args: Namespace) -> None:
    """Refuse options of burst attention or its loss that are given without the feature itself.

    Keeping works with Megatron's own attention too.
    """
    if not (wants_burst(args) or names_burst(getattr(args, "cp_comm_type", None))):
        names = [name for name in configs.OPTIONS if not name.startswith("keep")]
        tunings = {n: x for n, x in tunings_of_args(args).items() if not n.startswith("keep")}
        tunes = BurstConfig(**tunings) != BurstConfig()
        _refuse_given(args, "burst", [*names, *["tune"] * tunes, "log"], FLAG)
    if not wants_fused_loss(args):
        names = [f.name for f in fields(FusedLossConfig)]  # grads has no flag
        _refuse_given(args, "burst_loss", names, LOSS_FLAG)


def _refuse_given(args: Namespace, prefix: str, names: list[str], switch: str) -> None:
    names = [f"{prefix}_{name}" for name in names]
    flags = " ".join(f"--{name}".replace("_", "-") for name in names
                     if getattr(args, name, None) is not None)  # fmt: skip
    if flags:
        raise BurstError(f"{flags}: must come with {switch}, because it has no effect otherwise; "
                         f"got no {switch}; add it, or leave {flags} out")  # fmt: skip


# ---- what arguments ask for -----------------------------------------------------------------


def global_args() -> Namespace | None:
    """Megatron's parsed command line; None without one, or with Megatron-Core alone."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)  # get_args() fails without a command line


def wants_burst(args: Namespace) -> bool:
    """Whether the flag asks for burst attention."""
    return getattr(args, "context_parallel_impl", "megatron") == "burst"


def wants_fused_loss(args: Namespace) -> bool:
    """Whether the flag is given."""
    return getattr(args, "burst_fused_loss", False)


def force_args(args: Namespace) -> None:
    """Set arguments that burst implies and that change no result; logs it once."""
    changes, added = [], []
    if args.cp_comm_type in (None, ["p2p"]):
        args.cp_comm_type = ["burst"]
        if any(word.partition("=")[0] == "--cp-comm-type" for word in sys.argv):
            changes.append("replaces --cp-comm-type p2p by burst")
        else:
            added.append("--cp-comm-type burst")
    if args.create_attention_mask_in_dataloader:
        args.create_attention_mask_in_dataloader = False
        added.append("--no-create-attention-mask-in-dataloader")
    if added:
        changes.append(f"adds {' '.join(added)}")
    if changes and args.rank == 0:
        log_message(f"burst attention: {'; '.join(changes)}")


# burst's kernels of --attention-backend
_FAMILIES: dict[object, str] = {"flash": "fa4,flash,torch-cpu", "fused": "cudnn",
                                "unfused": "reference"}  # fmt: skip


def _attention_backend(options: Any) -> object:
    """The name in Megatron's arguments or configuration; None if not given."""
    backend = getattr(options, "attention_backend", None)
    return getattr(backend, "name", backend)


def with_attention_backend(burst: BurstConfig, options: Any) -> BurstConfig:
    """The configuration with the kernels that Megatron's options select: by `attention_backend`,
    and in invariant calls by `flash_attention_version`, which others refuse."""
    name = _attention_backend(options)
    refuse("backend", Namespace(attention_backend=name), "burst attention")
    family = _FAMILIES.get(name)
    if burst.invariant and name in (None, "auto", "flash"):
        is_fa4 = getattr(options, "flash_attention_version", None) == 4
        family = "fa4,torch-cpu" if is_fa4 else family
    if family is None:
        return burst
    if burst.backend == "auto":
        return replace(burst, backend=family)
    if not set(burst.backend.split(",")) <= set(family.split(",")):
        raise BurstError(f"--burst-backend: must be among {family} under --attention-backend "
                         f"{name}, because both name the kernel; got --burst-backend "
                         f"{burst.backend}; leave one of them out")  # fmt: skip
    return burst


def log_attention_backend(args: Namespace) -> None:
    """Log which kernels --attention-backend selects, if it is given."""
    only = BurstConfig(invariant=BurstConfig.from_args(args).invariant)
    backend = with_attention_backend(only, args).backend
    if backend != "auto" and args.rank == 0:
        log_message(f"burst attention: --attention-backend {_attention_backend(args)} selects the "
                    f"first of the kernels {backend} that supports a call")  # fmt: skip
