"""Installing: a container's torch stays, missing packages are added, builds are complete.

Everything is really installed, by pip without a network, from wheels made here: empty stand-ins
with the names, versions and requirements of the real ones.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_burst.version import __version__

ROOT = Path(__file__).parents[1]
SDIST = pytest.param("sdist", marks=pytest.mark.whole)
CONTAINERS_TORCH = "2.11.0a0+abc123.nv25"
BUILDS = ["pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"]
# A newer torch and NumPy are available, which nothing may install.
INDEX = {
    "torch": ("2.13.0", []),
    "numpy": ("2.9.0", []),
    "megatron-core": ("0.19.7", ["torch>=2.6.0", "numpy"]),
    "rich": ("15.1.0", []),
    "typer": ("0.30.0", ["rich>=13.8"]),
}


def write_wheel(folder, name, version, requires=()):
    """A wheel with metadata only."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {other}\n" for other in requires)
    tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return folder / f"{stem}-py3-none-any.whl"


def site_packages(python):
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return python.parents[1] / "lib" / version / "site-packages"


def give_setuptools(python):
    """What builds the package is installed, as in an image; the network is not asked for it."""
    files = importlib.metadata.files("setuptools")
    for name in {file.parts[0] for file in files if file.parts[0] != ".."}:
        source = Path(files[0].locate().parents[1] / name)
        target = site_packages(python) / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    for name, (version, requires) in INDEX.items():
        write_wheel(folder, name, version, requires)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what an installation reads: builds leave files next to it."""
    folder = tmp_path_factory.mktemp("beside") / "megatron_burst"  # as a clone is called
    folder.mkdir()
    for name in BUILDS:
        shutil.copy(ROOT / name, folder)
    for name in ("megatron_burst", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """What every image has installed: pip, which takes 5 s to install, and setuptools."""
    folder = tmp_path_factory.mktemp("packages") / "image"
    made = [sys.executable, "-m", "venv", str(folder)]
    done = subprocess.run(made, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this Python makes no environment with pip: {done.stdout[-200:]}")
    give_setuptools(folder / "bin" / "python")
    return site_packages(folder / "bin" / "python")


class Image:
    """A virtual environment that represents a container, and pip in it."""

    def __init__(self, folder, packages, index, installed):
        made = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(made, check=True)
        self.python, self.index = folder / "bin" / "python", index
        shutil.copytree(packages, site_packages(self.python), dirs_exist_ok=True)
        for each in installed.items():
            with zipfile.ZipFile(write_wheel(folder, *each)) as wheel:
                wheel.extractall(site_packages(self.python))

    def run(self, *command):
        """Exit status and output of Python, or of a script using it, away from the checkout."""
        kept = ("HOME", "LANG", "PATH", "TMPDIR")
        environment = {key: os.environ[key] for key in kept if key in os.environ}
        environment |= {"PYTHON": str(self.python), "PIP_CONFIG_FILE": os.devnull}
        if not command[0].endswith(".sh"):
            command = (str(self.python), *command)
        done = subprocess.run(
            command, env=environment, cwd=self.python.parent, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def offline(self):
        return ["--no-index", "--find-links", str(self.index), "--no-build-isolation"]

    def installed(self):
        path = [str(site_packages(self.python))]
        return {each.name: each.version for each in importlib.metadata.distributions(path=path)}


@pytest.fixture
def image(tmp_path, packages, index):
    return lambda **installed: Image(tmp_path / "image", packages, index, installed)


NEW = {"megatron-core": "0.19.7", "rich": "15.1.0", "typer": "0.30.0"}


def to_install(what, checkout, released):
    """What pip is asked for."""
    return {
        "checkout": ["--editable", str(checkout)],
        "wheel": [str(released.wheel)],
        "sdist": [str(released.sdist)],
    }[what]


@pytest.mark.parametrize("what", ["script", "checkout", "wheel", SDIST])
def test_a_containers_torch_and_numpy_stay_and_all_else_comes(image, checkout, released, what):
    there = image(torch=CONTAINERS_TORCH, numpy="1.26.4")
    before = there.installed()
    if what == "script":
        command = [str(checkout / "scripts" / "install_in_container.sh"), *there.offline]
    else:
        given = to_install(what, checkout, released)
        command = ["-m", "pip", "install", *there.offline, *given]
    status, output = there.run(*command)
    assert status == 0, output
    after = there.installed()
    assert before["torch"] == CONTAINERS_TORCH and before["numpy"] == "1.26.4"
    version = importlib.metadata.version("megatron-burst")
    assert after == before | NEW | {"megatron-burst": version}
    # the folder beside is not taken for the package
    inside = "import os; os.chdir(os.sys.argv[1]); os.sys.path.insert(0, ''); import megatron_burst"
    inside += "; print(megatron_burst.__file__)"
    folder = checkout if what in ("script", "checkout") else site_packages(there.python)
    file = folder / "megatron_burst" / "__init__.py"
    assert there.run("-c", inside, str(checkout.parent)) == (0, f"{file}\n")
    # a second time, as after a pull, changes nothing
    assert there.run(*command)[0] == 0 and there.installed() == after


@pytest.mark.parametrize("what", ["wheel", SDIST])
def test_a_release_installs_and_runs_in_an_empty_environment(image, checkout, released, what):
    """All that it asks for comes too; the packages with which it then runs are this test's."""
    there = image()
    before = there.installed()
    given = to_install(what, checkout, released)
    status, output = there.run("-m", "pip", "install", *there.offline, *given)
    assert status == 0, output
    asked = {name: version for name, (version, _) in INDEX.items()}
    assert there.installed() == before | asked | {"megatron-burst": __version__}
    others = site_packages(Path(sys.prefix) / "bin" / "python")
    (site_packages(there.python) / "others.pth").write_text(f"{others}\n")
    code = "import megatron_burst as m; print(m.__file__, m.__version__, m.burst_attention)"
    status, output = there.run("-c", code)
    file = site_packages(there.python) / "megatron_burst" / "__init__.py"
    assert status == 0 and output.startswith(f"{file} {__version__} <function burst_attention")
    status, output = there.run(str(there.python.with_name("megatron-burst")), "--help")
    assert status == 0 and all(name in output for name in ("plan", "doctor"))


