"""`--burst-plan FILE`: a run takes a plan's decisions, and must be the run that was planned.
`--burst-dump-args FILE`: writes what a plan must know of a run."""

import json
import os
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from megatron_burst.errors import BurstError
from megatron_burst.files import Count, Limits, LongText, Reader, excerpt, harmless
from megatron_burst.logs import log_message, log_message_once
from megatron_burst.rates import Rates

FLAG, DUMP_FLAG = "--burst-plan", "--burst-dump-args"
OWN = "--burst-"  # burst's options on the command line win
# and so do options that no figure depends on
_NO_FIGURE = ("--max-position-embeddings", "--ckpt-format")
# Megatron's names of a planned model's sizes
_SIZES = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads_q",
          "ffn_hidden_size": "ffn"}  # fmt: skip
_WHY, _CHANGE = "the run takes its options from there", "make it with megatron-burst plan"
_ANY = Limits(-1e15)
_Word = str | bool | Annotated[int, _ANY] | Annotated[float, _ANY]
_Size = Count | None
_Parse = Callable[..., tuple[Namespace, list[str]]]


@dataclass(frozen=True, slots=True)
class _Experts:
    count: _Size = None


@dataclass(frozen=True, slots=True)
class _Model:
    layers: _Size = None
    hidden: _Size = None
    heads_q: _Size = None
    heads_kv: _Size = None
    ffn: _Size = None
    experts: _Experts | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    model: _Model | None = None
    gpus: _Size = None


@dataclass(frozen=True, slots=True)
class _Best:
    fits: bool | None = None
    why: LongText | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs to know of the JSON of `megatron-burst plan`."""

    flags: Mapping[str, _Word | tuple[_Word, ...]]
    job: _Job | None = None
    rates: Rates | None = None
    best: _Best | None = None


def take_plans(parser: ArgumentParser, then: Callable[[Namespace], None]) -> None:
    """Make a parser fill in what the command line leaves open from the file of `--burst-plan`, and
    call `then` with the complete arguments; or write them down and end.

    It raises BurstError on every rank if the file is not a plan, has flags or values that the
    parser does not know, or contradicts the command line. For burst's own options the command line
    wins.
    """
    parse = parser.parse_known_args

    def parse_with_plan(args: Sequence[str] | None = None, namespace: Namespace | None = None):
        words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = parse(words, namespace)
        if parsed.burst_plan is not None:
            _fill(parser, parse, parsed, words)
        if parsed.burst_dump_args is not None:
            _dump(parser, parse, parsed, words)
        then(parsed)
        return parsed, unknown

    parser.parse_known_args = parse_with_plan


def _dump(parser: ArgumentParser, parse: _Parse, parsed: Namespace, words: Sequence[str]) -> None:
    """Write the arguments that the command line or the script's own defaults give, by their names,
    as JSON for `megatron-burst plan`; ends the process."""
    if os.environ.get("RANK", "0") == "0":
        absent, own = object(), parser._defaults  # by set_defaults, which is for scripts
        defaults = {action.dest: absent for action in parser._actions}
        by_name = vars(parse(words, Namespace(**defaults))[0])
        names = [name for name, value in by_name.items() if value is not absent or name in own]
        path = Path(parsed.burst_dump_args)
        values = {name: getattr(parsed, name) for name in names if name != "burst_dump_args"}
        try:
            path.write_text(json.dumps({"megatron_arguments": values}, indent=1, default=str))
        except OSError as error:
            raise BurstError(
                f"{DUMP_FLAG}: the file must be writable, because the arguments are written there; "
                f"got {path}: {error.strerror}; name another file"
            ) from None
        log_message(f"{DUMP_FLAG}: wrote {path}; this run ends here")
    sys.exit(0)


def _fill(parser: ArgumentParser, parse: _Parse, run: Namespace, words: Sequence[str]) -> None:
    path, actions = run.burst_plan, parser._option_string_actions
    flags = read_plan(Path(path)).flags
    legal = [flag for flag in actions if flag not in (FLAG, DUMP_FLAG)]
    for flag in flags:
        if flag not in legal:
            near = get_close_matches(flag, legal, n=1)
            change = f"write {near[0]}" if near else "leave it out"
            raise _refusal(f"{path} must name existing flags", flag, change)
    planned = _args(parser, parse, flags, path)
    names, added = {word.partition("=")[0] for word in words} & actions.keys(), []
    for flag in flags:
        dest, text = actions[flag].dest, words_of(flag, flags[flag])
        value, in_run = getattr(planned, dest), getattr(run, dest)
        same = sorted(name for name in names if actions[name].dest == dest)
        if not same:
            setattr(run, dest, value)
            added += text
        elif value != in_run and not flag.startswith(OWN) and flag not in _NO_FIGURE:
            in_plan = " ".join(text) or f"no {flag}"
            got = f"{in_plan} in the plan and {same[0] if isinstance(in_run, bool) else in_run}"
            must = f"the run must be the one that {path} was made for"
            change = f"leave {same[0]} out of the run, or plan again"
            raise _refusal(must, f"{got} in the run", change)
    if added and os.environ.get("RANK", "0") == "0":
        # Megatron parses thrice (training/inprocess_restart.py:133, ft_integration.py:78)
        log_message_once(harmless(f"burst attention: {path} adds {' '.join(added)}"))


def _args(parser: ArgumentParser, parse: _Parse, flags: Mapping[str, Any], path: str) -> Namespace:
    """A plan's flags as the command line would have them, with the same checks of values."""
    words = [word for flag, value in flags.items() for word in words_of(flag, value)]
    exits, parser.exit_on_error = parser.exit_on_error, False
    try:
        return parse(words)[0]
    except ArgumentError as error:
        raise _refusal(f"{path} must have values that its flags accept", str(error)) from None
    finally:
        parser.exit_on_error = exits


