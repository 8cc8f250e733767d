"""How many times as fast a measurement is as another: what every table and picture means by it."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

from megatron_burst.tools.hardware_file import preset_of

_TIMES = re.compile(r"repetitions: ([\d. e+-]+)$")  # as `results.repetitions` writes them
_APART_S = 5  # rows of runs that took turns are written together


class Ratio(NamedTuple):
    """A speedup, with the least and the most that the repetitions have, or allow."""

    value: float
    low: float
    high: float

    @classmethod
    def paired(cls, times: Sequence[float], others: Sequence[float]) -> "Ratio":
        """Others' times over one's own, repetition by repetition: their median, least and most.

        Args:
            times, others: milliseconds of runs that took turns, in the order of repetitions.
        """
        each = [other / own for own, other in zip(times, others, strict=True)]
        return cls(median(each), min(each), max(each))

    @classmethod
    def of(cls, row: Any, other: Any) -> "Ratio | None":
        """A row's speedup over another's; None if one was not measured.

        Paired if both say each repetition's time and took turns; else the ratio of the medians,
        with what the fastest and the slowest repetitions allow.

        Args:
            row, other: of attention, packed samples, layers or the loss, of one problem and pass.
        """
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
    found = _TIMES.search(row.note)
    return [float(ms) for ms in found[1].split()] if found else []


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
    return tuple(found[0] for found in named if found)


def share_of_peak(tflops: float, gpu: str) -> float:
    """Of the bf16 peak in the data sheet of the GPU that a row names; of a step's model FLOPs MFU.

    Raises:
        BurstError: if there is no preset of that GPU.
    """
    return tflops / preset_of(gpu, "benchmarks").gpu.peak_tflops


def origins(rows: Iterable[Any]) -> str:
    """A sentence: days, commits and machines of a table's rows, the newest first.

    Args:
        rows: with `date`, `versions` and `gpu`.
    """
    found = {(row.date[:10], *(measured_by(row) or ("no commit",))) for row in rows}
    return f"Rows: {'; '.join(', '.join(words) for words in sorted(found, reverse=True))}."
