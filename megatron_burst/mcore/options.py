"""The options of a model: from its configuration, the command line or the environment.

Nothing here loads Megatron.
"""

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megatron_burst.config import FORCED, TUNINGS, BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.mcore import args as arguments
from megatron_burst.mcore.plan_file import OWN, own_flags, words_of

VARIABLE = "MEGATRON_BURST"
# which the variable names differently, or lacks
_OF_COMMAND_LINES = "burst_dump_args", "burst_tune", "burst_log"
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def burst_config_of(config: Any) -> BurstConfig:
    """`burst` of Megatron's TransformerConfig if set, else from its command line and, where that
    leaves them open, the environment; with the kernels of Megatron's `attention_backend`, unless
    that is auto."""
    burst = getattr(config, "burst", None)
    if burst is None:
        burst = BurstConfig.from_args(with_environment(arguments.global_args() or Namespace()))
    return arguments.with_attention_backend(burst, config)


def with_environment(args: Namespace) -> Namespace:
    """Arguments that take from MEGATRON_BURST what they leave open of burst's options, each tuning
    by itself.

    Megatron's parser need not have burst's flags, nor run in this process.

    Raises:
        BurstError: as `environment_args`.
    """
    options, own = environment_args(), getattr(args, "burst_tune", None) or []
    plans = options.burst_plan, getattr(args, "burst_plan", None)
    if None not in plans and plans[0] != plans[1]:
        raise BurstError(f"{VARIABLE}: plan= must be the file of --burst-plan if both are given, "
                         f"because a run follows one plan; got {plans[0]} and {plans[1]}; leave "
                         "one of them out")  # fmt: skip
    more = _unnamed(options.burst_tune or (), own)
    defaults = {name: value for name, value in vars(options).items() if name.startswith("burst_")}
    # 0.0 is set, as nothing else that is false is
    is_set = {name: x for name, x in vars(args).items() if x is not None and x is not False}
    return Namespace(**vars(args) | defaults | is_set | {"burst_tune": [*more, *own] or None})


def _unnamed(tunings: Iterable[str], named: Iterable[str]) -> list[str]:
    """Of tunings, "name=value", those whose names no others have; those may be joined by commas."""
    names = {pair.partition("=")[0].strip() for text in named for pair in text.split(",")}
    return [pair for pair in tunings if pair.partition("=")[0].strip() not in names]


def environment_args() -> Namespace:
    """The options in MEGATRON_BURST, as if given as flags.

    "keep=all,fused_loss=1,overlap=false": names are those of the flags without --burst-, and those
    of --burst-tune. Of "plan=FILE" burst's own flags that no other name sets are taken.

    Raises:
        BurstError: listing the valid ones, if a name is unknown or repeated, or its value invalid;
            if the file is not a plan.
    """
    return _parsed(os.environ.get(VARIABLE, ""))


@cache
def _parsed(text: str) -> Namespace:
    parser = _OfVariable(add_help=False)
    arguments.add_flags(parser)
    # for frameworks that build Megatron's models themselves: it has no flag
    parser.add_argument("--burst-log-probs", action="store_true", default=SUPPRESS)
    flags = {
        action.dest.removeprefix("burst_"): action for action in parser._actions
        if action.dest.startswith("burst_") and action.dest not in _OF_COMMAND_LINES
    }  # fmt: skip
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    names = [pair.partition("=")[0] for pair in pairs]
    words: list[str] = []
    for pair, name in zip(pairs, names, strict=True):
        value = pair.partition("=")[2]
        if name in (*TUNINGS, *FORCED):
            words += ["--burst-tune", pair]
        elif name not in flags or names.count(name) > 1:
            legal = ", ".join([*flags, *sorted(TUNINGS)])
            parser.error(f"{pair!r}; choose each name once among {legal}")
        elif flags[name].nargs != 0:
            words.append(f"{flags[name].option_strings[0]}={value}")
        elif value not in _SWITCH:
            parser.error(f"{pair!r}; choose one of {', '.join(_SWITCH)}")
        elif _SWITCH[value]:
            words.append(flags[name].option_strings[0])
    options = parser.parse_args(words)
    return options if options.burst_plan is None else _with_plan(parser, options, words, names)


def _with_plan(
    parser: ArgumentParser, options: Namespace, words: list[str], names: list[str]
) -> Namespace:
    """The variable's options, and what its plan adds to them."""
    flags = own_flags(Path(options.burst_plan))
    tunings = [pair for text in flags.pop("--burst-tune", []) for pair in text.split(",")]
    more = {
        flag: value for flag, value in flags.items()
        if flag.removeprefix(OWN).replace("-", "_") not in names
    }  # fmt: skip
    for pair in _unnamed(tunings, options.burst_tune or ()):
        words = ["--burst-tune", pair, *words]
    return parser.parse_args([*(word for flag in more.items() for word in words_of(*flag)), *words])


class _OfVariable(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BurstError(f"{VARIABLE}: it must hold name=value, joined by commas, because a "
                         f"misspelt option would be silently ignored; got {message}; correct it, "
                         "or unset it")  # fmt: skip
