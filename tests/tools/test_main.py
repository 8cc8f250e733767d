"""Common to all commands: help, version, completion, and a progress bar."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks.runner import clock, sweep
from megatron_burst.errors import BurstError
from megatron_burst.tools.main import app
from megatron_burst.tools.terminal import shown
from megatron_burst.tools.world import _ranks_of_a_node
from megatron_burst.version import __version__

COMMANDS = [[], ["plan"], ["calibrate"], ["doctor"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_by_its_short_name(command):
    done = CliRunner().invoke(app, [*command, "-h"])
    assert done.exit_code == 0 and "Usage:" in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_whole_on_a_narrow_terminal(command):
    text = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text and "..." not in text.replace("[ARGS]...", "")
    shown = get_command(app)
    for name in command:
        shown = shown.commands[name]
    flags = {flag for option in shown.params for flag in option.opts if flag.startswith("--")}
    assert flags and all(flag in text for flag in flags)


def test_version():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.stdout == f"megatron-burst {__version__}\n"


def test_a_shell_completes_commands():
    asked = {
        "_MEGATRON_BURST_COMPLETE": "complete_bash", "COMP_WORDS": "megatron-burst ca",
        "COMP_CWORD": "1",
    }  # fmt: skip
    done = CliRunner().invoke(app, prog_name="megatron-burst", env=asked)
    assert done.stdout.split() == ["calibrate"]


def test_the_ranks_of_a_pretended_node_are_told():
    assert _ranks_of_a_node("calibrate", 12, 3) == 4 and _ranks_of_a_node("calibrate", 1, 1) == 1
    match = "calibrate: --nodes must .*got 4 nodes and 6 ranks; choose 1 or 2 or 3 or 6, or start"
    with pytest.raises(BurstError, match=match):
        _ranks_of_a_node("calibrate", 6, 4)


def modules_after(statement):
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_does_not_load_the_command_line_nor_that_torch():
    assert "megatron_burst.tools" not in modules_after("import megatron_burst")
    loaded = modules_after("import megatron_burst.tools.main")
    assert "megatron_burst.tools.main" in loaded and not {"torch", "matplotlib"} & loaded


def run(rank):
    """Two problems, each of which reports what it does."""
    with shown(rank) as progress:

        def rows_of(problem):
            progress.now(f"half of {problem}")
            seen.append(progress.status and str(progress.status.status))
            return [problem]

        seen = []
        world = SimpleNamespace(rank=rank, progress=progress, decide=bool)
        rows = sweep(["one", "two"], rows_of, world, clock(None))
    return rows, seen


def test_what_is_done_is_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    rows, seen = run(0)
    out, err = capsys.readouterr()
    assert rows == ["one", "two"] and out == ""
    assert seen == ["half of one", "half of two"]
    assert "1 of 2: one" in err and "2 of 2: two" in err


@pytest.mark.parametrize("rank, lines", [(0, 2), (1, 0)])
def test_a_line_a_problem_elsewhere_by_the_first_rank(rank, lines, monkeypatch, capsys):
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert run(rank) == (["one", "two"], [None, None])
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == lines
