"""docs/benchmarks/losses.md: what is worse for burst in any published table is there.

Guards against rows that are compared with another run's, and losses that no page tells.
"""

import re
from dataclasses import replace

import pytest

from benchmarks import losses
from benchmarks.show import ROOT, refreshed
from tests.benchmarks.rows import row

PAGES = ROOT / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def page():
    return (PAGES / "losses.md").read_text()


def lines_below(name, kind):
    """Cells by head, of each line of a page's generated tables of a kind."""
    text = (PAGES / f"{name}.md").read_text()
    for table in re.findall(rf"show {kind} .*-->\n\n((?:\|.*\n)+)", text):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]]
                           for line in table.splitlines())  # fmt: skip
        yield from (dict(zip(head, line, strict=True)) for line in lines)


def test_all_tables_are_of_the_rows_of_today(page):
    assert refreshed(page) == page
    assert set(re.findall(r"show losses (\w+) -->", page)) == set(losses.TABLES)
    for name, lines in losses.TABLES.items():
        assert len([*lines()]) > 1 and losses.table(name) in page


@pytest.mark.parametrize("name", ["attention", "packed", "nodes", "comparison"])
def test_every_ratio_below_1_of_a_published_table_is_told(page, name):
    told = [line for line in page.splitlines() if line.startswith("|")]
    count = 0
    for kind in ("table", "libraries"):
        for line in lines_below(name, kind):
            for head, cell in line.items():
                slow = re.match(r"0\.\d\d \(.*\)$", cell) and " / " in head
                if slow and not head.endswith(("alone", "before")):
                    count += 1
                    some = (f"| {line['heads']} | {line['S']} |", f"**{cell}**")
                    assert any(all(each in one for each in some) for one in told), (line, head)
    assert count or name == "packed"


def test_every_row_with_more_memory_than_transformerengines_is_told(page):
    told = [line for line in page.splitlines() if line.startswith("|")]
    count = 0
    for name in ("attention", "packed", "nodes"):
        for line in lines_below(name, "table"):
            ours, _, theirs = line["GiB burst, TE"].partition(", ")
            if theirs != "-" and float(ours) > float(theirs):
                count += 1
                some = f"| {line['heads']} | {line['S']} |", f"**{ours}, {theirs}**"
                assert any(all(each in one for each in some) for one in told), line
    assert count > 10


def test_every_job_that_is_slower_is_told(page):
    for line in lines_below("steps", "jobs"):
        ratio = line["times as fast as the fastest"]
        assert ratio == "-" or float(ratio) >= 1 or f"| **{ratio}** |" in page, line


def test_what_is_worse_is_bold():
    own, peer = row("burst:auto", (10.0, 9.0, 11.0), gib=2.0), row("te:p2p", (9.0, 9.0, 9.0), gib=3)
    cells = losses._loss_cells(own, peer)
    assert cells[:2] == ("**0.90 (0.82-1.00)**", "2.00, 3.00")
    assert losses._loss_cells(own, replace(peer, ms=20.0)) == ()
    assert losses._loss_cells(own, replace(peer, ms=20.0, peak_gib=1.0))[1] == "**2.00, 1.00**"
    assert losses._loss_cells(own, row("te:p2p")) == ()
