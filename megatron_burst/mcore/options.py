"""The options of a model: from its configuration, the command line or the environment.

Nothing here loads Megatron.
"""

import os
from argparse import ArgumentParser, Namespace
from functools import cache
from typing import Any, NoReturn

from megatron_burst.config import TUNINGS, BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore.args import add_flags, global_args, with_attention_backend

VARIABLE = "MEGATRON_BURST"
# which the variable names differently, or lacks
_OF_COMMAND_LINES = "burst_plan", "burst_dump_args", "burst_tune", "burst_log"
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def burst_config_of(config: Any) -> BurstConfig:
    """`burst` of Megatron's TransformerConfig if set, else from its command line and, where that
    leaves them open, the environment; with the kernels of Megatron's `attention_backend`, unless
    that is auto."""
    given = getattr(config, "burst", None)
    if given is None:
        given = BurstConfig.from_args(with_environment(global_args() or Namespace()))
    return with_attention_backend(given, getattr(config, "attention_backend", None))


def with_environment(args: Namespace) -> Namespace:
    """Arguments that take from MEGATRON_BURST what they leave open of burst's options, each tuning
    by itself.

    Megatron's parser need not have burst's flags, nor run in this process.

    Raises:
        BurstError: as `environment_args`.
    """
    options, own = environment_args(), getattr(args, "burst_tune", None) or []
    named = {pair.partition("=")[0].strip() for text in own for pair in text.split(",")}
    more = [pair for pair in options.burst_tune or () if pair.partition("=")[0] not in named]
    taken = {name: value for name, value in vars(options).items() if name.startswith("burst_")}
    given = {name: value for name, value in vars(args).items() if _is_given(value)}
    tunings = {"burst_tune": [*more, *own] or None}
    return Namespace(**vars(args) | taken | given | tunings)


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # but 0.0 is


def environment_args() -> Namespace:
    """The options in MEGATRON_BURST, as if given as flags.

    "keep=all,fused_loss=1,overlap=false": names are those of the flags without --burst-, and those
    of --burst-tune.

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
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    names = [pair.partition("=")[0] for pair in pairs]
    words: list[str] = []
    for pair, name in zip(pairs, names, strict=True):
        value = pair.partition("=")[2]
        if name in TUNINGS:
            words += ["--burst-tune", pair]
        elif name not in flags or names.count(name) > 1:
            legal = ", ".join([*flags, *sorted(TUNINGS)])
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
