"""What Megatron's arguments and configurations ask of burst, and what must hold for it.

Nothing here loads Megatron.
"""

import sys
from argparse import Namespace
from dataclasses import fields, replace
from typing import Any

from megatron_burst.config import BurstConfig, FusedLossConfig, Tuning, given_tuning
from megatron_burst.errors import BurstError
from megatron_burst.loss.options import LossOptions
from megatron_burst.mcore.flags import FLAG, KEEP_FLAG, LOSS_FLAG
from megatron_burst.mcore.refusals import check
from megatron_burst.say import say

# ---- each feature's check of a command line -------------------------------------------------


def check_args(args: Namespace, who: str = FLAG) -> None:
    """Refuse arguments under which burst attention would be wrong or meaningless.

    Every door comes here: the flag's before Megatron validates, all when core attention is built.
    """
    nodes = given_tuning(args).nodes
    check("run", Namespace(**vars(args) | {"burst_nodes": nodes}), who)
    with_attention_backend(BurstConfig.from_args(args), getattr(args, "attention_backend", None))
    mixed = len(args.cp_comm_type or ()) > 1  # layers then see to their windows one by one
    check("attention", args, who, skip=("window_size",) if mixed else ())


def check_keep_args(args: Namespace) -> None:
    """Refuse arguments under which nothing could be kept, or recomputation would differ."""
    keeps = args.burst_keep not in (None, "none")
    check("recompute", args, KEEP_FLAG if keeps else f"{KEEP_FLAG}-offload inputs")
    if keeps:
        check("keep", args, KEEP_FLAG)
    if args.burst_keep == "half":
        check("half", args, f"{KEEP_FLAG} half")


def check_loss_args(args: Namespace) -> None:
    """Refuse arguments under which the fused loss would be wrong or off."""
    config = FusedLossConfig.from_args(args)
    LossOptions(config.label_smoothing, config.z_loss, config.softcap)
    check("loss", args, LOSS_FLAG)


def check_unused(args: Namespace) -> None:
    """Refuse flags of burst attention, or of its loss, without that which they are for.

    Keeping works with Megatron's own attention too.
    """
    runs_burst = getattr(args, "context_parallel_impl", None) == "burst"
    if not runs_burst and "burst" not in (getattr(args, "cp_comm_type", None) or ()):
        names = [f.name for f in fields(BurstConfig) if not f.name.startswith(("keep", "tuning"))]
        if replace(given_tuning(args), keep_debug=False, keep_host_gib=None) != Tuning():
            names.append("tune")
        _refuse_given(args, "burst", names, FLAG)
    if not wants_fused_loss(args):
        names = [f.name for f in fields(FusedLossConfig)]  # grads has no flag
        _refuse_given(args, "burst_loss", names, LOSS_FLAG)


def _refuse_given(args: Namespace, prefix: str, names: list[str], switch: str) -> None:
    given = [f"{prefix}_{n}" for n in names if getattr(args, f"{prefix}_{n}", None) is not None]
    if given:
        flags = " ".join(f"--{name}".replace("_", "-") for name in given)
        raise BurstError(
            f"{flags}: must come with {switch}, because nothing reads it otherwise; got no "
            f"{switch}; add it, or leave {flags} out"
        )


# ---- what arguments ask for -----------------------------------------------------------------


def global_args() -> Namespace | None:
    """Megatron's parsed command line; None where there is none, or only Megatron-Core."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)  # get_args() fails without a command line


def wants_burst(args: Namespace) -> bool:
    """Whether the flag asks for burst attention."""
    return getattr(args, "context_parallel_impl", "megatron") == "burst"


def wants_fused_loss(args: Namespace) -> bool:
    """Whether the flag is given."""
    return getattr(args, "burst_fused_loss", False)


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


_FAMILIES = {  # of --attention-backend, in burst's kernels
    "flash": "fa4,fa3,flash-attn,flash,torch-cpu",
    "fused": "cudnn,te",
    "unfused": "reference",
}


def with_attention_backend(burst: BurstConfig, asked: object) -> BurstConfig:
    """The configuration with the kernels that Megatron's option stands for.

    Args:
        burst: as given.
        asked: Megatron's `attention_backend`, the enum's member or its name; None: not given.

    Raises:
        BurstError: if it names Megatron's own attention, or other kernels than `burst.backend`.
    """
    name = getattr(asked, "name", asked)
    if name in (None, "auto"):
        return burst
    check("backend", Namespace(attention_backend=name), "burst attention")
    family = _FAMILIES[str(name)]
    if burst.backend == "auto":
        return replace(burst, backend=family)
    if not set(burst.backend.split(",")) <= set(family.split(",")):
        raise BurstError(
            f"--burst-backend: must be among {family} under --attention-backend {name}, because "
            f"both name the kernel; got --burst-backend {burst.backend}; leave one of them out"
        )
    return burst


def say_attention_backend(args: Namespace) -> None:
    """Say what --attention-backend means, if it is given."""
    asked = getattr(args, "attention_backend", None)
    backend = with_attention_backend(BurstConfig(), asked).backend
    if backend != "auto" and args.rank == 0:
        say(
            f"burst attention: --attention-backend {getattr(asked, 'name', asked)} stands for the "
            f"first of its kernels {backend} that can do a call"
        )


def burst_config_of(config: Any) -> BurstConfig:
    """`config.burst` if somebody set it, else what Megatron's command line says, else defaults.

    The kernels are those of Megatron's `attention_backend`, unless it is auto.

    Args:
        config: Megatron's TransformerConfig.
    """
    given, args = getattr(config, "burst", None), global_args()
    if given is None:
        given = BurstConfig() if args is None else BurstConfig.from_args(args)
    return with_attention_backend(given, getattr(config, "attention_backend", None))
