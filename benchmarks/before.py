"""An earlier commit's burst, to be measured in turns with today's.

python -m benchmarks.before 1f6aedd       # writes .cache/before
torchrun --nproc-per-node 2 -m benchmarks.attention --impl burst:auto --impl before ...
"""

import io
import shutil
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Annotated

from torch import Tensor
from typer import Argument

from benchmarks.impls import Impl
from benchmarks.peers import Autograd
from benchmarks.sweep import new_app
from megatron_burst.errors import BurstError
from megatron_burst.tools.terminal import in_one_sentence
from megatron_burst.tools.world import World

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "before"
_NOW, _THEN = "megatron_burst", "burst_before"  # both must be importable in one process
_WHO = "benchmarks.before"
app = new_app()


class Before(Autograd):
    """burst_attention of the commit in `FOLDER`, as it chooses itself."""

    def __init__(self, impl: Impl, world: World, folder: Path = FOLDER) -> None:
        super().__init__(impl, world)
        self.folder = folder

    def prepare(self, shard) -> None:
        super().prepare(shard)
        if not (self.folder / _THEN).is_dir():
            raise BurstError(
                f"{_WHO}: --impl before must find a commit's package, because it is measured "
                f"beside today's; got no {self.folder / _THEN}; write it with "
                "`python -m benchmarks.before COMMIT`"
            )
        if str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))
        self._call = import_module(f"{_THEN}.attention").burst_attention
        self._state = import_module(f"{_THEN}.comm.group")
        self.note = f"commit {(self.folder / 'commit').read_text()}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.shard.case.mask == "causal"
        return self._call(q, k, v, group=self.world.group, causal=causal, qkv_format="sbhd")

    def release(self) -> None:
        super().release()
        self._state.release_buffers(self.world.group)

    def uncounted_bytes(self) -> int:
        return self._state.symmetric_bytes(self.world.group)


def write(commit: str, folder: Path = FOLDER, root: Path = ROOT) -> str:
    """Write a commit's package under another name, replacing the last one; returns its hash.

    Args:
        commit: as git names it.
        folder: where the package goes.
        root: of the repository.

    Raises:
        BurstError: if git does not know the commit, or it has no package.
    """
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
    """Write an earlier commit's package where `--impl before` of benchmarks.attention finds it."""
    with in_one_sentence():
        print(f"{write(commit)} is in {FOLDER}")


if __name__ == "__main__":
    app()
