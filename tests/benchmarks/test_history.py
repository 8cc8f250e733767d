"""Measurements stay: rows are added and marked, never deleted or changed."""

import csv
import io
import re
import subprocess

import pytest
from typer.testing import CliRunner

from benchmarks.rows import SUPERSEDED, append, check_appendable, read
from benchmarks.show import ROOT, app
from megatron_burst.errors import BurstError
from tests.benchmarks.rows import one_problem, row

RESULTS, METHOD = "benchmarks/results", ROOT / "docs/benchmarks/how-measured.md"
RENAMED = {"hosts": "nodes"}  # columns, by their names of then
REWORDED = ("link",)  # whose text has changed in rows that stayed
ADDED = {  # columns added since, and what they say of older rows
    "frontier_": {"ranks": "1"}, "balance_steps_": {"dp": "1"},
}  # fmt: skip
RECORDINGS = "timeline_"  # of a profiler, whose events are no rows


def git(*words, **options):
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, check=True, **options
    ).stdout


@pytest.fixture
def history():
    """The hash and path of each CSV of results in any commit before this one."""
    try:
        top = git("rev-parse", "--show-toplevel", text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        top = ""
    if top != str(ROOT.resolve()):
        pytest.skip("no git checkout, so no history")
    objects = (
        line.split(" ", 1) for line in git("rev-list", "--objects", "HEAD", text=True).splitlines()
    )
    found = [(one[0], one[1]) for one in objects if one[1:] and one[1].startswith(f"{RESULTS}/")]
    return [(blob, path) for blob, path in found if path.endswith(".csv")]


def rows_of(text, added=()):
    """Each row as what it says, whatever the columns' order, and empty columns added since."""
    head, *lines = [cells for cells in csv.reader(io.StringIO(text)) if cells]
    columns = [RENAMED.get(name, name) for name in head]
    assert all(len(cells) == len(columns) for cells in lines)
    left_out = {SUPERSEDED, *REWORDED}
    more = {(name, cell) for name, cell in dict(added).items() if name not in columns}
    return {
        frozenset(
            (name, cell) for name, cell in zip(columns, cells, strict=True)
            if cell and name not in left_out
        )
        | more
        for cells in lines
    }  # fmt: skip


def test_every_row_that_was_ever_committed_is_still_there(history):
    paths = (ROOT / RESULTS).glob("*.csv")
    today = set().union(*(rows_of(path.read_text(encoding="utf-8")) for path in paths))
    for blob, path in history:
        if RECORDINGS not in path:
            name = path.rpartition("/")[2]
            added = next((more for kind, more in ADDED.items() if name.startswith(kind)), {})
            lost = rows_of(git("cat-file", "blob", blob).decode(), added) - today
            assert not lost, (
                f"{path} of {blob} had {len(lost)} rows more, such as {min(map(sorted, lost))}"
            )


def test_a_superseded_row_names_the_commit_that_did_so(history):
    commits = set()
    for path in (ROOT / RESULTS).glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            commits |= {line.get(SUPERSEDED, "") for line in csv.DictReader(file)}
    assert len(commits - {""}) > 5
    known = git("rev-list", "HEAD", text=True).splitlines()
    for commit in commits - {""}:
        assert any(full.startswith(commit) for full in known), commit


def test_commits_that_rows_name_are_in_the_repository_and_told(history):
    """With the tables whose rows name none, or one with changes."""
    known, told = git("rev-list", "HEAD", text=True).splitlines(), METHOD.read_text()
    none, changed, commits = 0, 0, set()
    for path in (ROOT / RESULTS).glob("*.csv"):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"; commit (\w+)( with changes)?", text)
        commits |= {commit for commit, _ in named}
        changed += sum(bool(changes) for _, changes in named)
        if path.name.startswith(("attention_", "packed_", "before_")):
            none += not named
            kind = "" if named else "no commit"
            kind = "with changes" if any(changes for _, changes in named) else kind
            assert not kind or path.name in told, (path, kind)
    assert len(commits) > 20
    assert [one for one in commits if not any(full.startswith(one) for full in known)] == []
    assert f"{len(commits)} commits" in told and f"{changed} rows" in told and none == 0


@pytest.fixture
def marked(tmp_path):
    """A CSV whose first rows, twice as fast as those that count, are superseded."""
    path = tmp_path / "rows.csv"
    old = [row(f"burst:{mode}", (5.0, 5.0, 5.0), gib=0.5) for mode in ("auto", "gone")]
    append(path, [*old, *one_problem()])
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    marks = ["1f6aedd"] * len(old) + [""] * (len(lines) - len(old))
    with path.open("w", newline="") as file:
        pairs = zip(lines, marks, strict=True)
        csv.writer(file).writerows(
            [[*head, SUPERSEDED], *([*cells, mark] for cells, mark in pairs)]
        )
    return path


def test_superseded_rows_count_nowhere(marked, tmp_path):
    assert read([marked]) == one_problem()
    append(tmp_path / "plain.csv", one_problem())
    tables = [
        CliRunner().invoke(app, ["table", str(path)]).output
        for path in (marked, tmp_path / "plain.csv")
    ]
    assert tables[0] == tables[1] and "| 720 | 480 (all_gather) | 1.50 " in tables[0]


def test_rows_are_added_below_superseded_ones_and_nothing_else_changes(marked):
    before, more = marked.read_bytes(), one_problem(seq=131072)
    check_appendable(marked)
    append(marked, more)
    assert marked.read_bytes().startswith(before)
    assert read([marked]) == one_problem() + more
    with marked.open(newline="") as file:
        assert {len(cells) for cells in csv.reader(file)} == {25}


def test_a_superseded_row_is_checked_as_others_are(marked):
    marked.write_text(marked.read_text().replace(",5,5,5,", ",five,5,5,", 1))
    with pytest.raises(BurstError, match="line 2, must have a number under ms, .* got 'five'"):
        check_appendable(marked)


def test_measurements_are_written_by_nothing_but_append():
    """Predictions are no measurements."""
    paths = (ROOT / "benchmarks").glob("*.py")
    writers = {path.name for path in paths if "csv.writer(" in path.read_text()}
    assert writers == {"rows.py", "validate_plan.py"}
