"""Prints a report: tables, or JSON."""

import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_burst.cli.doctor.record import Report, Status

_STYLE = {Status.FAIL: "bold red", Status.WARN: "yellow", Status.SKIP: "dim", Status.OK: "green"}
_MOST_LINKS = 16
_WIDTH = 160  # in files and pipes


def print_report(report: Report, as_json: bool, console: Console | None = None) -> None:
    """To standard output."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
        return
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_checks(report))
    if report.links:
        console.print(_links(report))
    if report.environment:
        console.print("\nTo paste:\n")
        for line in report.environment:
            console.print(Text(line), soft_wrap=True)
    counts = [sum(check.status is status for check in report.checks) for status in Status]
    told = ", ".join(f"{n} {status}" for n, status in zip(counts, Status, strict=True) if n)
    console.print(f"\n{told}: a run would {'break' if report.breaks else 'start'}")


def _checks(report: Report) -> Table:
    where = any(check.where for check in report.checks)
    table = Table(title="megatron-burst doctor")
    for column in ("check", "status", *(["where"] if where else []), "found", "what to change"):
        table.add_column(column, overflow="fold")
    for check in sorted(report.checks, key=lambda check: list(Status).index(check.status)):
        place = [Text(check.where)] if where else []
        status = Text(check.status, style=_STYLE[check.status])
        table.add_row(check.name, status, *place, Text(check.what), Text(check.change))
    return table


def _links(report: Report) -> Table:
    """The slowest links; all of them if they are few."""
    shown = sorted(report.links, key=lambda link: link.ratio)[:_MOST_LINKS]
    rest = len(report.links) - len(shown)
    table = Table(title="links" + (f", slowest first; {rest} more in --json" if rest else ""))
    for column in ("kind", "ranks", "hosts", "GB/s", "of the median"):
        table.add_column(column)
    for link in shown:
        ranks, hosts = f"{link.source} -> {link.dest}", " -> ".join(dict.fromkeys(link.hosts))
        table.add_row(link.kind, ranks, hosts, f"{link.gb_per_s:.3g}", f"{link.ratio:.0%}")
    return table
