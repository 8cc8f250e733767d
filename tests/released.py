"""A release of a copy of this checkout, made by scripts/release.sh: what the tests install."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_burst.version import __version__

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".*", "*.egg-info", "__pycache__", "build", "dist", "demo", "site")
IGNORED = "/.venv/\n/bin/\n/dist/\n*.egg-info/\n"
ANYONE = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "a"), ("EMAIL", "a@b.org"))
}


@dataclass(frozen=True)
class Release:
    """The folder in which a release was made, and what the script said."""

    folder: Path
    said: str

    @property
    def sdist(self) -> Path:
        return self.folder / "dist" / f"megatron_burst-{__version__}.tar.gz"

    @property
    def wheel(self) -> Path:
        return self.folder / "dist" / f"megatron_burst-{__version__}-py3-none-any.whl"


def git(folder: Path, *words: str) -> str:
    command, there = ["git", *words], os.environ | ANYONE
    run = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def commit(folder: Path, python: str) -> None:
    """Make a folder a repository with one commit, in which `make` only says what it was asked for
    and the Python of .venv is a shell script."""
    scripts = {"bin/make": 'echo "make $@"', ".venv/bin/python": python}
    for name, text in scripts.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / ".gitignore").write_text(IGNORED)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")


def run_script(folder: Path) -> subprocess.CompletedProcess:
    """What scripts/release.sh of a folder does there."""
    there = os.environ | ANYONE | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    command = [folder / "scripts" / "release.sh"]
    return subprocess.run(command, env=there, capture_output=True, text=True)


def release(folder: Path) -> Release:
    """Release what is checked out here as if it were not released yet; build and twine are real."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(ROOT / ".pre-commit-config.yaml", folder)
    first, _, rest = (ROOT / "CHANGELOG.md").read_text().partition(f"## {__version__} (")
    (folder / "CHANGELOG.md").write_text(
        f"{first}## {__version__} (unreleased){rest.partition(')')[2]}"
    )
    commit(folder, python=f'exec "{sys.executable}" "$@"')
    done = run_script(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Release(folder, done.stdout)
