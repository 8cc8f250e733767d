"""Refuses flags of burst that nothing in the run would read."""

from argparse import Namespace
from dataclasses import fields, replace

from megatron_burst.config import BurstConfig, FusedLossConfig, Tuning, given_tuning
from megatron_burst.errors import BurstError
from megatron_burst.mcore.flags import LOSS_FLAG
from megatron_burst.mcore.loss_arguments import wants_fused_loss


def check_unused(args: Namespace) -> None:
    """Refuse options of burst attention, or of its loss, without that which they are for.

    Keeping works with Megatron's own attention too.

    Raises:
        BurstError: on every rank alike, naming the flags.
    """
    runs_burst = getattr(args, "context_parallel_impl", None) == "burst"
    if not runs_burst and "burst" not in (getattr(args, "cp_comm_type", None) or ()):
        names = [f.name for f in fields(BurstConfig) if not f.name.startswith(("keep", "tuning"))]
        if replace(given_tuning(args), keep_debug=False) != Tuning():
            names.append("tune")
        _refuse_given(args, "burst", names, "--context-parallel-impl burst")
    if not wants_fused_loss(args):
        names = [f.name for f in fields(FusedLossConfig)]
        _refuse_given(args, "burst_loss", names, LOSS_FLAG)


def _refuse_given(args: Namespace, prefix: str, names: list[str], switch: str) -> None:
    given = [f"{prefix}_{n}" for n in names if getattr(args, f"{prefix}_{n}", None) is not None]
    if given:
        flags = " ".join(f"--{name}".replace("_", "-") for name in given)
        raise BurstError(
            f"{flags}: must come with {switch}, because nothing reads it otherwise; got no "
            f"{switch}; add it, or leave {flags} out"
        )