def test_what_a_container_has_is_kept_where_pip_alone_would_upgrade_it(image, checkout):
    """The container's rich is older than we require: pip says so in one sentence; nothing
    changes."""
    there = image(torch=CONTAINERS_TORCH, numpy="1.26.4", rich="12.0")
    before = there.installed()
    status, output = there.run(
        str(checkout / "scripts" / "install_in_container.sh"), *there.offline
    )
    assert status != 0 and "rich==12.0" in output and there.installed() == before


@pytest.mark.parametrize(
    "installed, told",
    [({}, "torch must be installed already"), ({"torch": "2.8.0a0+nv"}, "2.8.0a0")],
)
def test_a_container_without_a_fit_torch_gets_none(image, checkout, installed, told):
    there = image(**installed)
    before = there.installed()
    status, output = there.run(
        str(checkout / "scripts" / "install_in_container.sh"), *there.offline
    )
    assert status != 0 and told in output and there.installed() == before


def requirements():
    project = {}
    for text in importlib.metadata.requires("megatron-burst"):
        requirement = Requirement(text)
        project.setdefault(requirement.name, []).append(requirement)
    return project


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    found = [Requirement(line) for line in lines if line[0] != "#"]
    return {each.name: str(each.specifier).removeprefix("==") for each in found}


def test_the_tested_set_is_within_the_ranges_and_is_what_runs_here():
    """Guards against a pin that pyproject.toml forbids, and tests that ran with another version."""
    ranges = requirements()
    bare = {name for name, found in ranges.items() for each in found if each.marker is None}
    assert bare >= {"torch", "megatron-core", "numpy", "rich", "typer"}
    assert bare <= set(pins())
    for name, version in pins().items():
        for requirement in ranges.get(name, []):
            assert requirement.specifier.contains(version), (name, version)
    for name in bare:
        assert importlib.metadata.version(name) == pins()[name], name


def test_a_vendors_torch_is_within_the_range_and_numpy_has_none():
    (torch,), (numpy,) = requirements()["torch"], requirements()["numpy"]
    assert torch.specifier.contains(CONTAINERS_TORCH, prereleases=True)
    assert not torch.specifier.contains("2.8.1") and not str(numpy.specifier)


def test_nobody_is_told_to_install_what_no_index_has():
    """The package is installed from a checkout, and so are its extras."""
    folders = [ROOT / name for name in ("megatron_burst", "docs", "examples", "scripts", "patches")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = {
        path: path.read_text() for path in files if path.suffix not in (".png", ".pyc", ".csv")
    }
    assert len(texts) > 100
    named = r"install\W+megatron[-_]burst|megatron[-_]burst\[(te|flash-attn-4|plots|dev)\]"
    assert [str(path) for path, text in texts.items() if re.search(named, text)] == []
    extras = importlib.metadata.metadata("megatron-burst").get_all("Provides-Extra")
    told = {extra for text in texts.values() for extra in re.findall(r"'\.\[([\w-]+)\]'", text)}
    assert told and told <= set(extras)


UV = """#!/usr/bin/env bash
[ "$1" = --version ] || echo "$*" >> "$(dirname "$0")/calls"
echo "${CPATH:-}" > "$(dirname "$0")/headers"
"""


@pytest.fixture
def bootstrap(tmp_path):
    """A function that runs bootstrap.sh with a uv that only records how it was called: its calls
    so far. The environments .venv and .venvs/other are there, empty."""
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("scripts", "tools", "megatron_burst", ".venv/bin", ".venvs/other/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "megatron_burst" / "version.py", tmp_path / "megatron_burst")
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", tmp_path / "scripts")
    for venv in (".venv", ".venvs/other"):
        (tmp_path / venv / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "tools" / "uv").write_text(UV)
    (tmp_path / "tools" / "uv").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/tools:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def calls(**variables):
        command = [str(tmp_path / "scripts" / "bootstrap.sh")]
        subprocess.run(command, env=environment | variables, check=True, capture_output=True)
        return (tmp_path / "tools" / "calls").read_text().splitlines()

    return calls


def test_make_installs_the_tested_set_again_when_it_changes(bootstrap, tmp_path):
    (first,) = bootstrap()
    assert "--constraints .venv/constraints.txt" in first and first.endswith("-e .[dev,hf]")
    tested = (tmp_path / ".venv" / "constraints.txt").read_text()
    assert tested == (tmp_path / "constraints.txt").read_text()
    assert bootstrap() == [first]
    with (tmp_path / "constraints.txt").open("a") as file:
        file.write("packaging==26.3\n")
    assert bootstrap() == [first, first] == bootstrap()


def test_what_an_environment_builds_gets_the_torch_and_the_headers_that_are_in_it(
    bootstrap, tmp_path
):
    """A build against another torch would not load."""
    headers = tmp_path / ".venvs/other/lib/python3.12/site-packages/nvidia/nccl/include"
    headers.mkdir(parents=True)
    _, alone = bootstrap(BURST_ENVIRONMENT="other", BURST_ALONE="built==1", CPATH="/given")
    assert alone.endswith("--no-deps built==1")
    assert "--build-constraints .venvs/other/constraints.txt" in alone
    assert (tmp_path / "tools" / "headers").read_text() == f"{headers}:/given\n"
