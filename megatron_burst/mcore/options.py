"""The options of a model: from its configuration, the command line or the environment.

Nothing here loads Megatron.
"""

import os
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from functools import cache
from typing import Any, NoReturn

from megatron_burst.config import BurstConfig, Tuning
from megatron_burst.errors import BurstError
from megatron_burst.mcore.args import add_flags, global_args, with_attention_backend

VARIABLE = "MEGATRON_BURST"
# which the variable names differently, or lacks
_OF_COMMAND_LINES = "burst_plan", "burst_tune", "burst_log"
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def burst_config_of(config: Any) -> BurstConfig:
    """`burst` of Megatron's TransformerConfig if set, else from its command line, else from the
    environment; with the kernels of Megatron's `attention_backend`, unless that is auto."""
    given, args = getattr(config, "burst", None), global_args()
    if given is None:
        has_flags = args is not None and hasattr(args, "burst_keep")
        given = BurstConfig.from_args(args if has_flags else environment_args())
    return with_attention_backend(given, getattr(config, "attention_backend", None))


def environment_args() -> Namespace:
    """The options in MEGATRON_BURST, as if given as flags.

    "keep=all,fused_loss=1,overlap=false": names are those of the flags without --burst-, and those
    of `Tuning`.

    Raises:
        BurstError: listing the valid ones, if a name is unknown or repeated, or its value invalid.
    """
    return _parsed(os.environ.get(VARIABLE, ""))


@cache
def _parsed(text: str) -> Namespace:
    parser = _OfVariable(add_help=False)
    add_flags(parser)
    flags = {
        action.dest.removeprefix("burst_"): action for action in parser._actions
        if action.dest.startswith("burst_") and action.dest not in _OF_COMMAND_LINES
    }  # fmt: skip
    tunings = {field.name for field in fields(Tuning)}
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    names = [pair.partition("=")[0] for pair in pairs]
    words: list[str] = []
    for pair, name in zip(pairs, names, strict=True):
        value = pair.partition("=")[2]
        if name in tunings:
            words += ["--burst-tune", pair]
        elif name not in flags or names.count(name) > 1:
            legal = ", ".join([*flags, *sorted(tunings)])
            parser.error(f"got {pair!r}; its names are {legal}, each once")
        elif flags[name].nargs != 0:
            words.append(f"{flags[name].option_strings[0]}={value}")
        elif value not in _SWITCH:
            parser.error(f"got {pair!r}; it must be one of {', '.join(_SWITCH)}")
        elif _SWITCH[value]:
            words.append(flags[name].option_strings[0])
    return parser.parse_args(words)


class _OfVariable(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BurstError(
            f"{VARIABLE}: it must hold name=value, joined by commas, because a misspelt "
            f"option would be silently ignored: {message}; correct it, or unset it"
        )
