"""The table of tests/README.md: every module and every test has a place in it, and `make test-of`
runs what it says."""

import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "test_of.py"
TEST_OF = runpy.run_path(str(SCRIPT))
ROWS = TEST_OF["rows"]()


def test_every_module_has_one_row_or_lies_in_a_folder_that_has_one():
    twice = [name for name, count in Counter(name for name, _ in ROWS).items() if count > 1]
    assert twice == [] and all((ROOT / name).exists() for name, _ in ROWS)
    modules = [f"{path.relative_to(ROOT)}" for path in (ROOT / "megatron_burst").rglob("*.py")]
    assert [module for module in modules if TEST_OF["tests_of"](module) is None] == []


def test_every_test_file_is_named_and_every_named_one_exists():
    named = set()
    for name, tests in ROWS:
        for test in tests:
            path = ROOT / test
            named |= set(path.glob("test_*.py")) if path.is_dir() else {path}
            assert path.exists(), (name, test)
    assert set((ROOT / "tests").rglob("test_*.py")) == named


def test_of_a_module_those_of_its_row_are_run_and_else_those_of_its_folder():
    tests_of = TEST_OF["tests_of"]
    own = ["tests/schedule/test_topology.py", "tests/schedule/test_placement.py"]
    assert tests_of("megatron_burst/schedule/topology.py") == own
    assert tests_of(f"{ROOT}/megatron_burst/schedule/topology.py") == own
    ring = tests_of("megatron_burst/schedule/ring.py")
    assert ring == tests_of("megatron_burst/schedule") and ring != own
    command = [sys.executable, SCRIPT, "megatron_burst/schedule/topology.py"]
    run = subprocess.run(
        [*command, "--collect-only", "-q"], cwd=ROOT, capture_output=True, text=True
    )
    collected = {line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line}
    assert run.returncode == 0 and collected == set(own), run.stdout + run.stderr


@pytest.mark.parametrize("file", ["", "megatron_burst/no_such.py", "CHANGELOG.md", "/etc/hosts"])
def test_a_file_without_a_row_is_answered_in_a_sentence(file, capsys):
    assert TEST_OF["main"]([file]) == 2
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1 and f"; got {file!r}; " in out
