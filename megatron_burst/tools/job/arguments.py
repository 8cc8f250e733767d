"""Megatron's arguments in what --burst-dump-args wrote, or in lines of flags."""

import re
import shlex
from typing import Any

DUMPED = "megatron_arguments"  # the key of that file
_LISTS = ("recompute_modules",)  # flags with several values, here words of one text
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


def megatron_arguments(text: str) -> dict[str, Any]:
    """Arguments in lines of `--flag value`, dashes as underscores; a flag without a value is True,
    and several values are words of one text. Quotes, comments and a backslash at the end of a line
    are a shell's.

    Raises:
        ValueError: of the first line that is anything else, as in a shell script or YAML.
    """
    arguments: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:  # a quote that is not closed
            words = [""]
        if "$" in line or "`" in line or not all(map(_FLAG.fullmatch, words[:1])):
            raise ValueError(line)
        for word in words:
            if flag := _FLAG.fullmatch(word):
                name = flag[1].replace("-", "_").lower()
                arguments[name] = True if flag[2] is None else flag[2]
            else:
                before = arguments[name]
                arguments[name] = word if before is True else f"{before} {word}"
    return arguments


def arguments_in_json(data: Any) -> dict[str, Any] | None:
    """What --burst-dump-args wrote, as words; None if it is anything else."""
    found = data.get(DUMPED) if isinstance(data, dict) else None
    if not isinstance(found, dict):
        return None
    lists = {
        name: " ".join(map(str, found[name])) for name in _LISTS if type(found.get(name)) is list
    }
    given = {name: value for name, value in found.items() if value is not None} | lists
    return {name: v if isinstance(v, bool) else str(v) for name, v in given.items()}
