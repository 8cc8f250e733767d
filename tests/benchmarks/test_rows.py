"""The CSV, comparisons between its rows, tables and pictures."""

import csv
import re
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from benchmarks.compared import compare, library_table, markdown_table
from benchmarks.rows import append, check_appendable, read
from benchmarks.sheets import ANY_CSV, ATTENTION_CSV, COLUMNS, LOSS_CSV
from benchmarks.show import ROOT, app, refreshed
from benchmarks.tables import Ratio
from megatron_burst.errors import BurstError
from tests.benchmarks.rows import one_problem, row


def test_rows_come_back_as_they_were_written_and_files_grow(tmp_path):
    path = tmp_path / "rows.csv"
    rows = one_problem(note='with "quotes", commas')
    append(path, rows[:2])
    append(path, rows[2:])
    assert read([path]) == rows
    assert read([path, path]) == rows + rows


def test_other_columns_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    match = (
        "must be a CSV with the columns of benchmarks.attention, .*; got none of them; name a file"
    )
    with pytest.raises(BurstError, match=match):
        append(path, one_problem())
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(BurstError, match="got no such file"):
        read([tmp_path / "missing.csv"])


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda names: [*names[:-2], "note"], "got no column status; name"),
        (lambda names: [n for n in names if n not in ("ms", "dtype")], "got no column dtype, ms;"),
        (lambda names: [*names, "gib"], "got the unknown column 'gib'; name"),
        (
            lambda names: [{"peak_gib": "peek_gib"}.get(name, name) for name in names],
            "got no column peak_gib and the unknown column 'peek_gib', did you mean 'peak_gib'?;",
        ),
        (lambda names: ["impl", "tokens"], "got no column date and 23 other differences;"),
        (lambda names: [*names, *"abcd"], "got the unknown column 'a' and 3 other differences;"),
        (lambda names: names[::-1], "got them twice or in another order;"),
    ],
)
def test_only_columns_that_differ_are_named(tmp_path, change, got):
    path = tmp_path / "rows.csv"
    path.write_text(",".join(change(list(COLUMNS))) + "\n")
    with pytest.raises(BurstError, match=re.escape(got)) as refused:
        read([path])
    assert "heads_q" not in str(refused.value)


def test_burst_auto_is_compared_with_the_fastest_mode_and_the_ceiling():
    (comparison,) = compare(one_problem())
    assert comparison.burst.mode == "auto"
    assert comparison.best_te.mode == "all_gather"
    assert Ratio.of(comparison.burst, comparison.best_te) == (15 / 10, 14 / 12, 16 / 9)
    assert Ratio.of(comparison.burst, comparison.ceiling).value == 8 / 10


def test_without_auto_the_fastest_variant_counts_and_the_newest_row_wins():
    rows = [each for each in one_problem() if each.mode != "auto" or each.impl != "burst"]
    rows += [row("burst:gather", (8.0, 8.0, 8.0)), row("te:all_gather", (30.0, 30.0, 30.0))]
    (comparison,) = compare(rows)
    assert comparison.burst.mode == "gather"
    assert comparison.best_te.mode == "p2p"
    (alone,) = compare([row("burst:auto", (8.0, 8.0, 8.0)), row("te:p2p")])
    assert alone.best_te is None and Ratio.of(alone.burst, alone.best_te) is None


def test_problems_and_passes_are_kept_apart():
    rows = one_problem() + one_problem(131072) + one_problem(pass_="fwd") + one_problem(nodes=2)
    assert len(compare(rows)) == 4


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "attention.csv"
    append(path, one_problem() + one_problem(131072, heads=(32, 32)) + one_problem(pass_="fwd"))
    return path


def test_the_markdown_table_tells_speed_ratio_spread_and_memory(results):
    done = CliRunner().invoke(app, ["table", str(results)])
    assert done.exit_code == 0
    caption, _, head, _, *lines, _, told = done.output.splitlines()
    assert told == "Rows: 2026-01-02, no commit."
    assert caption == (
        "TFLOP/s per GPU; nodes 1, ranks 4, batch 1, head dim 128, mask causal, dtype bfloat16, "
        "pass fwd+bwd."
    )
    assert head == (
        "| heads | S | burst | best TE (mode) | burst / TE | burst / kernel alone | GiB burst, TE |"
    )
    rest = "720 | 480 (all_gather) | 1.50 (1.17-1.78) | 0.80 | 1.50, 2.50 |"
    assert lines == [f"| 32/8 | 64K | {rest}", f"| 32/32 | 128K | {rest}"]


