"""Outcomes of cases in a CSV that is appended to as they come, and their table."""

import csv
import io
import os
from collections.abc import Container, Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

FINAL = "passed", "failed", "skipped"  # by the peer's own program
_STAYS = "passed", "skipped", "attended"  # when what is left runs again


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row: what became of a case, or how many cases ("selected", "left out").

    "started" rows tell what was running when a program ended or hung.
    """

    suite: str
    case: str
    outcome: str
    count: int = 1
    seconds: float = 0.0
    detail: str = ""

    @property
    def is_final(self) -> bool:
        """Whether a case has finished."""
        return self.outcome in FINAL


def write(path: Path, row: Outcome) -> None:
    """Append a row in one call, so that ranks may share the file."""
    text = io.StringIO()
    suite, case, outcome, count, seconds, detail = astuple(row)
    csv.writer(text).writerow((suite, case, outcome, count, f"{seconds:.2f}", detail))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, text.getvalue().encode())
    finally:
        os.close(handle)


def read(path: Path) -> list[Outcome]:
    """All rows; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == len(fields(Outcome))]
    return [Outcome(*row[:3], int(row[3]), float(row[4]), row[5]) for row in rows]


def forget(path: Path, suites: Container[str]) -> None:
    """Drop rows that some suites will write again: failures and case counts."""
    kept = [row for row in read(path) if row.suite not in suites or row.outcome in _STAYS]
    path.unlink(missing_ok=True)
    for row in kept:
        write(path, row)


def running(rows: Iterable[Outcome]) -> str | None:
    """The case that was started last and has not finished."""
    last = None
    for row in rows:
        if row.outcome == "started":
            last = row.case
        elif row.is_final and row.case == last:
            last = None
    return last


def verdicts(rows: Iterable[Outcome]) -> dict[str, Outcome]:
    """By case; one that failed on any rank, or in teardown, has failed."""
    found: dict[str, Outcome] = {}
    for row in rows:
        if row.is_final and (row.case not in found or row.outcome == "failed"):
            found[row.case] = row
    return found


def table(rows: list[Outcome]) -> str:
    """Counts by suite, then why cases were left out or skipped, in Markdown."""
    suites = list(dict.fromkeys(row.suite for row in rows))
    lines = ["| program | passed | failed | skipped by itself | left out | not run |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    reasons = []
    for suite in suites:
        own = [row for row in rows if row.suite == suite]
        through = verdicts(own)
        counts = [sum(r.outcome == kind for r in through.values()) for kind in FINAL]
        left_out = sum(row.count for row in own if row.outcome == "left out")
        selected = sum(row.count for row in own if row.outcome == "selected")
        cells = [*counts, left_out, max(0, selected - len(through))]
        lines.append(f"| {suite} | {' | '.join(map(str, cells))} |")
        reasons += _reasons(suite, own, through)
    return "\n".join([*lines, "", "| program | cases | why |", "| --- | --- | --- |", *reasons])


def _reasons(suite: str, own: list[Outcome], through: dict[str, Outcome]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for row in own:
        if row.outcome == "left out" and row.count:
            key = "left out", row.detail
            counts[key] = counts.get(key, 0) + row.count
    for row in through.values():
        if row.outcome == "skipped":
            key = "skipped", row.detail.removeprefix("Skipped: ")
            counts[key] = counts.get(key, 0) + 1
    return [f"| {suite} | {n} {kind} | {why} |" for (kind, why), n in counts.items()]
