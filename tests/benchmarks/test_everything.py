"""benchmarks/everything.sh: its parts, the commands that they run, and that they end in time.

No command is run: each prints itself, and lets the script's clock pass by all that it may take.
"""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from click import Group
from typer.main import get_command

from conformance import run as conformance

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "everything.sh"
TEXT = SCRIPT.read_text()
PAGE = (ROOT / "docs" / "benchmarks" / "README.md").read_text().partition("## On your mach")[2]
WORST = """
timeout() { printf '%q ' "$@"; echo; SECONDS=$((SECONDS + $1)); }
python3() { printf '%q ' python3 "$@"; echo; }
"""


def run(folder, gpus, *parts, **variables):
    """The commands of each part, as words after their limits in seconds; when the last one ended
    at the latest."""
    (folder / "worst.sh").write_text(WORST)
    there = os.environ | variables | {"BASH_ENV": str(folder / "worst.sh")}
    command = [str(SCRIPT), "out", str(gpus), *parts]
    done = subprocess.run(command, env=there, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found, ended = {}, 0
    for line in done.stdout.splitlines():
        if named := re.fullmatch(r"== (\w+)", line):
            found[named[1]] = mine = []
        elif over := re.fullmatch(r"== \w+ ended with 0 after (\d+) s in all", line):
            ended = int(over[1])
        elif not line.startswith("=="):
            mine.append(shlex.split(line))
    return found, ended


def test_it_lists_its_parts_twice():
    """In its first lines, which users read, and in the order in which it runs them."""
    found = re.findall(r"^ {8}([\w |]+)\)", TEXT.partition("\npart() {")[2], re.MULTILINE)
    parts = {name for names in found for name in names.split(" | ")}
    lists = dict(re.findall(r'^(every|seeds)="([^"]+)"', TEXT, re.MULTILINE))
    every = lists["every"].replace("$seeds", lists["seeds"])
    assert len(parts) > 15 and parts == set(every.split())
    assert parts <= set(re.findall(r"\w+", TEXT.partition("set -uo")[0]))


def parse(words):
    """Raises an error unless the benchmark that a command runs takes its arguments."""
    at = next(n for n, word in enumerate(words) if word.startswith("benchmarks"))
    module = import_module(words[at].removesuffix(".py").replace("/", "."))
    if hasattr(module, "app"):
        command = get_command(module.app)
    else:
        app = typer.Typer()
        app.command()(module.main)
        command = get_command(app)
    rest = words[at + 1 :]
    while isinstance(command, Group):
        command = command.commands[rest.pop(0)]
    command.make_context(words[at], rest)


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("tiny", ["", "1"])
def test_commands_are_those_that_benchmarks_take(tmp_path, gpus, tiny, monkeypatch):
    found, _ = run(tmp_path, gpus, TINY=tiny)
    (tests,), (own,) = found.pop("tests"), found.pop("conformance")
    assert {"pytest", "tests/gpu", "--dist", "--junit-xml"} <= set(tests)
    monkeypatch.setattr(sys, "argv", own[own.index("conformance.run") :])
    assert conformance._options().lanes == (1 if tiny else 4)
    assert sum(len(commands) for commands in found.values()) > 45
    for commands in found.values():
        for words in commands:
            parse(words)


@pytest.mark.parametrize("total", [600, 1200, 7200])
@pytest.mark.parametrize("parts", [("one_node", "packed", "frontier"), ("dims", "masks"), ()])
def test_parts_share_the_time_that_they_get_or_the_first_ones_have_it(tmp_path, total, parts):
    found, ended = run(tmp_path, 4, *parts, TOTAL_S=str(total))
    assert ended <= total
    begun = [name for name, commands in found.items() if commands]
    assert begun == list(found)[: len(begun)] and len(begun) >= min(len(found), total // 300)
    assert all(int(commands[0][0]) >= 180 for commands in list(found.values())[: len(begun) - 1])


def test_what_users_are_asked_to_run_fits_in_the_time_that_they_are_told(tmp_path):
    (minutes,) = set(re.findall(r"(\d+) minutes", PAGE))
    asked = re.findall(r"TOTAL_S=(\d+).*?everything\.sh out (\d+) ([\w ]+)", PAGE, re.DOTALL)
    assert [gpus for _, gpus, _ in asked] == ["8", "16"]
    for total, gpus, parts in asked:
        found, ended = run(tmp_path, gpus, *parts.split(), TOTAL_S=total)
        assert ended <= int(total) <= 60 * int(minutes)
        limits = [int(words[0]) for commands in found.values() for words in commands]
        assert len(limits) == len(parts.split()) and min(limits) >= 360, limits
        words = {word for commands in found.values() for words in commands for word in words}
        csvs = {Path(word).name for word in words if word.endswith(".csv")}
        assert csvs and all(f"`out/{name}`" in PAGE for name in csvs), csvs
