"""What the package reads is data: no text is evaluated, and none is given to a shell.

torch's object collectives unpickle; `tools/world.py` alone uses them, and SECURITY.md says so.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_burst"
UNPICKLE = {"all_gather_object", "broadcast_object_list"}
EVALUATES = {"eval", "exec", "system", "popen", "mktemp", "unsafe_load", "full_load"}


def dangers(text: str) -> set[str]:
    """What a module calls or imports that runs what it reads."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            found |= names & {"pickle", "marshal", "shelve", "dill", "yaml"}
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            options = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            owner = getattr(getattr(node.func, "value", None), "id", "")
            evaluates = name in EVALUATES and owner not in ("model", "module", "self")
            found |= {name} if evaluates else set()
            found |= {name} if name.endswith(("_object", "_object_list")) else set()
            found |= {"shell"} if options.get("shell") else set()
            unsafe = (owner, name) == ("torch", "load") and options.get("weights_only") is not True
            found |= {"torch.load"} if unsafe else set()
    return found


def test_nothing_that_is_read_is_run():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if dangers(path.read_text()):
            found[str(path.relative_to(PACKAGE))] = dangers(path.read_text())
    assert found == {"tools/world.py": UNPICKLE}
    assert "unpickle" in (PACKAGE.parent / "SECURITY.md").read_text()


@pytest.mark.parametrize(
    "code",
    ["eval(text)", "os.system(x)", "run(x, shell=True)", "torch.load(f)", "import pickle",
     "torch.load(f, weights_only=False)", "from yaml import load", "tempfile.mktemp()",
     "dist.all_gather_object(a, b)", "dist.scatter_object_list(a, b)"],
)  # fmt: skip
def test_the_check_above_can_fail(code):
    assert dangers(code)
    assert not dangers("model.eval(); torch.load(f, weights_only=True); run(x, shell=False)")
