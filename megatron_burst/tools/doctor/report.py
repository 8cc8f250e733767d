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


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Status
    what: str  # was found
    change: str = ""  # what to do; "" if nothing
    where: str = ""  # the nodes or ranks that it is about; "" for this machine


def check_of(fields: Mapping[str, str]) -> Check:
    """A finding from its fields, as another rank sent them (`dataclasses.asdict`)."""
    return Check(**{**fields, "status": Status(fields["status"])})


def _check(status: Status, name: str, what: str, change: str = "", where: str = "") -> Check:
    return Check(name, status, what, change, where)


ok, skip, warn, fail = (
    partial(_check, status) for status in (Status.OK, Status.SKIP, Status.WARN, Status.FAIL)
)


def few(items: Sequence[str], most: int = 4) -> str:
    """The first of them, and how many more there are."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return "; ".join([*items[:most], *more])


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

    checks: tuple[Check, ...]
    links: tuple[LinkRate, ...] = ()
    environment: tuple[str, ...] = ()
    ranks: str = ""

    @property
    def breaks(self) -> bool:
        """Whether a run would break."""
        return any(check.status is Status.FAIL for check in self.checks)


def odd(name: str, status: Status, change: str, values: Mapping[str, str]) -> Check | None:
    """The nodes whose value is not that of most; None if all have the same."""
    (common, most), *_ = Counter(values.values()).most_common(1)
    if most == len(values):
        return None
    others = {node: value for node, value in values.items() if value != common}
    named = few([f"{node} has {value}" for node, value in others.items()])
    what = f"{name} differs: {named}; the others {common}"
    return Check("alike", status, what, change, ", ".join(others))


def merged(found: Mapping[str, Sequence[Check]]) -> list[Check]:
    """What was found on nodes, by name: equal findings as one, with their nodes."""
    places: dict[Check, list[str]] = {}
    for node, checks in found.items():
        for check in checks:
            places.setdefault(replace(check, where=""), []).append(node)
    everywhere = f"all {len(found)} nodes"
    return [
        replace(check, where=", ".join(at) if len(at) < max(2, len(found)) else everywhere)
        for check, at in places.items()
    ]


_STYLE = {Status.FAIL: "bold red", Status.WARN: "yellow", Status.SKIP: "dim", Status.OK: "green"}
_MOST_LINKS = 16


def print_report(report: Report, as_json: bool) -> None:
    """To standard output: tables, worst first, or JSON."""
    if as_json:
        print(json.dumps({"breaks": report.breaks, **asdict(report)}, indent=2), flush=True)
        return
    console = new_console()
    where = ["where"] if any(check.where for check in report.checks) else []
    table = _table("megatron-burst doctor", "check", "status", *where, "found", "what to change")
    for check in sorted(report.checks, key=lambda check: list(Status).index(check.status)):
        status = Text(check.status, style=_STYLE[check.status])
        texts = *[check.where for _ in where], check.what, check.change
        table.add_row(check.name, status, *map(Text, texts))
    console.print(table)
    if report.links:
        table = _table(f"links, the slowest {_MOST_LINKS}; --json has all",
                       "kind", "ranks", "nodes", "GB/s", "of the median")  # fmt: skip
        for link in sorted(report.links, key=lambda link: link.ratio)[:_MOST_LINKS]:
            ranks, nodes = f"{link.source} -> {link.dest}", " -> ".join(dict.fromkeys(link.nodes))
            table.add_row(link.kind, ranks, nodes, f"{link.gb_per_s:.3g}", f"{link.ratio:.0%}")
        console.print(table)
    if report.ranks:
        console.print("\nglobal ranks, if all are one context-parallel group:")
        console.print(Text(report.ranks), soft_wrap=True)
    if report.environment:
        console.print("\nTo paste:\n")
        for line in report.environment:
            console.print(Text(line), soft_wrap=True)
    counts = Counter(check.status for check in report.checks)
    told = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    console.print(f"\n{told}: a run would {'break' if report.breaks else 'start'}")


def _table(title: str, *columns: str) -> Table:
    return Table(*(Column(name, overflow="fold") for name in columns), title=title)
