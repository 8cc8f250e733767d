"""Burst compared with its peers: groups of rows, their ratios, and tables."""

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from rich.table import Table

from benchmarks.sheets import Row
from benchmarks.tables import Ratio, markdown, measured_by, origins, shown
from megatron_burst.errors import require
from megatron_burst.tools.units import in_units

LIBRARIES = ("ulysses", "yunchang", "torch")  # in a table of their own, and in no picture
_NOTHING = {"-", "failed", "skipped"}  # cells without a figure
_SHARED = "heads_q heads_kv seq nodes ranks batch head_dim_qk head_dim_v mask dtype pass_"


class Problem(namedtuple("Problem", _SHARED)):
    """What rows must share to be compared; fields are columns of `Row`."""

    __slots__ = ()

    def words(self) -> dict[str, str]:
        """Its facts by name, as people read them."""
        dims = dict.fromkeys((self.head_dim_qk, self.head_dim_v))
        mask = self.mask.removesuffix("-42")  # the seed of all drawn lengths
        return {
            "heads": f"{self.heads_q}/{self.heads_kv}", "S": in_units(self.seq),
            "nodes": f"{self.nodes}", "ranks": f"{self.ranks}", "batch": f"{self.batch}",
            "head dim": "/".join(map(str, dims)), "mask": mask, "dtype": self.dtype,
            "pass": self.pass_.replace("_", "+"),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """The newest row of each implementation of one problem by "impl:mode", failed ones too."""

    problem: Problem
    rows: dict[str, Row]

    @property
    def burst(self) -> Row | None:
        """burst:auto, or the fastest variant where that is missing."""
        auto = self.rows.get("burst:auto")
        return auto if auto and auto.ms else self.fastest("burst")

    @property
    def best_te(self) -> Row | None:
        """TransformerEngine's fastest mode here."""
        return self.fastest("te")

    @property
    def ceiling(self) -> Row | None:
        """The fastest kernel without communication."""
        return self.fastest("ceiling")

    def alike(self) -> "Comparison":
        """Only rows of the commit and the machine of burst's: others had other links and clocks."""
        if self.burst is None:
            return self
        by = measured_by(self.burst)
        rows = {name: row for name, row in self.rows.items() if measured_by(row) == by}
        return Comparison(self.problem, rows)

    def fastest(self, impl: str) -> Row | None:
        """Of an implementation's modes; None if none was measured."""
        measured = [row for row in self.rows.values() if row.impl == impl and row.ms]
        return min(measured, key=lambda row: row.ms, default=None)


type Cell = Callable[[Comparison], str]


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """One a problem, by ranks and length; of equal rows, also of several files, the newest."""
    by_problem: dict[Problem, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda one: one.date):
        problem = Problem(**{name: getattr(row, name) for name in Problem._fields})
        by_problem.setdefault(problem, {})[f"{row.impl}:{row.mode}"] = row
    groups = list(dict.fromkeys((problem.nodes, problem.ranks) for problem in by_problem))
    in_order = sorted(by_problem, key=lambda one: (groups.index((one.nodes, one.ranks)), one.seq))
    return [Comparison(problem, by_problem[problem]) for problem in in_order]


def differing(comparisons: Sequence[Comparison], always: Sequence[str]) -> list[str]:
    """Names of the facts in which problems differ, after those that are always shown."""
    every = [comparison.problem.words() for comparison in comparisons]
    several = (name for name in every[0] if len({words[name] for words in every}) > 1)
    return [*always, *(name for name in several if name not in always)]


def terminal_table(rows: Sequence[Row]) -> Table:
    """One line per problem and pass: TFLOP/s of every implementation, ratios, memory."""
    comparisons = compare(rows)
    facts = differing(comparisons, ("S", "heads", "pass"))
    impls = list(dict.fromkeys(name for each in comparisons for name in each.rows))
    ratios = ("burst / best te", "burst / ceiling", "GiB burst", "GiB te")
    table = Table(title="TFLOP/s per GPU")
    for name in (*facts, *impls, *ratios):
        table.add_column(name, justify="right", overflow="fold")
    for each in comparisons:
        words, te = each.problem.words(), each.best_te
        speeds = [_speed(each.rows.get(name)) for name in impls]
        last = _ratio(each.burst, te), _share(each.burst, each.ceiling), _gib(each.burst), _gib(te)
        table.add_row(*(words[fact] for fact in facts), *speeds, *last)
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why implementations were not measured, each reason once."""
    failed = (row for row in rows if row.status != "ok")
    return list(dict.fromkeys(f"{row.impl}:{row.mode} {row.status}: {row.note}" for row in failed))


def markdown_table(rows: Sequence[Row], pass_: str) -> str:
    """One line a problem of this pass; BurstError if a ratio is of two commits or machines."""
    comparisons = [each for each in compare(rows) if each.problem.pass_ == pass_]
    if not comparisons:
        return f"No {pass_} was measured."
    for each in comparisons:
        check_alike(each, [each.burst, each.best_te, each.ceiling])
    comparisons = [each.alike() for each in comparisons]  # without modes of earlier runs
    return _table(_COLUMNS, comparisons, ("heads", "S"))


def library_table(rows: Sequence[Row]) -> str:
    """One line a problem and pass of which a library was measured: burst, and the fastest mode of
    each library; BurstError if a ratio would be of two commits or machines."""
    every = [each for each in compare(rows) if each.burst and any(map(each.fastest, LIBRARIES))]
    if not every:
        return "No library was measured."
    for each in every:
        check_alike(each, [each.burst, *map(each.fastest, LIBRARIES)])
    columns: dict[str, Cell] = {"burst": lambda each: _speed(each.burst)}
    for impl in LIBRARIES:
        columns[f"{impl} (mode)"] = lambda each, impl=impl: _named(each.fastest(impl))
        columns[f"burst / {impl}"] = lambda each, impl=impl: _ratio(each.burst, each.fastest(impl))
    return _table(columns, every, ("heads", "S", "pass"))


def _table(columns: Mapping[str, Cell], every: Sequence[Comparison], always: Sequence[str]) -> str:
    """A caption, a line for each comparison, columns that have a figure, and what rows are of."""
    facts, first = differing(every, always), every[0].problem.words()
    lines = [[*facts, *columns]]
    for each in every:
        words = each.problem.words()
        lines.append([*(words[fact] for fact in facts), *(cell(each) for cell in columns.values())])
    some = [not set(column) <= _NOTHING for column in zip(*lines[1:], strict=True)]
    caption = ", ".join(f"{name} {value}" for name, value in first.items() if name not in facts)
    table = markdown([list(compress(line, some)) for line in lines])
    sources = origins(each.burst or next(iter(each.rows.values())) for each in every)
    return f"TFLOP/s per GPU; {caption}.\n\n{table}\n\n{sources}"


def check_alike(each: Comparison, shown: Sequence[Row | None]) -> None:
    """That what is compared was measured by one commit on one machine, as far as rows name them."""
    runs = {measured_by(row): row for row in shown if row and row.ms}
    got = (f"{row.impl}:{row.mode} of {' '.join(by)}" for by, row in runs.items())
    where = " ".join(each.problem.words()[name] for name in ("heads", "S", "mask"))
    require("benchmarks.show table", [(
        len(runs) < 2, "rows that it compares must be of one commit and machine, because a ratio "
        "would tell of these too", f"{' and '.join(got)}, for {where}", "measure them in one run",
    )])  # fmt: skip


def _speed(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.ms is None:
        return row.status
    return f"{row.tflops_per_gpu:.0f}" if row.tflops_per_gpu >= 10 else f"{row.tflops_per_gpu:.2g}"


def _named(row: Row | None) -> str:
    return f"{_speed(row)} ({row.mode})" if row else "-"


def _ratio(row: Row | None, other: Row | None) -> str:
    return str(Ratio.of(row, other) or "-")


def _share(row: Row | None, other: Row | None) -> str:
    ratio = Ratio.of(row, other)
    return shown(ratio and ratio.value, 2)


def _gib(row: Row | None) -> str:
    return shown(row and row.peak_gib, 2)


def _of(name: str, cell: Callable[[Row | None, Comparison], str]) -> Cell:
    """A cell of one implementation in one mode."""
    return lambda each: cell(each.rows.get(name), each)


_CUDNN, _ANY, _BEFORE = "burst:backend=cudnn", "burst:auto@zigzag", "before:auto"
_COLUMNS: dict[str, Cell] = {
    "burst": lambda each: _speed(each.burst),
    "best TE (mode)": lambda each: _named(each.best_te),
    "burst / TE": lambda each: _ratio(each.burst, each.best_te),
    "burst / kernel alone": lambda each: _share(each.burst, each.ceiling),
    "GiB burst, TE": lambda each: f"{_gib(each.burst)}, {_gib(each.best_te)}",
    # TransformerEngine's usual kernel: what context parallelism alone brings
    "burst on cuDNN": _of(_CUDNN, lambda row, each: _speed(row)),
    "burst on cuDNN / TE": _of(_CUDNN, lambda row, each: _ratio(row, each.best_te)),
    "burst on cuDNN / cuDNN alone": _of(
        _CUDNN, lambda row, each: _share(row, each.rows.get("ceiling:cudnn"))
    ),
    # documents that start at any token of an unpadded sample
    "documents at any token": _of(_ANY, lambda row, each: _speed(row)),
    "documents at any token / TE": _of(_ANY, lambda row, each: _ratio(row, each.best_te)),
    # an earlier commit's
    "before": _of(_BEFORE, lambda row, each: _speed(row)),
    "burst / before": _of(_BEFORE, lambda row, each: _ratio(each.burst, row)),
    "GiB before": _of(_BEFORE, lambda row, each: _gib(row)),
}
