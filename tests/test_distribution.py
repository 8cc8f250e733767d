"""What is built from a checkout: an sdist whose tests run, a wheel with its types and data.

Guards against files that the checkout has but users lack.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from mypy import api
from packaging.requirements import Requirement

import megatron_burst
from tests.test_packaging import give_setuptools

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".*", "*.egg-info", "__pycache__", "build", "dist", "demo")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('dist'))"


def site_packages(environment):
    """Where an environment of this Python has its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A function that builds the sdist or the wheel from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("built") / "checkout"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(ROOT / ".pre-commit-config.yaml", folder)

    def build(what):
        done = subprocess.run(
            [sys.executable, "-c", BUILD, what], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return folder / "dist" / done.stdout.split()[-1]

    return build


@pytest.fixture(scope="module")
def sdist(built, tmp_path_factory):
    """The unpacked folder of the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("build_sdist")) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built("build_wheel")) as archive:
        yield archive


@pytest.mark.whole
def test_the_tests_of_the_sdist_run(sdist):
    """From its own files: the installed checkout is not on the path."""
    chosen = ["tests/plan/test_layout_and_mask.py", "tests/test_layers.py", "tests/test_docs.py"]
    quick = ["-k", "not loads_neither and not check_above"]  # these start interpreters
    code = "import megatron_burst, pytest, sys; print(megatron_burst.__file__, flush=True);"
    code += "sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *chosen, *quick], cwd=sdist,
        env=os.environ | {"PYTHONPATH": str(sdist)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and int(re.findall(r"(\d+) passed", done.stdout)[0]) > 100, (
        done.stdout + done.stderr
    )
    assert done.stdout.startswith(f"{sdist}/megatron_burst/__init__.py")


def test_the_sdist_has_what_make_and_contributors_need(sdist):
    def files(folder):
        found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
        return {str(p) for p in found if "__pycache__" not in p.parts}

    there = files(sdist)
    for name in ("benchmarks", "docs", "examples", "patches", "scripts", "tests", "megatron_burst"):
        assert files(ROOT / name) <= {p.partition("/")[2] for p in there if p.startswith(name)}, (
            name
        )
    files_of_root = {p.name for p in ROOT.iterdir() if p.is_file() and p.name[0] != "."}
    assert files_of_root | {".pre-commit-config.yaml"} <= there


def test_the_wheel_has_the_package_its_types_and_its_data_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = ROOT / "megatron_burst"
    kinds = ("*.py", "*.pyi", "*.toml", "*.md", "py.typed")
    there = {str(p.relative_to(ROOT)) for kind in kinds for p in package.rglob(kind)}
    assert names == there and {"megatron_burst/py.typed", "megatron_burst/__init__.pyi"} <= names


def test_what_an_index_would_show(wheel):
    """Nothing in it is relative, as an index has no files next to it."""
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    shown = message_from_bytes(wheel.read(name))
    text = shown.get_payload()
    assert shown["Author"] == "The megatron_burst authors" and shown["Keywords"].count(",") > 3
    assert shown["License-Expression"] == "Apache-2.0" and len(shown.get_all("Project-URL")) > 1
    assert shown["Description-Content-Type"] == "text/markdown" and "# megatron_burst" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all(link.startswith("https://") for link in links)


def test_with_a_repository_the_description_points_there():
    source = ast.parse((ROOT / "setup.py").read_text())
    source.body = [node for node in source.body if not isinstance(node, ast.If)]
    names = {"__file__": str(ROOT / "setup.py")}
    exec(compile(source, "setup.py", "exec"), names)
    readme = "![A](docs/a.png) [b](docs/b.md#c) [d](https://d.org) ![e](https://e.org/e.png)"
    assert names["description"](readme, "https://r.org/x") == (
        "![A](https://r.org/x/raw/HEAD/docs/a.png) [b](https://r.org/x/blob/HEAD/docs/b.md#c) "
        "[d](https://d.org) ![e](https://e.org/e.png)"
    )
    assert names["description"](readme, None) == "b [d](https://d.org) ![e](https://e.org/e.png)"


def test_pictures_of_the_readme_exist():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(pictures) > 3 and all((ROOT / name).is_file() for name in pictures)


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [megatron_burst.__version__]
    assert all(url in citation for url in project["urls"].values())


@pytest.mark.whole
@pytest.mark.parametrize("what", ["build_wheel", "build_sdist"])
def test_what_is_built_installs_and_runs_in_an_empty_environment(built, tmp_path, what):
    """With nothing of the checkout: other packages are those that run this test."""
    made = [sys.executable, "-m", "venv", str(tmp_path / "venv")]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("this Python makes no environment with pip")
    python, packages = tmp_path / "venv" / "bin" / "python", site_packages(tmp_path / "venv")
    give_setuptools(python)
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *offline, built(what)], check=True, cwd=tmp_path
    )
    (packages / "others.pth").write_text(f"{site_packages(Path(sys.prefix))}\n")
    code = (
        "import megatron_burst as m; print(m.__file__, m.__version__, m.burst_attention.__name__)"
    )
    there = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=there, capture_output=True, text=True, check=True
    )
    file = packages / "megatron_burst" / "__init__.py"
    assert ran.stdout.split() == [str(file), megatron_burst.__version__, "burst_attention"]
    command = [python.with_name("megatron-burst"), "--help"]
    told = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True)
    assert told.returncode == 0 and all(name in told.stdout for name in ("plan", "doctor"))


RELEASED = "## 0.2.0 (2026-12-01)"
NOT_READY = {
    "the tree must be clean": {},
    "CITATION.cff must name the version": {"CITATION.cff": "version: 0.1.0"},
    "CHANGELOG.md must begin with '## 0.2.0": {"CHANGELOG.md": "## 0.2.0 (unreleased)"},
    "v0.2.0 must be a new tag": {},
    "is tagged": {},
}


@pytest.mark.parametrize("told", NOT_READY)
def test_a_release_is_tagged_only_if_all_agree(tmp_path, told):
    """Lint, tests, build and twine are stand-ins."""
    files = {
        "README.md": "", "CITATION.cff": "version: 0.2.0", "CHANGELOG.md": f"# Changes\n{RELEASED}",
        "megatron_burst/version.py": '__version__ = "0.2.0"', ".gitignore": ".venvs\ndist\nbin",
        "bin/make": '#!/bin/sh\necho "make $@"',
        ".venvs/release/bin/python": '#!/bin/sh\nmkdir -p dist; touch dist/wheel; echo "python $@"',
    }  # fmt: skip
    for name, text in (files | NOT_READY[told]).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release.sh", tmp_path / "scripts")
    there = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.org"]
    there |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b.org"}
    commands = [["git", "init", "-q"], ["git", "add", "-A"], [*git, "commit", "-qm", "all"]]
    if "new tag" in told:
        commands.append(["git", "tag", "v0.2.0"])
    for command in commands:
        subprocess.run(command, cwd=tmp_path, env=there, check=True)
    if "tree" in told:
        (tmp_path / "README.md").write_text("changed")
    done = subprocess.run(
        [tmp_path / "scripts" / "release.sh"], env=there, capture_output=True, text=True
    )
    assert told in done.stdout + done.stderr, done.stderr
    ready = told == "is tagged"
    assert (done.returncode == 0) == ready
    steps = ["make lint", "make test-all", "python -m build", "python -m twine check --strict"]
    found = [line for line in done.stdout.splitlines() if line.startswith(("make", "python"))]
    assert [line.partition(" dist/")[0] for line in found] == (steps if ready else [])


def test_licences_are_those_of_what_is_installed():
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \| ([^|]+) \|", page, re.MULTILINE)
    told = {name: (version, licence) for name, version, licence in rows}
    asked = {Requirement(text).name for text in importlib.metadata.requires("megatron-burst")}
    assert set(told) == asked
    checked = 0
    for name, (version, licence) in told.items():
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert found["Version"] == version, name
        says = (found.get("License-Expression") or found["License"]).splitlines()[0]
        assert licence == says or name == "matplotlib", (name, says)
        checked += 1
    assert checked > 10


def test_public_names_have_types(tmp_path):
    """Guards against names that type checkers do not see: loaded lazily, they would all be Any."""
    names = [name for name in megatron_burst.__all__ if name != "__version__"]
    stub = ast.parse((ROOT / "megatron_burst" / "__init__.pyi").read_text())
    aliases = [alias for node in stub.body for alias in node.names]
    assert {alias.name for alias in aliases} == set(megatron_burst.__all__)
    code = ["import megatron_burst", *(f"reveal_type(megatron_burst.{name})" for name in names)]
    (tmp_path / "user.py").write_text("\n".join([*code, "megatron_burst.BurstConfig(nodes='2')"]))
    own = "[mypy]\nfollow_imports = silent\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(own)  # torch takes 20 s, and `make lint` follows it
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path)]
    output, errors, _ = api.run([*options, str(tmp_path / "user.py")])
    kinds = re.findall(r'Revealed type is "(.*)"', output)
    assert len(kinds) == len(names) and not errors, output + errors
    assert not any(kind in ("Any", "builtins.object") for kind in kinds), output
    assert re.findall(r"user\.py:\d+: error: (.*)", output) == [
        'Argument "nodes" to "BurstConfig" has incompatible type "str"; expected "int | None"  '
        "[arg-type]"
    ]
