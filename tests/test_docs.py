"""What the documents name must be there."""

import re
from pathlib import Path

from megatron_burst.config import Tuning

ROOT = Path(__file__).parents[1]


def test_tests_named_in_documents_exist():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    named = set()
    for path in (ROOT / "docs").glob("*.md"):
        named |= set(re.findall(r"`(test_\w+)`", path.read_text()))
    assert len(named) > 10 and named <= there, named - there


def test_relative_links_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), (path, link)


def test_every_tuning_is_in_its_document():
    rows = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "tuning.md").read_text(), re.MULTILINE)
    assert [row.replace("\\", "") for row in rows] == Tuning.legal().split(", ")