def test_the_same_kernel_on_both_sides_has_columns_of_its_own(tmp_path):
    """A speedup due to the kernel must not be credited to context parallelism."""
    rows = one_problem()
    rows += [row("burst:backend=cudnn", (16.0,) * 3), row("ceiling:cudnn", (12.0,) * 3)]
    append(tmp_path / "both.csv", rows)
    done = CliRunner().invoke(app, ["table", str(tmp_path / "both.csv")])
    *_, head, _, line, _, _ = done.output.splitlines()
    assert head.endswith("| burst on cuDNN | burst on cuDNN / TE | burst on cuDNN / cuDNN alone |")
    assert line.endswith("| 1.50, 2.50 | 450 | 0.94 (0.88-1.00) | 0.75 |")


def test_gains_are_by_kind_and_a_single_problem_is_none(tmp_path):
    """burst:auto takes 10 ms and 1.5 GiB, TransformerEngine's best mode 15 and 2.5."""
    pytest.importorskip("matplotlib")
    from benchmarks import plots as gains

    rows = [*one_problem(), *one_problem(seq=2**17), *one_problem(mask="window-4K")]
    (found,) = gains.gains_of(rows + one_problem(pass_="fwd"))
    assert found == gains.Gains("causal\n4 GPUs", [1.5] * 2, [2.5 / 1.5] * 2)
    append(tmp_path / "a.csv", rows)
    done = CliRunner().invoke(app, ["gains", str(tmp_path / "g.png"), str(tmp_path / "a.csv")])
    assert done.exit_code == 0 and (tmp_path / "g.png").stat().st_size > 10_000, done.output


def test_the_table_shows_one_pass_and_says_if_it_is_missing(results, tmp_path):
    forward = CliRunner().invoke(app, ["table", str(results), "--pass", "fwd"])
    assert len(forward.output.splitlines()) == 7 and "pass fwd." in forward.output
    append(tmp_path / "one.csv", one_problem())
    missing = CliRunner().invoke(app, ["table", str(tmp_path / "one.csv"), "--pass", "fwd"])
    assert missing.output == "No fwd was measured.\n"


