"""`--burst-plan FILE`: a run takes burst's options from a plan, and must be the run it is for."""

import json
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.mcore.flags import add_flags
from megatron_burst.plan.tables import nearest
from megatron_burst.say import say

FLAG = "--burst-plan"
_SIZES = {  # Megatron's names of a planned model's sizes
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads_q",
}


def apply_plan(args: Namespace) -> None:
    """Set burst's options that the command line leaves open to what the plan says.

    Args:
        args: Megatron's parsed arguments, not validated yet.

    Raises:
        BurstError: on every rank alike, if the file is no plan, knows other flags than Megatron and
            burst, or was made for other sizes than those of the run.
    """
    path = getattr(args, "burst_plan", None)
    if path is None:
        return
    plan = read_plan(Path(path))
    flags = plan["flags"]
    _check_job(args, plan, path)
    own = {flag: value for flag, value in flags.items() if flag.startswith("--burst-")}
    planned = _parsed(own, path)
    _check_run(args, {f: v for f, v in flags.items() if f not in own}, path)
    taken = []
    for flag in own:
        name = _name(flag)
        if not _is_given(getattr(args, name)) and _is_given(getattr(planned, name)):
            setattr(args, name, getattr(planned, name))
            taken.append(_in_words(flag, own[flag]))
    if taken and getattr(args, "rank", 0) == 0:
        say(f"burst attention: {path} adds {' '.join(taken)}")


def _is_given(value: Any) -> bool:
    return value is not None and value is not False  # 0.0 is


def read_plan(path: Path) -> dict[str, Any]:
    """A plan that `megatron-burst plan` wrote, or a file with the same `flags` and no more.

    Raises:
        BurstError: if it cannot be read, or has no flags.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(
            f"{path} must be a file that can be read", error.strerror or str(error)
        ) from None
    except ValueError as error:  # JSON's own errors and those of text
        raise _refusal(f"{path} must be JSON", str(error)) from None
    flags = plan.get("flags") if isinstance(plan, dict) else None
    if not isinstance(flags, dict):
        got = type(plan).__name__
        if isinstance(plan, dict):
            missing = f"none{nearest('flags', plan)}" if plan else "an empty object"
            got = missing if flags is None else f"flags: {json.dumps(flags)}"
        raise _refusal(f'{path} must hold an object "flags"', got)
    for flag, value in flags.items():
        if not flag.startswith("--") or not _is_simple(value):
            raise _refusal(f"{path} must map flags to values", f"{flag}: {json.dumps(value)}")
    return plan


def _check_job(args: Namespace, plan: Mapping[str, Any], path: str) -> None:
    """Refuse a plan of another model or number of GPUs, and one that does not fit in memory."""
    job = plan.get("job") or {}
    model = job.get("model") or {}
    planned = {name: model.get(size) for name, size in _SIZES.items()} | {
        "world_size": job.get("gpus")
    }
    for name, size in planned.items():
        found = getattr(args, name, None)
        if None not in (size, found) and size != found:
            raise _refusal(
                f"the run must be the one that {path} was made for",
                f"{name} {size} in the plan and {found} in the run",
                "plan again for this run",
            )
    if (plan.get("best") or {}).get("fits") is False:
        raise _refusal(
            f"the strategy of {path} must fit in memory", f"fits false: {plan['best'].get('why')}",
            "plan with --search, or leave the file out",
        )  # fmt: skip


def _is_simple(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_simple(item) and not isinstance(item, list) for item in value)
    return isinstance(value, str | int | float | bool)


def _parsed(own: Mapping[str, Any], path: str) -> Namespace:
    """Burst's flags as the command line would have them, with the same checks of values."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser)
    known = [
        flag
        for flag in parser._option_string_actions
        if flag.startswith("--burst-") and flag != FLAG
    ]
    words = []
    for flag, value in own.items():
        if flag not in known:
            near = get_close_matches(flag, known, n=1)
            change = f"write {near[0]}" if near else "leave it out"
            raise _refusal(f"{path} must name flags that there are", flag, change)
        words += _words(flag, value)
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        raise _refusal(f"{path} must give values that its flags take", str(error)) from None


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, *map(str, value if isinstance(value, list) else [value])]


def _check_run(args: Namespace, others: Mapping[str, Any], path: str) -> None:
    """Refuse a run that is not the one that was planned: its figures would be others."""
    for flag, planned in others.items():
        there, found = _of_run(args, flag)
        if not there:
            known = [f"--{name.replace('_', '-')}" for name in vars(args)]
            near = get_close_matches(flag, known, n=1)
            change = f"write {near[0]}" if near else "leave it out"
            raise _refusal(f"{path} must name flags that there are", flag, change)
        if not _equal(planned, found):
            raise _refusal(
                f"the run must be the one that {path} was made for",
                f"{_in_words(flag, planned)} in the plan and {found} in the run",
                f"pass {_in_words(flag, planned)}, or plan again",
            )


def _of_run(args: Namespace, flag: str) -> tuple[bool, Any]:
    """Whether a flag is an argument of the run, and its value there."""
    name = _name(flag)
    if hasattr(args, name):
        return True, getattr(args, name)
    positive = name.removeprefix("no_")
    if name.startswith("no_") and isinstance(getattr(args, positive, None), bool):
        return True, not getattr(args, positive)
    return False, None


def _equal(planned: Any, found: Any) -> bool:
    if isinstance(planned, list) or isinstance(found, list | tuple):
        both = [list(x) if isinstance(x, list | tuple) else [x] for x in (planned, found)]
        return [str(x) for x in both[0]] == [str(x) for x in both[1]]
    if isinstance(planned, bool):
        return planned == bool(found)
    found = getattr(found, "name", found)  # an enum of Megatron's
    return str(planned) == str(found) or planned == found


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _in_words(flag: str, value: Any) -> str:
    return " ".join(_words(flag, value)) or f"no {flag}"


def _refusal(must: str, got: str, change: str = "make it with megatron-burst plan") -> BurstError:
    return BurstError(
        f"{FLAG}: {must}, because its options are taken from there; got {got}; {change}"
    )
