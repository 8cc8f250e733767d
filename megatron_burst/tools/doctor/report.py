"""What checks found, and how it is printed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial

from rich.table import Column, Table
from rich.text import Text

from megatron_burst.tools.terminal import new_console


class Status(StrEnum):
    """How bad it is; in that order."""

    FAIL = "fail"  # would break a run
    WARN = "warn"  # would cost speed, or may break one
    SKIP = "skip"  # could not be checked, or does not apply
    OK = "ok"


_STYLE = {Status.FAIL: "bold red", Status.WARN: "yellow", Status.SKIP: "dim", Status.OK: "green"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    status: Status
    name: str
    what: str  # was found
    change: str = ""  # what to do; "" if nothing
    where: str = ""  # the nodes or ranks that it is about; "" for this machine


ok, skip, warn, fail = (
    partial(Check, status) for status in (Status.OK, Status.SKIP, Status.WARN, Status.FAIL)
)


def few(items: Sequence[str]) -> str:
    """The first four of them, and how many more there are."""
    more = [f"{len(items) - 4} more"] if len(items) > 4 else []
    return "; ".join([*items[:4], *more])


def breaks(checks: Sequence[Check]) -> bool:
    """Whether a run would break."""
    return any(check.status == Status.FAIL for check in checks)


def merged(of_nodes: Mapping[str, Sequence[Check]]) -> list[Check]:
    """What was found on nodes, by name: equal findings as one, with their nodes."""
    places: dict[Check, list[str]] = {}
    for node, checks in of_nodes.items():
        for check in checks:
            places.setdefault(check, []).append(node)
    everywhere = f"all {len(of_nodes)} nodes"
    return [
        replace(check, where=", ".join(at) if len(at) < max(2, len(of_nodes)) else everywhere)
        for check, at in places.items()
    ]


def print_report(checks: Sequence[Check], as_json: bool) -> None:
    """To standard output: a table, worst first, or JSON."""
    if as_json:
        report = {"breaks": breaks(checks), "checks": [*map(asdict, checks)]}
        print(json.dumps(report, indent=2), flush=True)
        return
    heads = {"name": "check", "status": "status", "where": "where", "what": "found",
             "change": "what to change"}  # fmt: skip
    fields = [field for field in heads if any(getattr(check, field) for check in checks)]
    table = Table(*(Column(heads[field], overflow="fold") for field in fields))
    for check in sorted(checks, key=lambda check: list(Status).index(check.status)):
        style = {"status": _STYLE[check.status]}
        table.add_row(*(Text(getattr(check, field), style.get(field, "")) for field in fields))
    new_console().print(table)
    counts = Counter(check.status for check in checks)
    numbers = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    print(f"\n{numbers}: a run would {'break' if breaks(checks) else 'start'}", flush=True)
