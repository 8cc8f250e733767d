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


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A link between two ranks that was measured."""

    kind: str  # "intra" or "inter"
    source: int  # global ranks
    dest: int
    nodes: tuple[str, str]
    gb_per_s: float  # 1e9 bytes a second, with all rings of the kind busy
    ratio: float  # to the median of its kind


@dataclass(frozen=True, slots=True)
class Report:
    """All that the doctor found; `environment`: lines to paste into a shell, if any were made;
    `ranks`: of a job, a table with a row for each node and a column for each rail."""

    checks: Sequence[Check]
    links: Sequence[LinkRate] = ()
    environment: Sequence[str] = ()
    ranks: str = ""

    @property
    def breaks(self) -> bool:
        """Whether a run would break."""
        return any(check.status is Status.FAIL for check in self.checks)


def few(items: Sequence[str], most: int = 4) -> str:
    """The first of them, and how many more there are."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return "; ".join([*items[:most], *more])


def merged(found: Mapping[str, Sequence[Check]]) -> list[Check]:
    """What was found on nodes, by name: equal findings as one, with their nodes."""
    places: dict[Check, list[str]] = {}
    for node, checks in found.items():
        for check in checks:
            places.setdefault(check, []).append(node)
    everywhere = f"all {len(found)} nodes"
    return [
        replace(check, where=", ".join(at) if len(at) < max(2, len(found)) else everywhere)
        for check, at in places.items()
    ]


def print_report(report: Report, as_json: bool) -> None:
    """To standard output: a table, worst first, or JSON, which alone has all links."""
    if as_json:
        print(json.dumps({"breaks": report.breaks, **asdict(report)}, indent=2), flush=True)
        return
    console = new_console()
    where = ["where"] if any(check.where for check in report.checks) else []
    heads = ("check", "status", *where, "found", "what to change")
    table = Table(*(Column(name, overflow="fold") for name in heads), title="megatron-burst doctor")
    for check in sorted(report.checks, key=lambda check: list(Status).index(check.status)):
        status = Text(check.status, style=_STYLE[check.status])
        texts = *[check.where for _ in where], check.what, check.change
        table.add_row(check.name, status, *map(Text, texts))
    console.print(table)
    for head, lines in (
        ("global ranks, if all are one context-parallel group:\n", report.ranks.splitlines()),
        ("To paste:\n\n", report.environment),
    ):
        if lines:
            console.print(Text(f"\n{head}{'\n'.join(lines)}"), soft_wrap=True)
    counts = Counter(check.status for check in report.checks)
    told = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    console.print(f"\n{told}: a run would {'break' if report.breaks else 'start'}")
