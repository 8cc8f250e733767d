"""Megatron with its release's diff from patches/, next to the installed one."""

import os
import shutil
import subprocess
from pathlib import Path

from megatron_burst.installed import find_megatron, minor

_FOR = {
    (0, 16): "core_v0.16.1",
    (0, 17): "core_v0.17.1",
    (0, 18): "core_v0.18.2",
    (0, 19): "core_v0.19.0",
    (0, 20): "main",
}
DIFF = Path(__file__).parents[2] / "patches" / f"{_FOR[minor(find_megatron().version)]}.patch"


def patch_megatron(folder: Path) -> Path:
    """A folder to put first on PYTHONPATH: `megatron.training` with the diff applied, next to the
    installed `megatron.core`."""
    tree = folder / "patched"
    training = find_megatron().training / "training"
    shutil.copytree(training, tree / "megatron" / "training")  # including bytecode
    (tree / "megatron" / "core").symlink_to(find_megatron().folder / "core")
    done = git_apply(tree, "--verbose")
    assert done.returncode == 0, done.stderr
    return tree


def git_apply(tree: Path, *options: str) -> subprocess.CompletedProcess:
    """Run `git apply` with the diff in a folder, which may lie inside an unrelated checkout.

    git silently ignores files outside its part of a checkout.
    """
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(DIFF)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment)
