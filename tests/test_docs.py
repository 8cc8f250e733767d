"""What the documents name must exist."""

import re
import runpy
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest

from megatron_burst import slices
from megatron_burst.config import legal_tunings, parse_tunings
from megatron_burst.errors import BurstError
from megatron_burst.mcore.refusals import refuse
from megatron_burst.tools.main import app
from tests import refused
from tests.mask_cases import table

ROOT = Path(__file__).parents[1]
FLAGS = (ROOT / "docs" / "reference" / "flags.md").read_text()
PAGES = runpy.run_path(str(ROOT / "docs" / "reference_pages.py"))["PAGES"]


def documents():
    docs = {
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*/README.md"),
        *(ROOT / "conformance").rglob("*.md"),
        ROOT / "benchmarks/columns.md",
    }
    return [*ROOT.glob("*.md"), *sorted(docs)]


def test_tests_named_in_documents_exist():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    named = set()
    for path in (ROOT / "docs").rglob("*.md"):
        named |= set(re.findall(r"`(test_\w+)`", path.read_text()))
    assert len(named) > 4 and named <= there, named - there


def test_relative_links_lead_somewhere():
    for path in documents():
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), (path, link)


def anchors(path):
    """GitHub's anchors for a document's headings, and the anchors that it sets itself."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="(.*?)">', text))


def test_links_to_headings_lead_somewhere():
    checked = 0
    for path in documents():
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
            target = path.parent / file if file else path
            assert anchor in anchors(target), (path, file, anchor)
            checked += 1
    assert checked > 10


# the last column of CONTRIBUTING.md's table, where no other meaning is common
UNWANTED = re.compile(
    r"key heads|deal(?:t|s|ing)? (?:\w+ )?out\b|(?<![a-z])(?:"
    r"visitors?|visiting|guests?|doors?|way[ _]home|settle[sd]?|settling|dealt|"
    r"mend(?:ed|s|ing)?)(?![a-z])",
    re.IGNORECASE,
)


def unwanted(path, text):
    return {(str(path.relative_to(ROOT)), word) for word in UNWANTED.findall(text)}


def test_documents_use_one_word_for_a_thing():
    found = set()
    for path in documents():
        if path.name != "CONTRIBUTING.md":
            text = path.read_text()
            found |= unwanted(path, re.sub(r"`[^`\n]*`", "", text))
    assert not found


def test_code_and_file_names_use_the_same_words():
    """Names too: `_` and a capital begin a word."""
    found = set()
    for folder in ("megatron_burst", "benchmarks", "tests", "examples", "scripts"):
        paths = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]
        assert paths or folder == "scripts"
        for path in paths:
            if path != Path(__file__):
                text = f"{path.relative_to(ROOT)}\n{path.read_text()}"
                found |= unwanted(path, re.sub(r"([a-z])([A-Z])", r"\1 \2", text))
    assert not found


BLOCKS = re.split(
    r"^# %% (\w+)\n", (ROOT / "docs" / "api_examples.py").read_text(), flags=re.MULTILINE
)
NOT_ALONE = {  # need a process group, Megatron or another framework
    "cp_groups", "CPGroups", "fuse_loss", "burst_spec", "SlicedSeqParams", "BalancedBatches",
    "hf", "titan", "auto",
}  # fmt: skip


def test_examples_of_public_names_run(capsys):
    names = {}
    for name, code in zip(BLOCKS[1::2], BLOCKS[2::2], strict=True):
        compiled = compile(code, f"docs/api_examples.py, {name}", "exec")
        if name not in NOT_ALONE:
            exec(compiled, names)
    assert set(BLOCKS[1::2]) > NOT_ALONE and {"mask", "ratio", "whole"} <= set(names)
    assert "window" in capsys.readouterr().out


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_what_the_code_says(name):
    """`make docs` rebuilds them."""
    assert (ROOT / "docs" / name).read_text() == PAGES[name]()


def test_every_tuning_is_in_its_document():
    page = (ROOT / "docs" / "how-to" / "settings.md").read_text().partition("## Tunings")[2]
    rows = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert [row.replace("\\", "") for row in rows] == legal_tunings().split(", ")


def test_the_table_of_masks_is_what_modes_check_and_kernels_say():
    text = (ROOT / "docs" / "masks.md").read_text()
    assert table() in text


@pytest.mark.parametrize("name", refused.REFUSED)
def test_attention_that_is_refused_is_so_in_the_words_of_its_table(name):
    text = (ROOT / "docs" / "models.md").read_text()
    said = refused.sentence(refused.REFUSED[name])
    assert f"| {name} | {said} |" in text and "; got " in said and ", because " in said
    assert text.count(refused.table()) == 1  # and no row of something else


PAPERS = ROOT / "docs" / "concepts" / "papers.md"


def test_what_the_page_of_the_papers_names_exists():
    """Files and CSVs, of the package or from the root; burst's flags, tunings, commands and makers
    of slices."""
    roots = ROOT, ROOT / "megatron_burst"
    named = set(re.findall(r"`([^`\n]+)`", PAPERS.read_text()))
    commands = {each.name or each.callback.__name__ for each in app.registered_commands}
    kinds = {
        r"([\w.-]+/\S*|\w+\.py\b)": lambda name: any((root / name).exists() for root in roots),
        r"(--\S+)": lambda flag: f"| `{flag}` |" in FLAGS,
        r"(\w+=\w+)$": parse_tunings,
        r"megatron-burst (\w+)": commands.__contains__,
        r"slices\.(?!py)(\w+)": partial(hasattr, slices),
    }
    found = {kind: {m[1] for name in named if (m := re.match(kind, name))} for kind in kinds}
    assert min(map(len, found.values())) > 1
    for kind, exists in kinds.items():
        assert {name for name in found[kind] if not exists(name)} == set()


COMPATIBILITY = runpy.run_path(str(ROOT / "scripts" / "compatibility.py"))


def test_the_page_of_compatibility_is_made_of_its_results():
    tests = COMPATIBILITY["read"]()
    assert COMPATIBILITY["page"](tests) == (ROOT / "docs" / "compatibility.md").read_text()
    functions = {}
    for test in tests[1:]:
        file, _, name = test.name.partition("::")
        text = functions.setdefault(file, (ROOT / "tests" / "mcore" / file).read_text())
        assert f"def {name.partition('[')[0]}(" in text, test.name
    for release in COMPATIBILITY["RELEASES"]:
        results = [test.results[release] for test in tests[1:]]
        if any(results):
            assert results.count("passed") > 200 and "failed" not in results, release


def test_every_row_of_compatibility_has_tests():
    tests = COMPATIBILITY["read"]()
    for rows in COMPATIBILITY["ROWS"].values():
        for row, patterns in rows.items():
            for pattern in patterns:
                found = COMPATIBILITY["tests_of"]([pattern], tests)
                assert any("passed" in test.results.values() for test in found), (row, pattern)


def test_every_test_of_compatibility_has_a_row_that_says_what_it_runs():
    tests = COMPATIBILITY["read"]()[1:]
    rows = (COMPATIBILITY["ROWS"] | COMPATIBILITY["rows_of_cases"](tests)).values()
    patterns = [pattern for titled in rows for row in titled.values() for pattern in row]
    shown = set(COMPATIBILITY["tests_of"](patterns, tests))
    assert [test.name for test in tests if test not in shown] == []
    form = r"torch(_dist)?: saved with(out)? burst.*, resumed with(out)? burst.*"
    named = {COMPATIBILITY["name_of"](test) for test in tests if test.file == "checkpoints"}
    assert {name for name in named if not re.fullmatch(form, name)} == set()


def test_a_printed_refusal_is_found_in_the_page_of_errors():
    """Word by word, because users search for it."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    options = Namespace(seq_length=1022, context_parallel_size=2)
    with pytest.raises(BurstError) as caught:
        refuse("command", options, "burst")
    must, _, rest = str(caught.value).partition(": ")[2].partition("; got ")
    assert f"| {must} | choose a {{multiple of 2 \\* context_parallel_size}} |" in page
    assert rest.endswith("choose a multiple of 4, such as 1020 or 1024")
