"""Burst compared with its peers: groups of rows, their ratios, and tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from rich.table import Table

from benchmarks.cells import markdown
from benchmarks.ratios import Ratio, measured_by, origins
from benchmarks.rows import Row
from megatron_burst.errors import BurstError
from megatron_burst.tools.units import in_units

LIBRARIES = ("ulysses", "yunchang", "torch")  # in a table of their own, and in no picture
_NOTHING = {"-", "failed", "skipped"}  # cells without a figure
_COLUMNS = ("burst", "best TE (mode)", "burst / TE", "burst / kernel alone", "GiB burst, TE")


class Problem(NamedTuple):
    """What rows must share to be compared; fields as in `Row`."""

    heads_q: int
    heads_kv: int
    seq: int
    nodes: int
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
            "nodes": f"{self.nodes}",
            "ranks": f"{self.ranks}",
            "batch": f"{self.batch}",
            "head dim": "/".join(map(str, dims)),
            "mask": self.mask.removesuffix("-42"),  # the seed of all drawn lengths
            "dtype": self.dtype,
            "pass": self.pass_.replace("_", "+"),
        }


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


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """One comparison a problem and pass; of as many ranks together, the shorter sequences first.
    Of equal rows, also of several files, the newest counts."""
    found: dict[Problem, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda one: one.date):
        problem = Problem(**{name: getattr(row, name) for name in Problem._fields})
        found.setdefault(problem, {})[f"{row.impl}:{row.mode}"] = row
    groups = list(dict.fromkeys((problem.nodes, problem.ranks) for problem in found))
    in_order = sorted(found, key=lambda one: (groups.index((one.nodes, one.ranks)), one.seq))
    return [Comparison(problem, found[problem]) for problem in in_order]


def differing(comparisons: Sequence[Comparison], always: Sequence[str]) -> list[str]:
    """Names of the facts in which problems differ, after those that are always shown."""
    every = [comparison.problem.words() for comparison in comparisons]
    return [
        *always,
        *(
            name
            for name in every[0]
            if name not in always and len({words[name] for words in every}) > 1
        ),
    ]


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
        words = each.problem.words()
        speeds = [_speed(each.rows.get(name)) for name in impls]
        table.add_row(*(words[fact] for fact in facts), *speeds, *_judgement(each))
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why implementations were not measured, each reason once."""
    found = {}
    for row in rows:
        if row.status != "ok":
            found.setdefault(f"{row.impl}:{row.mode} {row.status}: {row.note}")
    return list(found)


def markdown_table(rows: Sequence[Row], pass_: str) -> str:
    """One line a problem: burst, TransformerEngine's best mode, ratios, memory, if measured.

    Args:
        rows: of results; at least one.
        pass_: "fwd" or "fwd_bwd".

    Raises:
        BurstError: if a ratio would be of two commits or machines.
    """
    comparisons = [each for each in compare(rows) if each.problem.pass_ == pass_]
    if not comparisons:
        return f"No {pass_} was measured."
    for each in comparisons:
        check_alike(each, [each.burst, each.best_te, each.ceiling])
    comparisons = [each.alike() for each in comparisons]  # without modes of earlier runs
    facts = differing(comparisons, ("heads", "S"))
    others = _measured(_OTHERS, comparisons)
    head = [*facts, *_COLUMNS, *(name for other in others for name in other.columns)]
    lines = []
    for each in comparisons:
        words, best = each.problem.words(), _named(each.best_te)
        to_te, to_ceiling, *memory = _judgement(each)
        line = [words[fact] for fact in facts]
        line += [_speed(each.burst), best, to_te, to_ceiling, ", ".join(memory)]
        line += [cell for other in others for cell in other.cells(each)]
        lines.append(line)
    measured = [not set(column) <= _NOTHING for column in zip(*lines, strict=True)]
    table = markdown([list(compress(line, measured)) for line in (head, *lines)])
    return f"{_caption(comparisons[0].problem, facts)}\n\n{table}\n\n{_origins(comparisons)}"


def library_table(rows: Sequence[Row]) -> str:
    """One line a problem and pass: burst, and the fastest mode of each library, TransformerEngine
    the last.

    Args:
        rows: of results; problems of which no library was measured are left out.

    Raises:
        BurstError: if a ratio would be of two commits or machines.
    """
    every = [each for each in compare(rows) if each.burst and any(map(each.fastest, LIBRARIES))]
    if not every:
        return "No library was measured."
    facts = differing(every, ("heads", "S", "pass"))
    columns = _measured([_library(impl) for impl in (*LIBRARIES, "te")], every)
    lines = [[*facts, "burst", *(name for column in columns for name in column.columns)]]
    for each in every:
        check_alike(each, [each.burst, *(column.row(each) for column in columns)])
        words = each.problem.words()
        cells = [cell for column in columns for cell in column.cells(each)]
        lines.append([*(words[fact] for fact in facts), _speed(each.burst), *cells])
    return f"{_caption(every[0].problem, facts)}\n\n{markdown(lines)}\n\n{_origins(every)}"


