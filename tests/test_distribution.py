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
from tests.released import commit, git, run_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sdist(released, tmp_path_factory):
    """The unpacked folder of the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(released.sdist) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(released):
    with zipfile.ZipFile(released.wheel) as archive:
        yield archive


@pytest.mark.whole
def test_the_tests_of_the_sdist_run(sdist):
    """From its own files: the installed checkout is not on the path."""
    chosen = [
        "tests/schedule/test_layout_and_mask.py",
        "tests/test_layers.py",
        "tests/test_docs.py",
    ]
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


def test_a_release_is_built_checked_dated_and_tagged(released, sdist):
    steps = re.findall(r"^(make .*|Successfully built)", released.said, re.MULTILINE)
    assert steps == ["make lint", "make test-all", "Successfully built"]
    checked = re.findall(r"dist/(\S+): .*PASSED", released.said)
    built = [path.name for path in (released.folder / "dist").iterdir()]
    assert sorted(checked) == sorted(built) == sorted([released.sdist.name, released.wheel.name])
    version = megatron_burst.__version__
    assert git(released.folder, "tag", "--points-at", "HEAD") == f"v{version}"
    assert git(released.folder, "show", "--format=%s", "--stat=80", "HEAD").splitlines()[::2] == [
        f"Version {version}", " CHANGELOG.md | 2 +-",
    ]  # fmt: skip
    heading = re.search(r"^## .*$", (sdist / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert re.fullmatch(rf"## {version} \(20\d\d-\d\d-\d\d\)", heading)


NOT_READY = {
    "the tree must be clean": {},
    "CITATION.cff must name the version": {"CITATION.cff": "version: 0.1.0"},
    "CHANGELOG.md must begin with '## 0.2.0": {"CHANGELOG.md": "## 0.1.0 (unreleased)"},
    "v0.2.0 must be a new tag": {},
    "is tagged": {},
}


@pytest.mark.parametrize("told", NOT_READY)
def test_a_release_is_tagged_only_if_all_agree(tmp_path, told):
    """Lint, tests, build and twine are stand-ins; the date is there, as after a failed build."""
    files = {
        "README.md": "", "CITATION.cff": "version: 0.2.0",
        "CHANGELOG.md": "# Changes\n## 0.2.0 (2026-12-01)",
        "megatron_burst/version.py": '__version__ = "0.2.0"',
    }  # fmt: skip
    for name, text in (files | NOT_READY[told]).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release.sh", tmp_path / "scripts")
    commit(tmp_path, python='mkdir -p dist; touch dist/wheel; echo "python $@"')
    if "new tag" in told:
        git(tmp_path, "tag", "v0.2.0")
    if "tree" in told:
        (tmp_path / "README.md").write_text("changed")
    done = run_script(tmp_path)
    assert told in done.stdout + done.stderr, done.stderr
    ready = told == "is tagged"
    assert (done.returncode == 0) == ready
    steps = ["make lint", "make test-all", "python -m build --no-isolation"]
    steps.append("python -m twine check --strict")
    found = [line for line in done.stdout.splitlines() if line.startswith(("make", "python"))]
    assert [line.partition(" dist/")[0] for line in found] == (steps if ready else [])


def test_licences_are_those_of_what_is_installed():
    page = (ROOT / "LICENSES.md").read_text()
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