def test_pictures_lie_beside_the_file(results):
    done = CliRunner().invoke(app, ["plot", str(results)])
    assert done.exit_code == 0, done.output
    names = ["attention_tflops.png", "attention_memory.png"]
    assert done.output.split() == [str(results.with_name(name)) for name in names]
    for name in names:
        picture = results.with_name(name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_bars_have_the_spread_of_their_repetitions():
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    of_three = row("burst:auto", (10.0, 8.0, 20.0))  # 720 TFLOP/s
    assert plots.spread_of(of_three) == [[360.0], [180.0]]
    assert plots.spread_of(replace(of_three, ms_min=10.00001, ms_max=9.99999)) == [[0.0], [0.0]]


def test_bars_beside_one_another_are_of_one_run():
    """A mode that only an earlier commit measured, over other links, is left out."""
    today, earlier = "torch 2.11; commit 22222222", "torch 2.11; commit 11111111"
    ms = (10.0, 8.0, 20.0)
    rows = [
        replace(row("burst:ring", ms), versions=earlier, date="2026-11-21T10:00:00+00:00"),
        replace(row("burst:auto", ms), versions=today, date="2026-11-27T10:00:00+00:00"),
        replace(row("te:p2p", ms), versions=today, date="2026-11-27T10:00:00+00:00"),
    ]
    (one,) = compare(rows)
    assert list(one.rows) == ["burst:ring", "burst:auto", "te:p2p"]
    assert list(one.alike().rows) == ["burst:auto", "te:p2p"]
    (only,) = compare(rows[2:])
    assert only.alike() == only


def test_no_picture_of_memory_where_none_was_measured(tmp_path):
    append(tmp_path / "cpu.csv", [row("burst:auto", (1.0, 1.0, 1.0)), row("te:p2p")])
    done = CliRunner().invoke(app, ["plot", str(tmp_path / "cpu.csv")])
    assert done.output.split() == [str(tmp_path / "cpu_tflops.png")]


def refused(command, path):
    """The message that a command showing a CSV ends with."""
    done = CliRunner().invoke(app, [command, str(path)])
    assert done.exit_code == 2 and done.output.startswith(f"error: benchmarks: {path}"), done.output
    assert done.output.count("\n") == 1 and isinstance(done.exception, SystemExit)
    return done.output


WRITERS = {
    "table": "benchmarks.attention", "plot": "benchmarks.attention",
    "recompute": "benchmarks.recompute", "loss": "benchmarks.loss",
}  # fmt: skip


@pytest.mark.parametrize("command", WRITERS)
def test_what_is_no_csv_of_the_command_is_refused_in_one_sentence(command, tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    (tmp_path / "empty.csv").touch()
    found = {"": "a folder", "none.csv": "no such file", "binary.csv": "a binary file"}
    for name, got in (found | {"empty.csv": "none of them"}).items():
        said = refused(command, tmp_path / name)
        assert f"got {got}; name a file that {WRITERS[command]} wrote" in said


@pytest.mark.parametrize("command", WRITERS)
def test_a_head_line_alone_is_nothing_to_show(command, tmp_path):
    sheet = LOSS_CSV if command == "loss" else ATTENTION_CSV
    append(tmp_path / "head.csv", [], sheet)
    said = refused(command, tmp_path / "head.csv")
    assert f"nothing to show; got no row; run {WRITERS[command]} first" in said


@pytest.mark.parametrize(
    ("column", "text", "must"),
    [
        ("ms", "abc", "a number under ms, .* got 'abc'"),
        ("seq", "", "a whole number under seq, .* got ''"),
        ("ranks", "2.5", "a whole number under ranks, .* got '2.5'"),
        (
            "tflops_per_gpu",
            "",
            "a number under tflops_per_gpu beside ms, .* got none, as in a prediction",
        ),
        (None, None, "24 cells, .* got 23"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_cell(column, text, must, tmp_path):
    path = tmp_path / "rows.csv"
    append(path, [row("burst:auto", (10.0, 9.0, 12.0), note="two\nlines") for _ in range(2)])
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    if column:
        lines[2][COLUMNS.index(column)] = text
    else:
        del lines[2][-1]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    number = 5 if column else 4  # of the last of its lines in the file
    for command in ("table", "plot"):
        said = refused(command, path)
        assert re.search(f"{re.escape(str(path))}, line {number}, must have {must}; ", said), said
    with pytest.raises(BurstError, match=must):
        check_appendable(path)


def test_a_csv_that_was_cut_off_is_not_added_to(tmp_path):
    """Guards against rows appended to half a line."""
    path = tmp_path / "rows.csv"
    append(path, one_problem())
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    for look in (check_appendable, partial(append, rows=one_problem())):
        with pytest.raises(BurstError, match="last line of .*rows.csv must end, .* cut off; fix"):
            look(path)
    assert path.read_bytes() == whole[:-2]


def test_folders_are_not_made(tmp_path):
    match = "benchmarks.attention: --out must name a writable file.*new/rows.csv: its folder"
    with pytest.raises(BurstError, match=match):
        append(tmp_path / "new" / "rows.csv", one_problem())
    assert not (tmp_path / "new").exists()


def test_predictions_are_no_measurements(tmp_path):
    path = tmp_path / "predicted.csv"
    append(path, [replace(row("burst:auto"), ms=3.0)], ANY_CSV)
    assert "must have a number under ms_min beside ms" in refused("table", path)
    assert read([path], ANY_CSV)[0].ms == 3.0


def test_tables_refuse_rows_of_the_other_benchmark(tmp_path):
    """Guards against showing layers as attention, and vice versa: their columns are the same."""
    kinds = (["table", "plot"], "burst:all"), (["recompute"], "burst:auto")
    for number, (commands, impl) in enumerate(kinds):
        path = tmp_path / f"{number}.csv"
        append(path, [row(impl, (10.0, 9.0, 12.0))])
        for command in commands:
            said = refused(command, path)
            assert f"{path}, line 2, must be a row of {WRITERS[command]}" in said
            assert f"got one of {impl}; show that with benchmarks.show " in said


DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")
    if re.search("^<!-- benchmarks.show ", path.read_text(), re.MULTILINE)
)  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_of_documents_are_those_of_their_csvs(name):
    """`python -m benchmarks.show docs` rebuilds them."""
    text = (ROOT / name).read_text()
    marks = len(re.findall("^<!-- benchmarks.show ", text, re.MULTILINE))
    assert refreshed(text) == text and len(re.findall(r"^\| ---", text, re.MULTILINE)) >= marks


def test_documents_with_tables_are_made_again_by_the_script():
    script = (ROOT / "benchmarks" / "redraw.sh").read_text()
    (patterns,) = re.findall(r"benchmarks\.show docs (.*)", script)
    made = {path for pattern in patterns.split() for path in ROOT.glob(pattern)}
    assert len(DOCUMENTS) >= 7 and made >= {ROOT / name for name in DOCUMENTS}


def test_a_table_has_columns_of_what_was_measured():
    rows = [row("burst:auto", (10.0, 9.0, 12.0)), row("before:auto", (11.0, 10.0, 11.0))]
    head = markdown_table(rows, "fwd_bwd").splitlines()[2]  # no memory on a CPU
    assert head == "| heads | S | burst | GiB burst, TE | before | burst / before |"
    assert "| 1.10 (0.83-1.22) |" in markdown_table(rows, "fwd_bwd")
    rows.append(replace(row("burst:backend=cudnn", (1.0, 1.0, 1.0)), ms=None, status="failed"))
    rows.append(row("yunchang:ring+auto"))
    assert markdown_table(rows, "fwd_bwd").splitlines()[2] == head
    rows += [row(f"torch:{way}", (ms, ms, ms)) for way, ms in (("slow", 30.0), ("fast", 20.0))]
    assert markdown_table(rows, "fwd_bwd").splitlines()[2] == head  # libraries have their own


def test_a_table_of_libraries_has_their_fastest_modes():
    rows = [row("burst:auto", (10.0, 9.0, 12.0)), row("te:p2p", (11.0, 10.0, 11.0))]
    assert library_table(rows) == "No library was measured."
    rows += [row(f"torch:{way}", (ms, ms, ms)) for way, ms in (("slow", 30.0), ("fast", 20.0))]
    head, _, line = library_table(rows).splitlines()[2:5]
    assert head == "| heads | S | pass | burst | torch (mode) | burst / torch |"
    assert line.endswith("| 360 (fast) | 2.00 (1.67-2.22) |")
    apart = replace(rows[-1], versions="torch 2.11.0; commit 2b")
    with pytest.raises(BurstError, match="must be of one commit and machine"):
        library_table([*rows[:2], apart])


@pytest.mark.parametrize(
    "change, said",
    [({"versions": "torch 2.11.0; commit 2b"}, "burst:auto of commit 1a and te:p2p of commit 2b"),
     ({"gpu": "NVIDIA H200; machine 4d"}, "te:p2p of commit 1a machine 4d, for 32/8 64K causal")],
)  # fmt: skip
def test_a_table_compares_no_two_commits_or_machines(change, said):
    code = {"versions": "torch 2.11.0; commit 1a", "gpu": "NVIDIA H200; 1 MHz, 2 C; machine 3c"}
    rows = [row(f"{name}", (10.0, 9.0, 12.0), **code) for name in ("burst:auto", "te:p2p")]
    assert "| 1.00 (0.75-1.33) |" in markdown_table(rows, "fwd_bwd")
    rows[1] = replace(rows[1], **change)
    with pytest.raises(BurstError, match="of one commit and machine") as refused:
        markdown_table(rows, "fwd_bwd")
    assert said in str(refused.value).replace(" machine 3c", "")
    # what the table does not show may be of another
    rows = [rows[0], replace(rows[1], **code), replace(rows[1], mode="a2a", ms=99.0)]
    assert "(p2p)" in markdown_table(rows, "fwd_bwd")


def test_a_table_is_made_below_the_line_that_names_it():
    csv = "benchmarks/results/packed_2xh200_one_node.csv"
    mark = f"<!-- benchmarks.show table {csv} -->\n\n"
    made = refreshed(f"a\n{mark}| old |\n| --- |\n\nb\n")
    assert made.startswith(f"a\n{mark}| heads | S |") and made.endswith(".\n\nb\n")
    assert "old" not in made and "| drawn |" in made and refreshed(made) == made


def test_a_mark_of_an_unknown_table_is_refused():
    with pytest.raises(
        BurstError, match="must name one of table, libraries, frontier, .*; got <!-- "
    ):
        refreshed("<!-- benchmarks.show tabel A.csv -->\n\n| old |\n\n")