def _origins(every: Sequence[Comparison]) -> str:
    """Of burst's rows: all that a line compares is of one commit and machine."""
    return origins(each.burst or next(iter(each.rows.values())) for each in every)


def _measured(columns: Sequence["_Other"], every: Sequence[Comparison]) -> list["_Other"]:
    return [column for column in columns if any(column.row(each) for each in every)]


def check_alike(each: Comparison, shown: Sequence[Row | None]) -> None:
    """That what is compared was measured by one commit on one machine.

    Raises:
        BurstError: if it was not, as far as rows name them.
    """
    found = {measured_by(row): row for row in shown if row and row.ms}
    if len(found) > 1:
        got = (f"{row.impl}:{row.mode} of {' '.join(by)}" for by, row in found.items())
        where = " ".join(each.problem.words()[name] for name in ("heads", "S", "mask"))
        raise BurstError(
            "benchmarks.show table: rows that it compares must be of one commit and machine, "
            "because a ratio would tell of these too; "
            f"got {' and '.join(got)}, for {where}; measure them in one run"
        )


def _caption(problem: Problem, told: Sequence[str]) -> str:
    same = [f"{name} {value}" for name, value in problem.words().items() if name not in told]
    return f"TFLOP/s per GPU; {', '.join(same)}."


def _speed(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.ms is None:
        return row.status
    return f"{row.tflops_per_gpu:.0f}" if row.tflops_per_gpu >= 10 else f"{row.tflops_per_gpu:.2g}"


def _named(row: Row | None) -> str:
    return f"{_speed(row)} ({row.mode})" if row else "-"


def _judgement(each: Comparison) -> tuple[str, str, str, str]:
    """Ratio to the best te, share of the ceiling, memory of burst and of that te."""
    return (
        _text(Ratio.of(each.burst, each.best_te)),
        _share(Ratio.of(each.burst, each.ceiling)),
        _gib(each.burst),
        _gib(each.best_te),
    )


def _on_cudnn(each: Comparison) -> tuple[str, str, str]:
    """Burst with TransformerEngine's usual kernel: what context parallelism alone brings."""
    row, ceiling = each.rows.get("burst:backend=cudnn"), each.rows.get("ceiling:cudnn")
    return _speed(row), _text(Ratio.of(row, each.best_te)), _share(Ratio.of(row, ceiling))


def _at_any_token(each: Comparison) -> tuple[str, str]:
    """Burst with documents that start at any token of an unpadded sample."""
    row = each.rows.get("burst:auto@zigzag")
    return _speed(row), _text(Ratio.of(row, each.best_te))


def _before(each: Comparison) -> tuple[str, str, str]:
    """An earlier commit's burst."""
    row = each.rows.get("before:auto")
    return _speed(row), _text(Ratio.of(each.burst, row)), _gib(row)


def _share(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}" if ratio else "-"


def _text(ratio: Ratio | None) -> str:
    return str(ratio) if ratio else "-"


def _gib(row: Row | None) -> str:
    return f"{row.peak_gib:.2f}" if row and row.peak_gib is not None else "-"


class _Other(NamedTuple):
    """An implementation with columns of its own, if it was measured: a mode, or the fastest."""

    impl: str
    columns: tuple[str, ...]
    cells: Callable[[Comparison], Sequence[str]]

    def row(self, each: Comparison) -> Row | None:
        return each.rows.get(self.impl) if ":" in self.impl else each.fastest(self.impl)


def _library(impl: str) -> _Other:
    """Another library's fastest mode."""

    def cells(each: Comparison) -> tuple[str, str]:
        row = each.fastest(impl)
        return _named(row), _text(Ratio.of(each.burst, row))

    return _Other(impl, (f"{impl} (mode)", f"burst / {impl}"), cells)


_OTHERS = (
    _Other(
        "burst:backend=cudnn",
        ("burst on cuDNN", "burst on cuDNN / TE", "burst on cuDNN / cuDNN alone"), _on_cudnn,
    ),
    _Other(
        "burst:auto@zigzag",
        ("documents at any token", "documents at any token / TE"), _at_any_token,
    ),
    _Other("before:auto", ("before", "burst / before", "GiB before"), _before),
)  # fmt: skip
