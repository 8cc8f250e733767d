"""Finds Megatron's release without importing it, and checks that burst supports it."""

import importlib.util
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_burst.errors import Need, require

FIRST, LAST = (0, 16), (0, 20)  # releases under test; see docs/versions.md
_INSTALL = "pip install megatron-core==0.19.2, or put a checkout of that release on PYTHONPATH"


@dataclass(frozen=True, slots=True)
class Megatron:
    """The Megatron that this process imports, or would."""

    version: str  # of megatron.core, "unknown" if it has none; a checkout has no metadata
    folder: Path  # contains megatron.core
    training: Path | None  # contains megatron.training; None if there is none

    def __str__(self) -> str:
        return f"Megatron-Core {self.version} in {self.folder}"


def minor(release: str) -> tuple[int, int]:
    """(0, 19) of "0.19.2"; for a version that is no number, the last release under test."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else LAST


def find_megatron() -> Megatron | None:
    """The Megatron on sys.path, or the one already imported; imports nothing."""
    core, training = _place_of("megatron.core"), _place_of("megatron.training")
    if core is None:
        return None
    return Megatron(_version_in(core), core.parent, training and training.parent)


def require_megatron(who: str) -> Megatron:
    """The Megatron on sys.path; refuses none, one that is too old, and parts of two releases.

    A release newer than the tested ones is accepted: `patching.Patch` checks the functions that
    burst relies on.
    """
    megatron = find_megatron()
    require(who, _needs(megatron))
    return megatron


def version_of(package: str) -> str:
    """Version of a distribution; "unknown" if it has no metadata."""
    if package == "megatron-core":  # a checkout on sys.path hides the one that has metadata
        megatron = find_megatron()
        return megatron.version if megatron else "unknown"
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _needs(megatron: Megatron | None) -> Iterator[Need]:
    must = "megatron.core must be importable, because burst patches it"
    yield megatron, must, "none on sys.path", _INSTALL
    yield (minor(megatron.version) >= FIRST,
           f"Megatron-Core must be {FIRST[0]}.{FIRST[1]} or newer, because older ones lack "
           "functions that burst patches", str(megatron), _INSTALL)  # fmt: skip
    folder, training = megatron.folder, megatron.training
    yield (training is None or training.resolve() == folder.resolve(),
           "megatron.core and megatron.training must come from the same release, because burst "
           "patches both", f"{folder} and {training}",
           "put one of them first on PYTHONPATH")  # fmt: skip


def _place_of(package: str) -> Path | None:
    """The folder of a package, without importing it (its parents are imported)."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # no parent; a stand-in without a spec
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


@cache  # it asks git for the commit
def _version_in(core: Path) -> str:
    """What megatron/core/package_info.py says, without the commit that it adds."""
    try:
        return runpy.run_path(str(core / "package_info.py"))["__version__"].partition("+")[0]
    except Exception:  # no such file, or an unexpected one
        return "unknown"
