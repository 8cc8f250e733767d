"""README.md: every figure is that of rows in benchmarks/results, which are named here; its size."""

import re
from operator import attrgetter

import pytest

from benchmarks.compared import compare
from benchmarks.frontier_table import points_of, runs_in
from benchmarks.sheets import FRONTIER_CSV, PACKED_CSV
from benchmarks.tables import Ratio
from tests.benchmarks.test_figures import NODE, README, on_cudnn, rows_of, span

PEERS = "peers_4xh200_one_node"
# the table's rows: CSV, run, words of the problem, the setting of burst's column
STEPS = (
    ("frontier_2xh200", "2026-11-30T13:46:40", "llama3.2-1b, 16 layers", "keep"),
    ("frontier_2xh200", "2026-11-30T14:09", "qwen3-8b, 36 layers", "keep@host"),
    ("frontier_4xh200", "2026-11-27T07:26:40", "one document", "keep"),
    ("frontier_4xh200", "2026-11-27T04:31:48", "161 documents", "auto-12"),
    ("frontier_1xh200", "2026-11-26T06:48:15", "40 documents", "auto-7"),
    ("frontier_1xh200", "2026-11-26T04:44:49", "qwen3-1.7b, 28 layers", "auto-18"),
)
SETTINGS = {"off": "nothing recomputed", "offload": "offloading"}
NO_MEASUREMENT = {
    "0.16",
    "0.19",
    "2.9",
    "3.12",
    "3.13",
    "1.7",
    "2.0",
    "3.2",
}  # versions, of models and a licence


def megatrons(csv: str, run: str) -> list:
    """The rows of Megatron's settings in all runs of a run's problem, failed ones too."""
    every = rows_of(csv, FRONTIER_CSV)
    problem = attrgetter("model", "layers", "seq", "documents", "ranks")
    (own,) = {problem(row) for row in every if row.run.startswith(run)}
    return [row for row in every if row.impl == "megatron" and problem(row) == own]


def points(csv: str, run: str) -> dict:
    """The settings of a run that ran, by name."""
    (rows,) = (rows for name, rows in runs_in(rows_of(csv, FRONTIER_CSV)) if run in name)
    return {point.name: point for point in points_of(rows) if point.ms}


def cell(point) -> str:
    seconds = point.ms / 1e3
    return f"{seconds:.{1 if seconds > 10 else 2}f} s, {point.peak_gib:.0f} GiB"


def steps() -> list[list[str]]:
    """The table's cells behind the job's."""
    table = []
    for csv, run, words, setting in STEPS:
        (name,) = (name for name, _ in runs_in(rows_of(csv, FRONTIER_CSV)) if run in name)
        assert words in name
        of_run = points(csv, run)
        full = of_run["megatron:full"]
        fastest = min((x for x in of_run.values() if not x.is_burst), key=lambda x: x.ms)
        others = {row.setting for row in megatrons(csv, run)} - {"full"}
        second = "no other that we tried fits" if others else "no other was tried"
        if fastest.name != full.name:
            second = f"{cell(fastest)} ({SETTINGS[fastest.name.partition(':')[2]]})"
        table.append([cell(full), second, cell(of_run[f"burst:{setting}"])])
    return table


def attention() -> str:
    """How many times as fast as TransformerEngine's fastest mode: causal and packed, on one node,
    with heads of 128."""
    sheets = [rows_of(f"attention_2xh200_one_node+{NODE}")]
    sheets += [rows_of(f"packed_{ranks}xh200_one_node", PACKED_CSV) for ranks in (2, 4)]
    ratios = [
        Ratio.of(one.burst, one.best_te).value
        for rows in sheets for one in compare(rows)
        if one.problem.pass_ == "fwd_bwd" and one.best_te and one.problem.seq >= 32 << 10
        and not getattr(one.problem, "mask", "").startswith("window")
    ]  # fmt: skip
    return span(ratios)


def the_same_kernel() -> str:
    return span([ratio for _, ratio in on_cudnn(rows_of(f"attention_2xh200_one_node+{NODE}"))])


def nothing_recomputed() -> str:
    """How many times as fast a step of a dense model is if neither side recomputes."""
    ratios = []
    for csv in ("frontier_4xh200", "frontier_2xh200", "frontier_1xh200"):
        for name, rows in runs_in(rows_of(csv, FRONTIER_CSV)):
            found = {point.name: point for point in points_of(rows) if point.ms}
            if {"burst:off", "megatron:off"} <= found.keys() and "30b" not in name:
                ratios.append(found["megatron:off"].ms / found["burst:off"].ms)
    return span(ratios)


def lines() -> list[str]:
    """README.md without code, comments, and links' targets."""
    text = README.read_text(encoding="utf-8")
    form = r"```.*?```|<!--.*?-->|`[^`]*`|\]\([^)]*\)"
    return [" ".join(x.split()) for x in re.sub(form, " ", text, flags=re.DOTALL).splitlines()]


def test_the_table_of_steps_is_that_of_its_rows():
    rows = [line.strip("| ").split(" | ") for line in lines() if line.startswith("|")]
    table = [[x.strip("*, ") for x in row[1:]] for row in rows if " GiB" in row[1]]
    assert table == steps()


def test_a_column_has_no_setting_that_was_slower_for_megatron():
    """Of the same problem, no other run had a faster setting of Megatron's by more than noise."""
    for (csv, run, *_), cells in zip(STEPS, steps(), strict=True):
        others = [
            point.ms for _, rows in runs_in(megatrons(csv, run))
            for point in points_of(rows) if point.ms
        ]  # fmt: skip
        told = cells[0] if cells[1].startswith("no other") else cells[1]
        assert 1e3 * float(told.partition(" ")[0]) < 1.02 * min(others), told


@pytest.mark.parametrize(
    "begins, figure",
    [
        ("Attention alone", attention),
        ("- Burst's attention is faster", the_same_kernel),
        ("- Burst gains most", nothing_recomputed),
    ],
)
def test_figures_of_rows_are_told_where_they_belong(begins, figure):
    (line,) = (line for line in lines() if line.startswith(begins))
    assert re.search(rf"(?<![\d.]){re.escape(figure())}(?!\d)", line), (line, figure())


def test_ulysses_with_burst_s_kernel_is_as_fast():
    rows = rows_of(PEERS) + rows_of("packed_4xh200_one_node", PACKED_CSV)
    ratios = [Ratio.of(one.burst, peer).value for one in compare(rows)
              if one.problem.pass_ == "fwd_bwd" and (peer := one.fastest("ulysses"))]  # fmt: skip
    assert len(ratios) > 10 and min(ratios) > 0.95 and max(ratios) < 1.16


def test_it_is_short_and_has_no_other_figures():
    text = "\n".join(lines())
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90 and len(numbers) <= 75
    known = {number for row in steps() for one in row for number in re.findall(r"\d+\.\d+", one)}
    figures = attention(), the_same_kernel(), nothing_recomputed()
    known |= {number for figure in figures for number in re.findall(r"\d+\.\d+", figure)}
    assert {x for x in numbers if "." in x} <= known | NO_MEASUREMENT
