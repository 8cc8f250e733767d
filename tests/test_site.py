"""The documentation as a site: every link works, every page opens in a real browser."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
BROWSER = ROOT / "tests" / "browser.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, in $SITE if that is set; mkdocs is strict: a dead link or anchor fails."""
    named = os.environ.get("SITE")
    folder = ROOT / named if named else tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(
        [*command, "--config-file", ROOT / "mkdocs.yml", "--site-dir", folder],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def browser():
    """Whether Qt's browser starts here; otherwise why not."""
    try:
        import PySide6.QtWebEngineWidgets  # noqa: F401
    except ImportError as error:  # a system library that a container lacks
        return str(error)
    return ""


needs_browser = pytest.mark.skipif(bool(browser()), reason=f"no browser: {browser()}")


@needs_browser
@pytest.mark.parametrize("width", [1300, 390], ids=["desktop", "phone"])
def test_every_page_opens_in_a_browser(site, width, draw):
    """With its heading and pictures, an empty console, nothing from another server, and nothing
    wider than the window but tables and code, which have bars of their own."""
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 30
    pages = draw(pages, 20)
    shots = Path(os.environ.get("SCREENSHOTS", site / "screenshots")) / f"{width}"
    shots.mkdir(exist_ok=True, parents=True)
    run = subprocess.run(
        [sys.executable, BROWSER, shots, *pages], capture_output=True, text=True, timeout=300,
        env=os.environ | {"WIDTH": f"{width}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == len(pages)
    for page, seen in found.items():
        assert seen["loaded"] and seen["heading"], page
        assert not seen["missing"] and not seen["console"] and seen["wider"] <= 0, (page, seen)
        assert not seen["split"], (page, seen)
        assert all(source.startswith("file:") for source in seen["scripts"]), (page, seen)


QUERIES = {  # what users type, and the page that answers
    "install": "start/install", "hang": "troubleshooting", "recompute": "how-to/recompute",
    "sliding window": "masks", "fsdp": "how-to/without-megatron",
    "out of memory": "troubleshooting", "OOM": "troubleshooting", "convergence": "troubleshooting",
    "which flags for my model": "start/flags", "tokens per second": "benchmarks/steps",
    "MFU": "benchmarks/steps", "1M tokens": "benchmarks/steps", "multi-node": "how-to/nodes",
    "flash attention 3": "backends", "moe": "families/index", "slurm": "how-to/nodes",
    "packed samples": "how-to/packed", "verl": "integrations",
    "transformers": "how-to/without-megatron", "checkpoint": "start/quickstart",
    "NaN": "how-to/checks", "zigzag": "masks", "prefix tree": "slices", "same bits": "how-to/rl",
}  # fmt: skip


@needs_browser
def test_the_search_finds_the_right_page_first_from_disk(site):
    command = [sys.executable, BROWSER, "--search", site / "index.html", *QUERIES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    first = {query: (pages or [""])[0].partition("#")[0] for query, pages in found.items()}
    wrong = {query: page for query, page in first.items()
             if not page.endswith(f"/{QUERIES[query]}.html")}  # fmt: skip
    assert len(first) == 24 and wrong == {}


MOST_PAGES, ALL_WORDS, MOST_WORDS = 43, 52_500, 2500
# looked up: generated, or a table with a row for each thing
LONG = {"changelog.md", "benchmarks/losses.md", "benchmarks/steps.md"}
GENERATED = ("reference/", "families/", "compatibility.md", "benchmarks/losses.md")


def test_the_pages_are_few_and_short():
    """What is not generated from code and rows: a page for each question that a user has."""
    docs = ROOT / "docs"
    pages = {f"{path.relative_to(docs)}": path for path in docs.rglob("*.md")}
    read = {name: path for name, path in pages.items() if not name.startswith(GENERATED)}
    words = sum(len(path.read_text().split()) for path in read.values())
    print(f"{len(read)} pages, {words} words")
    assert len(read) <= MOST_PAGES and words <= ALL_WORDS


def test_no_page_is_too_long_to_read():
    """But decisions, and what is looked up."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)["nav"]
    read = [page for part in nav if "Reference" not in part for page in _pages(part)]
    elsewhere = {
        page: path for path, page in runpy.run_path(ROOT / "docs/hooks.py")["ELSEWHERE"].items()
    }
    words = {
        page: len((ROOT / elsewhere.get(page, f"docs/{page}")).read_text().split())
        for page in read if not page.startswith("decisions/")
    }  # fmt: skip
    assert len(words) > 40
    assert {page for page, count in words.items() if count > MOST_WORDS} == LONG


class _Loader(yaml.SafeLoader):
    """That does not make the functions which mkdocs.yml names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def _pages(part):
    """The pages of a part of the navigation."""
    if isinstance(part, str):
        return [part]
    values = part.values() if isinstance(part, dict) else part
    return [page for value in values for page in _pages(value)]


def test_every_option_and_refusal_has_its_line(site):
    flags = (site / "reference" / "flags.html").read_text()
    assert {"--context-parallel-impl", "--burst-keep", "--burst-fused-loss"} <= set(
        re.findall(r"<code>(--[a-z-]+)</code>", flags)
    )
    errors = (site / "reference" / "errors.html").read_text()
    assert errors.count("<tr>") > 200
    assert "the calling rank must belong to the group" in errors  # a need of attention.py
    assert "--cu-seqlens must fit into --seq-length" in errors  # a BurstError of tools/
    commands = (site / "reference" / "command-line.html").read_text()
    assert all(f"megatron-burst {name}" in commands for name in ("plan", "doctor", "calibrate"))


THEIRS = [  # BurstAttention's and BurstEngine's words
    "RingAttention", "global attention optimization", "local attention optimization", "double ring",
    "topology-aware ring communication", "sequence-level selective checkpointing",
    "sequence-level fusion of LM head and loss", "workload balance",
    "Performer", "Linformer", "CPM-Live",
]  # fmt: skip


def test_words_of_the_papers_are_found_by_the_search(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = [each["text"] for each in index["docs"] if "concepts/papers.html" in each["location"]]
    text = re.sub(r"<[^>]+>", "", " ".join(found)).lower()
    assert [words for words in THEIRS if words.lower() not in text] == []
