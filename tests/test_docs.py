"""What the documents name must be there."""

import re
from pathlib import Path

from megatron_burst.config import Tuning
from tests.schedule.support import table

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


def anchors(path):
    """What GitHub makes of a document's headings, and the anchors that it sets itself."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="(.*?)">', text))


def test_links_to_headings_lead_somewhere():
    checked = 0
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").glob("*.md")]:
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
            target = path.parent / file if file else path
            assert anchor in anchors(target), (path, file, anchor)
            checked += 1
    assert checked > 10


# what the table in CONTRIBUTING.md has in its last column and nobody means otherwise
UNWANTED = (
    r"\b(deal(?:t|s|ing)? out|key heads|replay\w*|visitors?|visiting|settled?|mend(?:ed|s)?)\b"
)


def test_documents_use_one_word_for_a_thing():
    documents = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").glob("*.md")]
    texts = {path: re.sub(r"`[^`\n]*`", "", path.read_text()) for path in documents}
    found = {
        (path.name, word)
        for path, text in texts.items()
        if path.name != "CONTRIBUTING.md"
        for word in re.findall(UNWANTED, text, re.IGNORECASE)
    }
    assert not found


def test_every_tuning_is_in_its_document():
    rows = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "tuning.md").read_text(), re.MULTILINE)
    assert [row.replace("\\", "") for row in rows] == Tuning.legal().split(", ")


def test_the_table_of_masks_is_what_modes_check():
    assert table() in (ROOT / "docs" / "masks.md").read_text()
