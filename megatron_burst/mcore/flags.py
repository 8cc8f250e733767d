"""Burst's flags in Megatron's argument parser: each sets the field of its name in a configuration.

Types and legal values are the field's; here is what each means.
"""

from argparse import Action, ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from typing import Literal, get_args, get_origin, get_type_hints

from megatron_burst.config import BurstConfig, FusedLossConfig, Tuning
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends

FLAG = "--context-parallel-impl burst"
KEEP_FLAG = "--burst-keep"
LOSS_FLAG = "--burst-fused-loss"
TUNE_FLAG = "--burst-tune"

_ATTENTION = {
    "intra": "inside a node: pass shards on, gather a few heads, or an all-to-all of heads",
    "inter": "between nodes: a ring around intra, or an all-to-all of heads over all ranks; auto "
    "takes the one or the other by the bytes there and by what hides them",
    "deterministic": "bitwise the same gradients every time; --deterministic-mode implies it",
    "backend": "attention kernel",
    "hardware": "the machine, a preset or a TOML of megatron-burst calibrate: what is auto is then "
    "what simulation finds fastest",
    "keep": "which of attention's results stay for a layer's recomputation; auto needs "
    "--burst-keep-budget-gib",
    "keep_layers": "of a stage; the others recompute",
    "keep_offload": "to pinned host memory: results that are kept, inputs of recomputed layers",
    "keep_budget_gib": "device memory of a rank that --burst-keep auto may fill",
}
_LOSS = {
    "label_smoothing": "probability spread over other classes",
    "z_loss": "weight of the squared log-sum-exp",
    "softcap": "bound of the logits",
}


def add_flags(parser: ArgumentParser, on_impl: str | type[Action] = "store") -> None:
    """Add all of burst's flags to a parser.

    Args:
        parser: of Megatron, say.
        on_impl: argparse's action for --context-parallel-impl.
    """
    group = parser.add_argument_group(
        "burst",
        "context parallelism by BurstAttention",
        conflict_handler="resolve",  # a Megatron with our diff has the first one itself
    )
    group.add_argument(
        "--context-parallel-impl",
        action=on_impl,
        choices=["megatron", "burst"],
        default="megatron",
        help="burst: BurstAttention over nested rings instead of Megatron's own",
    )
    group.add_argument(
        "--burst-plan", metavar="FILE", help="a plan in JSON: sets the options that are not given"
    )
    _add_fields(group, "burst", BurstConfig, _ATTENTION)
    group.add_argument(
        TUNE_FLAG,
        action="append",
        type=_tuning,
        metavar="NAME=VALUE,...",
        help=f"for experiments: {Tuning.legal()}",
    )
    group = parser.add_argument_group("burst loss", "LM head and loss without logits")
    group.add_argument(
        LOSS_FLAG, action="store_true", help="compute the loss without ever making all logits"
    )
    _add_fields(group, "burst-loss", FusedLossConfig, _LOSS)


def _tuning(text: str) -> str:
    """The text, which is what checkpoints save with the other arguments, once it is read."""
    try:
        Tuning.parse(text)
    except BurstError as error:  # of whose sentence argparse would say nothing
        raise ArgumentTypeError(str(error)) from None
    return text


def _add_fields(group, prefix: str, config: type, meanings: Mapping[str, str]) -> None:
    kinds = get_type_hints(config)
    for name, meaning in meanings.items():
        flag = f"--{prefix}-{name}".replace("_", "-")
        group.add_argument(flag, help=meaning, **_options(name, kinds[name]))


def _options(name: str, kind: object) -> dict:
    """How argparse reads a field's value; nothing given means None."""
    if name == "backend":
        return {"choices": ["auto", *backends()]}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": "store_true", "default": None}
    if str in get_args(kind):
        return {"metavar": "NAME|FILE"}
    if int in get_args(kind):
        return {"type": int, "metavar": "N"}
    return {"type": float, "metavar": "GIB" if name.endswith("_gib") else "X"}
