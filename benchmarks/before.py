"""An earlier commit's burst, to be measured in turns with today's.

python -m benchmarks.before 1f6aedd       # writes .cache/before
torchrun --nproc-per-node 2 -m benchmarks.attention --impl burst:auto --impl before ...
"""

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

from torch import Tensor
from torch.distributed import ProcessGroup
from typer import Argument

from benchmarks.runner import App
from megatron_burst.attention import burst_attention
from megatron_burst.comm.group import release_buffers, symmetric_bytes
from megatron_burst.errors import BurstError, require

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "before"
_NOW, _THEN = "megatron_burst", "burst_before"  # both must be importable in one process
_WHO = "benchmarks.before"
app = App()


@dataclass(frozen=True, slots=True)
class Package:
    """One commit's burst, as peers call it."""

    burst_attention: Callable[..., Tensor]  # its call
    release_buffers: Callable[[ProcessGroup], None]  # frees a group's buffers
    symmetric_bytes: Callable[[ProcessGroup], int]  # of a group, outside torch's caching allocator
    note: str = ""  # what rows say of it


TODAY = Package(burst_attention, release_buffers, symmetric_bytes)


def earlier() -> Package:
    """The package in `FOLDER`, which `write` wrote; BurstError if there is none."""
    require(_WHO, [(
        (FOLDER / _THEN).is_dir(), "--impl before must find a commit's package, because it is "
        "measured beside today's", f"no {FOLDER / _THEN}", "write it with `python -m "
        "benchmarks.before COMMIT`",
    )])  # fmt: skip
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    newer = (FOLDER / _THEN / "comm" / "group.py").exists()  # comm/state.py until 24 November 2026
    memory = import_module(f"{_THEN}.comm.{'group' if newer else 'state'}")
    return Package(
        import_module(f"{_THEN}.attention").burst_attention,
        memory.release_buffers, memory.symmetric_bytes,
        f"commit {(FOLDER / 'commit').read_text()}",
    )  # fmt: skip


def write(commit: str, folder: Path = FOLDER, root: Path = ROOT) -> str:
    """Write a commit's package in place of the last one; its hash. BurstError if there is none."""
    try:
        full = _git(root, "rev-parse", "--short", f"{commit}^{{commit}}").decode().strip()
        packed = _git(root, "archive", full, _NOW)
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode().split())
        raise BurstError(
            f"{_WHO}: COMMIT must be one of this repository that has {_NOW}/, because that is "
            f"measured; got {commit!r} ({why}); name another"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    (folder / _NOW).rename(folder / _THEN)
    for file in (folder / _THEN).rglob("*.py"):
        file.write_text(file.read_text().replace(_NOW, _THEN))
    (folder / "commit").write_text(full)
    return full


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", root, *words], capture_output=True, check=True).stdout


@app.command()
def main(commit: Annotated[str, Argument(help="to compare with, as git names it")]) -> None:
    """Write an earlier commit's package where `--impl before` finds it."""
    print(f"{write(commit)} is in {FOLDER}")


if __name__ == "__main__":
    app()