def read_plan(path: Path) -> Plan:
    """What a run needs to know of a plan.

    Raises:
        BurstError: if the file cannot be read, or is no plan.
    """
    reader = Reader(FLAG, str(path), _WHY, _CHANGE)
    plan: Plan = reader.typed(Plan, data := reader.json(), closed=False)
    reader.typed(Rates | None, data.get("rates"), "rates")  # no others
    for flag in plan.flags:
        if not flag.startswith("--"):
            raise reader.refusal("map flags to values", flag, "flags")
    return plan


def own_flags(path: Path) -> dict[str, Any]:
    """Burst's own flags in a plan: what a framework without Megatron's command line takes of it."""
    flags = {flag: value for flag, value in read_plan(path).flags.items()
             if flag.startswith(OWN)}  # fmt: skip
    tunings = flags.get("--burst-tune")
    return flags | ({"--burst-tune": [tunings]} if isinstance(tunings, str) else {})


def rates_of(args: Namespace) -> Rates:
    """Speeds of the GPUs that the run's plan is for, by Megatron's parsed arguments; the defaults
    without one."""
    path = getattr(args, "burst_plan", None)
    return (read_plan(Path(path)).rates if path is not None else None) or Rates()


def check_plan(args: Namespace) -> None:
    """Refuse a plan for another model or number of GPUs, and one that would not run.

    `args`: Megatron's parsed arguments, not validated yet.
    """
    path = getattr(args, "burst_plan", None)
    if path is None:
        return
    plan = read_plan(Path(path))
    for name, size, in_run in _sizes(args, plan.job or _Job()):
        if None not in (size, in_run) and size != in_run:
            must = f"the run must be the one that {path} was made for"
            got = f"{name} {size} in the plan and {in_run} in the run"
            raise _refusal(must, got, "plan again for this run")
    if plan.best and plan.best.fits is False:
        must = f"the strategy of {path} must fit in memory"
        raise _refusal(must, plan.best.why or "", "plan other sizes, or leave the file out")


def _sizes(args: Namespace, job: _Job) -> list[tuple[str, Any, Any]]:
    """Names, sizes in the plan and in the run; None if unknown."""
    model = job.model or _Model()
    planned = {name: getattr(model, size) for name, size in _SIZES.items()}
    planned |= {"world_size": job.gpus}
    if getattr(args, "group_query_attention", False):
        planned["num_query_groups"] = model.heads_kv
    if model.experts:
        planned["num_experts"] = model.experts.count
    return [(name, size, getattr(args, name, None)) for name, size in planned.items()]


def words_of(flag: str, value: Any) -> list[str]:
    """A plan's flag as words of a command line."""
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, *map(str, value if isinstance(value, list | tuple) else [value])]


def _refusal(must: str, got: str, change: str = _CHANGE) -> BurstError:
    return BurstError(f"{FLAG}: {must}, because {_WHY}; got {excerpt(got, 500)}; {change}")
