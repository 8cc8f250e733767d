"""Imports point one way: a module imports its own layer or those before it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_burst"
LAYERS = (  # a new module without a layer fails on purpose
    {"version", "errors", "say"},
    {"installed"},
    {"patching"},
    {"plan", "schedule"},
    {"config", "environment", "transforms"},
    {"kernels"},
    {"comm"},
    {"engine"},
    {"recompute"},
    {"attention", "terms"},
    {"loss"},
    {"mcore"},
    {"cli"},
    {"__init__", "__main__", "patch", "spec"},
)


def layer_of(module: str) -> int:
    """The layer of a module such as "kernels.flash"; fails for one that has none."""
    top = module.partition(".")[0]
    (layer,) = [i for i, names in enumerate(LAYERS) if top in names]
    return layer


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "megatron_burst":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_burst."):
            found.add(node.module.removeprefix("megatron_burst."))
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            found |= {n.removeprefix("megatron_burst.") for n in names if "megatron_burst." in n}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_of)
def test_imports_only_from_its_own_layer_or_earlier(path):
    for imported in imports_of(path):
        assert layer_of(imported) <= layer_of(module_of(path)), imported


def test_only_mcore_imports_megatron():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.parent.name != "mcore":
            assert "import megatron." not in text and "from megatron." not in text, path


def loaded_by(statement: str) -> set[str]:
    """Which of torch and megatron a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*({{'torch', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron_burst",
        "import megatron_burst.plan.ring, megatron_burst.plan.choose, megatron_burst.plan.draw",
        "import megatron_burst.plan.report, megatron_burst.plan.auto",
        "import megatron_burst.cli.plan",
    ],
)
def test_importing_the_package_and_its_plans_loads_neither_torch_nor_megatron(statement):
    assert loaded_by(statement) == set()


def test_the_check_above_can_fail():
    assert loaded_by("import megatron_burst.attention") == {"torch"}
