"""Megatron with the diff of patches/, beside the installed one."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

DIFF = Path(__file__).parents[2] / "patches" / "core_v0.19.0.patch"


def patch_megatron(folder: Path) -> Path:
    """A folder for the front of PYTHONPATH: `megatron.training` as the diff makes it, and the
    installed `megatron.core` beside it."""
    (root,) = importlib.util.find_spec("megatron").submodule_search_locations
    tree = folder / "patched"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(root) / "training", tree / "megatron" / "training", ignore=ignored)
    (tree / "megatron" / "core").symlink_to(Path(root) / "core")
    command = ["git", "apply", "--verbose", str(DIFF)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree
