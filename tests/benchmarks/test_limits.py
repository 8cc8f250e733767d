"""docs/benchmarks/limits.md: its tables are those of the rows, and its sentences of the tables."""

import re

import pytest

from benchmarks.limits import TABLES
from benchmarks.show import ROOT, refreshed

PAGE = ROOT / "docs" / "benchmarks" / "limits.md"


@pytest.fixture(scope="module")
def text():
    return PAGE.read_text()


def cells(name: str) -> list[dict[str, str]]:
    head, *rows = TABLES[name]()
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_tables_are_made_from_the_rows(text):
    assert refreshed(text) == text
    assert re.findall(r"<!-- benchmarks.show limits (\w+) -->", text) == list(TABLES)
    assert refreshed(text.replace("0.9", "0.8")) != text.replace("0.9", "0.8")


def test_sentences_follow_from_the_tables(text):
    square = next(row for row in cells("machine") if row["what"].startswith("matrix"))
    measured = float(square["measured"].split()[0])
    assert round(measured / float(square["data sheet"]), 1) == 0.8
    rows = [row for row in cells("attention") if "+" not in row["GPUs"]]
    shares = [float(row["ms of transfers inside nodes"]) / float(row["ms"]) for row in rows]
    assert f"{100 * min(shares):.1f} to {100 * max(shares):.0f} %" in text
    losses = [1 - float(row["of the kernel alone"]) for row in rows]
    assert f"{100 * min(losses):.0f} to {100 * max(losses):.0f} % of it" in text
    two = {row["tokens"]: float(row["of the kernel alone"]) for row in cells("attention")
           if "+" in row["GPUs"]}  # fmt: skip
    assert two.pop("64K") < 0.8 and min(two.values()) >= 0.94
    kept = [row for row in cells("steps") if row["what"] == "step, burst, attention kept"]
    assert all(0.6 < float(row["of the matrix product"]) < 0.7 for row in kept)
