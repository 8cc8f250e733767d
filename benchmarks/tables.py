"""The table maker: how many times as fast one is as another, cells, and lines of cells."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

from megatron_burst.errors import require
from megatron_burst.tools.hardware_file import preset_of

_TIMES = re.compile(r"repetitions: ([\d. e+-]+)$")  # as `repetitions` writes them
_APART_S = 5  # rows of runs that took turns are written together


def spread(ms: Sequence[float]) -> dict[str, float]:
    """Columns of what was timed: median, least and most of its repetitions."""
    return {"ms": median(ms), "ms_min": min(ms), "ms_max": max(ms)}


def repetitions(ms: Sequence[float]) -> str:
    """How often something was timed, and what each took: "3 repetitions: 1.5 1.4 1.6"."""
    return f"{len(ms)} repetitions: {' '.join(f'{each:.6g}' for each in ms)}"


class Ratio(NamedTuple):
    """A speedup, with the least and the most that the repetitions have, or allow."""

    value: float
    low: float
    high: float

    @classmethod
    def paired(cls, times: Sequence[float], others: Sequence[float]) -> "Ratio":
        """Others' times over one's own, repetition by repetition: their median, least and most."""
        each = [other / own for own, other in zip(times, others, strict=True)]
        return cls(median(each), min(each), max(each))

    @classmethod
    def of(cls, row: Any, other: Any) -> "Ratio | None":
        """A row's speedup over another's of one problem and pass; None if one was not measured.
        Paired if both say each repetition's time and took turns; else the ratio of the medians,
        with what the fastest and the slowest repetitions allow."""
        if row is None or other is None or not row.ms or not other.ms:
            return None
        times, others = times_of(row), times_of(other)
        if times and len(times) == len(others) and took_turns(row, other):
            return cls.paired(times, others)
        return cls(other.ms / row.ms, other.ms_min / row.ms_max, other.ms_max / row.ms_min)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def times_of(row: Any) -> list[float]:
    """Milliseconds of each repetition, in their order, as the row's note says them; else none."""
    noted = _TIMES.search(row.note)
    return [float(ms) for ms in noted[1].split()] if noted else []


def took_turns(row: Any, other: Any) -> bool:
    """Whether rows are of one run: one commit, one reading of one GPU, written together."""
    dates = [datetime.fromisoformat(each.date) for each in (row, other)]
    apart = abs((dates[0] - dates[1]).total_seconds())
    return (row.versions, row.gpu) == (other.versions, other.gpu) and apart <= _APART_S


def measured_by(row: Any) -> tuple[str, ...]:
    """The commit and the machine that a row names, as far as it does."""
    named = (
        re.search(r"\b(commit|machine) \w+( with changes)?", text)
        for text in (row.versions, row.gpu)
    )
    return tuple(match[0] for match in named if match)


def share_of_peak(tflops: float, gpu: str) -> float:
    """Of the bf16 peak in the data sheet of a row's GPU, or BurstError; of model FLOPs the MFU."""
    return tflops / preset_of(gpu, "benchmarks").gpu.peak_tflops


def origins(rows: Iterable[Any]) -> str:
    """A sentence: days, commits and machines of a table's rows, the newest first."""
    sources = {(row.date[:10], *(measured_by(row) or ("no commit",))) for row in rows}
    return f"Rows: {'; '.join(', '.join(words) for words in sorted(sources, reverse=True))}."


def markdown(lines: Iterable[Sequence[object]]) -> str:
    """A table whose first line is its head."""
    head, *rows = lines
    every = head, ["---"] * len(head), *rows
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in every)


def listed(columns: Mapping[str, Callable[[Any], object]], rows: Iterable[Any]) -> str:
    """A line a row, a column for each head, with what makes its cells."""
    lines = ([cell(row) for cell in columns.values()] for row in rows)
    return markdown([list(columns), *lines])


def crossed[L: Hashable, C: Hashable](
    corner: Sequence[str], lines: Mapping[L, Sequence[object]], columns: Mapping[C, str],
    cell: Callable[[L, C], str],
) -> str:  # fmt: skip
    """A line and a column for each key, which are shown by these first cells and heads."""
    body = ([*first, *(cell(line, column) for column in columns)] for line, first in lines.items())
    return markdown([[*corner, *columns.values()], *body])


def milliseconds(time: float) -> str:
    """A time in a cell, with a digit behind the point if it is short."""
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def time_and_peak(row: Any) -> str:
    """Milliseconds and GiB of a row in one cell, or why it has none; "-" without a row."""
    if row is None:
        return "-"
    if row.ms is None:
        return "out of memory" if "out of memory" in row.note else row.status
    return milliseconds(row.ms) + ("" if row.peak_gib is None else f", {row.peak_gib:.2f}")


def shown(value: float | None, digits: int) -> str:
    """A figure in a cell, or "-"."""
    return "-" if value is None else f"{value:.{digits}f}"


def check_named(what: str, found: Iterable[str], names: Iterable[str], file: str) -> None:
    """That pages have a name for each mode or implementation that is measured; else BurstError."""
    unknown = sorted({*found} - {*names})
    require("benchmarks.show", [(
        not unknown, f"every {what} must have a name in pages, because one without would be left "
        "out", ", ".join(unknown), f"name it in benchmarks/{file}",
    )])  # fmt: skip
