"""Burst beside its peers: which rows belong together, and their ratios."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_burst.cli.results import Row
from megatron_burst.plan.units import in_units


class Problem(NamedTuple):
    """What rows must share to be compared; fields as in `Row`."""

    heads_q: int
    heads_kv: int
    seq: int
    hosts: int
    ranks: int
    batch: int
    head_dim_qk: int
    head_dim_v: int
    mask: str
    dtype: str
    pass_: str

    def words(self) -> dict[str, str]:
        """Its facts by name, as people read them."""
        dims = dict.fromkeys((self.head_dim_qk, self.head_dim_v))
        return {
            "heads": f"{self.heads_q}/{self.heads_kv}",
            "S": in_units(self.seq),
            "hosts": f"{self.hosts}",
            "ranks": f"{self.ranks}",
            "batch": f"{self.batch}",
            "head dim": "/".join(map(str, dims)),
            "mask": self.mask,
            "dtype": self.dtype,
            "pass": self.pass_.replace("_", "+"),
        }


class Ratio(NamedTuple):
    """How many times as fast, with the least and the most that the spreads allow."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Row | None, other: Row | None) -> "Ratio | None":
        """How many times as fast as the other a row is; None if one was not measured."""
        if row is None or other is None or not row.ms or not other.ms:
            return None
        return cls(other.ms / row.ms, other.ms_min / row.ms_max, other.ms_max / row.ms_min)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements of one problem.

    Attributes:
        problem: what they share.
        rows: the newest row of each implementation by "impl:mode", also of those that failed.
    """

    problem: Problem
    rows: dict[str, Row]

    @property
    def burst(self) -> Row | None:
        """burst:auto, or the fastest variant where that is missing."""
        auto = self.rows.get("burst:auto")
        return auto if auto and auto.ms else self._fastest("burst")

    @property
    def best_te(self) -> Row | None:
        """TransformerEngine's fastest mode here."""
        return self._fastest("te")

    @property
    def ceiling(self) -> Row | None:
        """The fastest kernel without communication."""
        return self._fastest("ceiling")

    @property
    def on_cudnn(self) -> Row | None:
        """Burst with TransformerEngine's usual kernel: what context parallelism alone brings."""
        return self.rows.get("burst:backend=cudnn")

    @property
    def cudnn_ceiling(self) -> Row | None:
        """That kernel without communication."""
        return self.rows.get("ceiling:cudnn")

    def _fastest(self, impl: str) -> Row | None:
        measured = [row for row in self.rows.values() if row.impl == impl and row.ms]
        return min(measured, key=lambda row: row.ms, default=None)


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """One comparison a problem and pass, the shorter sequences first."""
    found: dict[Problem, dict[str, Row]] = {}
    for row in rows:
        problem = Problem(**{name: getattr(row, name) for name in Problem._fields})
        found.setdefault(problem, {})[f"{row.impl}:{row.mode}"] = row
    shortest_first = sorted(found, key=lambda problem: problem.seq)
    return [Comparison(problem, found[problem]) for problem in shortest_first]


def differing(comparisons: Sequence[Comparison], always: Sequence[str]) -> list[str]:
    """Names of the facts in which problems differ, after those that are always told."""
    every = [comparison.problem.words() for comparison in comparisons]
    return [
        *always,
        *(
            name
            for name in every[0]
            if name not in always and len({words[name] for words in every}) > 1
        ),
    ]
