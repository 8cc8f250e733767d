"""Imports point one way: a module imports only its own layer or earlier ones."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_burst

PACKAGE = Path(__file__).parent.parent / "megatron_burst"
LAYERS = (  # a new module without a layer fails on purpose
    {"version", "errors", "integers", "logs", "imports", "files"},
    {"installed"},
    {"patching"},
    {"schedule"},
    {"rules", "rates"},
    {"resolve"},
    {"force", "config", "environment", "transforms", "slices", "balance"},
    {"recompute.checkpoints"},
    {"mcore.patches"},  # a table of names, which loads neither Megatron nor torch
    {"kernels"},
    {"arguments"},
    {"call"},
    {"call_checks"},
    {"comm"},
    {"engine"},
    {"cuda_graphs"},
    {"masks"},
    {"checks"},
    {"desync"},
    {"recompute"},
    {"largest_logits"},
    {"attention"},
    {"operators"},
    {"shards"},
    {"loss"},
    {"mcore"},
    {"masks_of_models"},
    {"__init__", "__main__", "auto", "patch", "spec", "compat", "hf", "titan"},
    {"tools"},
)
# what an entry point imports, lazily, where there is no GPU
LAZY = {"mcore.launch": {"tools.cpu_mode"}}
# how the reading path (what `import megatron_burst.attention` loads) reaches what a call loads only
# sometimes: (from, to) and when; only fewer
EXITS = {
    ("attention", "masks.sample"): "a shard before",
    ("attention", "cuda_graphs"): "a CUDA graph",
    ("attention", "masks.slices"): "cu_seqlens, slices or prefix_tree",
    ("attention", "recompute.later"): "keep",
    ("attention", "checks.spot_checks"): "check",
    ("attention", "largest_logits"): "return_max_logit",
    ("engine.passes", "checks.guard"): "nan_guard",
    ("engine.ranges", "checks.clock"): "--burst-log",
    ("comm.communicator", "comm.symmetric"): "GPUs of one node that pull",
    ("comm.detector", "desync.verdict"): "a fault",
    ("comm.detector", "desync.differing"): "a fault",
}


def layer_of(module: str) -> int:
    """The layer of a module such as "kernels.flash"; fails for one that has none."""
    top = module.partition(".")[0]
    own = [i for i, names in enumerate(LAYERS) if module in names]
    (layer,) = own or [i for i, names in enumerate(LAYERS) if top in names]
    return layer


@cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once: most tests read every file."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    return imported_by(nodes_of(path))


def imported_by(nodes: Iterable[ast.AST]) -> set[str]:
    """Modules of the package that statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            base = (node.module or "").removeprefix(PACKAGE.name).lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                found.add(name if not base or name in MODULES else base)
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            found |= {n.removeprefix("megatron_burst.") for n in names if "megatron_burst." in n}
    return found


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_of)
def test_imports_only_from_its_own_layer_or_earlier(path):
    module = module_of(path)
    for imported in imports_of(path):
        lazy = imported in LAZY.get(module, ()) or (module, imported) in EXITS
        assert lazy or layer_of(imported) <= layer_of(module), imported


def test_package_docstrings_and_contributing_name_modules_that_exist():
    """They are the first text that a reader of a folder opens."""
    for path in PACKAGE.rglob("__init__.py"):
        package = module_of(path)
        words = re.findall(r"`([\w.]+)`", ast.get_docstring(tree_of(path)) or "")
        for word in words:
            name = word.removeprefix("megatron_burst.")
            known = {name, f"{package}.{name}"} & MODULES.keys() or (path.parent / name).is_file()
            assert known, (package, word)
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    for folder in re.findall(r"`([\w/]+)/`", text):
        assert (PACKAGE / folder).is_dir() or (PACKAGE.parent / folder).is_dir(), folder


def test_documented_attributes_are_attributes():
    """A class's docstring keeps its names when a field is renamed."""
    documented = 0
    for path in MODULES.values():
        classes = [c for c in nodes_of(path) if isinstance(c, ast.ClassDef)]
        for node in classes:
            section = (ast.get_docstring(node) or "").partition("Attributes:\n")[2]
            rows = re.findall(r"^    (\w[\w, ]*):", section.partition("\n\n")[0], re.MULTILINE)
            names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node)}
            names |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            assert {name for row in rows for name in row.split(", ")} <= names, node.name
            documented += len(rows)
    assert documented > 50


def test_pages_about_the_code_name_what_it_has():
    """Identifiers in backticks, on the pages that lead a reader through it."""
    root = PACKAGE.parent
    code = {path.stem for name in ("tests", "examples") for path in (root / name).rglob("*.py")}
    for module, path in MODULES.items():
        code |= {*module.split(".")}
        for node in nodes_of(path):
            code |= {getattr(node, field, None) for field in ("id", "attr", "name", "arg")}
    for name in ("architecture", "concepts/programs"):
        text = (PACKAGE.parent / "docs" / f"{name}.md").read_text()
        named = re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", text)
        words = {word for each in named for word in each.removesuffix(".py").split(".")}
        words -= {"MEGATRON_BURST", "CUDA_DEVICE_MAX_CONNECTIONS"}  # environment variables
        assert len(words) > 20 and words <= code, (name, words - code)


def test_the_benchmarks_only_get_smaller():
    """One runner, one row format and one table maker: a new benchmark declares its cases."""
    files = [*(PACKAGE.parent / "benchmarks").rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    print(f"benchmarks: {len(files)} files, {lines} lines")
    assert 30 < len(files) <= 55 and lines <= 9_850


def test_no_benchmarks_import_each_other_in_a_circle():
    """Not even within functions, or for types."""
    paths = {path.stem: path for path in (PACKAGE.parent / "benchmarks").glob("*.py")}
    edges = {}
    for name, path in paths.items():
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
        named = {node.module.partition(".")[2] for node in nodes
                 if (node.module or "").startswith("benchmarks.")}  # fmt: skip
        named |= {a.name for node in nodes if node.module == "benchmarks" for a in node.names}
        edges[name] = named & paths.keys()
    assert sum(map(len, edges.values())) > 100
    TopologicalSorter(edges).prepare()  # raises CycleError


def test_only_mcore_imports_megatron():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "mcore" not in path.parts and module_of(path) != "tools.cpu_mode":
            assert "import megatron." not in text and "from megatron." not in text, path


def test_only_their_entry_points_import_other_frameworks():
    others = {"transformers", "accelerate", "trl", "torchtitan", "datasets"}
    found = {module_of(path): roots_of(path) & others for path in PACKAGE.rglob("*.py")}
    entry_points = {"hf.attention": {"transformers"}, "hf.trainer": {"accelerate"},
                    "titan": {"torchtitan"}}  # fmt: skip
    assert {name: roots for name, roots in found.items() if roots} == entry_points


def test_the_wheel_never_imports_the_benchmarks():
    """They import it, and are not in it."""
    roots = {path: roots_of(path) for path in PACKAGE.rglob("*.py")}
    assert [path for path, found in roots.items() if found & {"benchmarks", "tests"}] == []
    assert "benchmarks" in roots_of(PACKAGE.parent / "benchmarks" / "show.py")


def roots_of(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    nodes = nodes_of(path)
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@cache
def package_graph() -> dict[str, set[str]]:
    return graph_of(MODULES)


def graph_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    """What each module imports, including within functions, excluding type-checking imports."""

    def runs(node: ast.AST) -> bool:
        return not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))

    def walk(node: ast.AST):
        yield node
        for child in filter(runs, ast.iter_child_nodes(node)):
            yield from walk(child)

    return {
        name: imported_by(walk(tree_of(path))) & modules.keys() - {name}
        for name, path in modules.items()
    }


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, directly or not."""

    def reached(start: str) -> set[str]:
        found, new = set(), {start}
        while new:
            found |= new
            new = set().union(*(graph[name] for name in new)) - found
        return found

    after = {name: reached(name) for name in graph}
    rings = {frozenset(m for m in after[name] if name in after[m]) for name in graph}
    return sorted((set(ring) for ring in rings if len(ring) > 1), key=sorted)


def test_no_modules_import_each_other_in_a_circle():
    """A circle is one thing in several files: it can be neither read nor tested in parts."""
    assert circles(package_graph()) == []


def test_a_circle_is_found(tmp_path):
    lines = {"a": "from megatron_burst import b", "b": "def f():\n    import megatron_burst.c",
             "c": "from megatron_burst.a import x", "d": "from megatron_burst.a import y",
             "e": "if TYPE_CHECKING:\n    from megatron_burst.d import z"}  # fmt: skip
    for name, text in lines.items():
        (tmp_path / f"{name}.py").write_text(text)
    graph = graph_of({name: tmp_path / f"{name}.py" for name in lines})
    assert graph["e"] == set() and graph["d"] == {"a"}
    assert circles(graph) == [{"a", "b", "c"}]


def loaded_by(statement: str) -> set[str]:
    """Which of torch and megatron a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*({{'torch', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron_burst",
        "import megatron_burst.schedule.modes, megatron_burst.tools.pictures",
        "import megatron_burst.tools.job.flags, megatron_burst.tools.simulate.call",
        "import megatron_burst.tools.plan",
        "import megatron_burst.balance",
    ],
)
def test_importing_the_package_and_its_plans_loads_neither_torch_nor_megatron(statement):
    assert loaded_by(statement) == set()


def test_the_check_above_can_fail():
    assert loaded_by("import megatron_burst.attention") == {"torch"}


# ---- the house may only get smaller: lower a number when it falls -----------------------------

# what one module computes in torch and the other in Triton
TWINS = {"kernels.fused": "kernels.partial", "loss.fused": "loss.statistics"}
BACKENDS = {f"kernels.{name}" for name in ("fa4", "reference", "torch_cpu",
                                           "torch_gpu", "triton")}  # fmt: skip
# what says what a call is, and how it runs; nothing else may
DESCRIBES = {
    "config": {"BurstConfig"},
    "force": {"Force"},
    "arguments": {"CallArgs"},
    "call": {"Call"},
    "schedule.mask": {"Mask"},
    "schedule.spec": {"AttentionShape", "Kernel", "Spec"},
    "logs": {"Decision"},
    "kernels.interface": {"Problem"},
    "engine.passes": {"Passes"},
    "masks.sample": {"Sample"},
    "masks.documents": {"Documents"},
    "comm.detector": {"PassAnnouncer"},
    "comm.group": {"Group"},
}
BESIDE = {  # enums and machinery in the same modules
    "attention": {"BurstAttentionFunction"},
    "schedule.mask": {"Band", "Span", "Tile"},
    "schedule.spec": {"Cargo", "Circulate", "Direction", "Dtype"},
    "kernels.interface": {"Backend", "Capability", "QuerySide"},
    "comm.detector": {"Pass", "DesyncDetector"}, "comm.group": {"GroupMemory", "SubGroups"},
}  # fmt: skip
MOST = {  # modules, lines, lines of code with imports, and without
    "reading path": (53, 9450, 6205, 5665),
    "trainer": (194, 29795, 19905, 17925),
    "package": (258, 39190, 26630, 23950),
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def public_names(path: Path) -> set[str]:
    """Classes and functions of a module that others may import."""
    tops = tree_of(path).body
    named = (ast.ClassDef, ast.FunctionDef)
    return {top.name for top in tops if isinstance(top, named) and not top.name.startswith("_")}


def test_no_public_name_is_defined_twice():
    """One word, one meaning; twins have the names of what they speed up."""
    seen: dict[str, str] = {}
    for module, path in MODULES.items():
        if module.startswith("tools"):
            continue
        for name in public_names(path):
            other = seen.setdefault(name, module)
            twins = {TWINS.get(module), TWINS.get(other)} & {module, other}
            assert other == module or twins, (name, other, module)


def test_a_call_is_described_by_these_types_alone():
    """They may only become fewer: a reader of one call meets all of them."""
    for module, names in DESCRIBES.items():
        tops = tree_of(MODULES[module]).body
        classes = {top.name for top in tops if isinstance(top, ast.ClassDef)}
        public = {name for name in classes if not name.startswith("_")}
        assert public == names | BESIDE.get(module, set()), module
    assert sum(map(len, DESCRIBES.values())) <= 15


def test_no_modules_import_each_other_for_types_either():
    edges = {name: imports_of(path) & MODULES.keys() for name, path in MODULES.items()}
    TopologicalSorter(edges).prepare()  # raises CycleError


@cache
def reading_path() -> set[str]:
    """Modules that `import megatron_burst.attention` loads."""
    code = "import megatron_burst.attention, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {name for name in done.stdout.split() if name.startswith(f"{PACKAGE.name}.")}
    return {name.removeprefix(f"{PACKAGE.name}.") for name in own}


def test_the_reading_path_is_left_through_the_declared_exits_alone():
    """Which the rest of the package is behind: a reader of the core may stop at them."""
    path = reading_path()
    speedups = BACKENDS | TWINS.keys()
    left = {(name, to) for name in path for to in package_graph()[name] - path - speedups}
    assert left == EXITS.keys()
    assert len(EXITS) <= 11


def test_the_page_lists_the_reading_path():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = text.partition("## The reading path")[2].partition("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    files = [name.replace("/", ".") for row in rows for name in re.findall("`(.+?)`", row)]
    packages = {name.rpartition(".")[0] for name in files} - {""}
    assert len(files) == len(set(files)) and {*files} == reading_path() - packages


def test_folders_of_the_reading_path_say_what_is_not_on_it():
    path = reading_path()
    for module, file in MODULES.items():
        folder = module.rpartition(".")[0]
        if module in path or module in ("schedule", "engine", "comm", "kernels"):
            continue
        assert folder not in ("schedule", "engine"), module
        if folder in ("comm", "kernels") and file.name != "__init__.py":
            first = (ast.get_docstring(tree_of(file)) or "").partition("\n")[0]
            assert "not on the reading path" in first, module


def size_of(modules: Iterable[str]) -> tuple[int, ...]:
    """Modules, their lines, and lines of code with imports and without: no blank line, comment or
    docstring."""
    sizes = [(1, *_lines_of(MODULES[name])) for name in modules]
    return tuple(map(sum, zip(*sizes, strict=True)))


def _lines_of(path: Path) -> tuple[int, int, int]:
    text = path.read_text()
    lines, words, imports = text.splitlines(), set(), set()
    for node in nodes_of(path):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            words |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= {*range(node.lineno, node.end_lineno + 1)}
    code = {number for number, line in enumerate(map(str.strip, lines), 1)
            if line and not line.startswith("#")} - words  # fmt: skip
    return len(lines), len(code), len(code - imports)


# what no identifier of the reading path is, and what is no part of one between underscores and
# capitals, beside the words that tests/test_docs.py finds everywhere; `left` may only be a
# window's bound
BARE = frozenset(
    "found some one each every both other others these those this that what which mine theirs ours "
    "its it here there given made known kept taken held asked wanted come came gone moved joined "
    "arranged restored reached rest".split()
)
SPOKEN = frozenset("found told met lies say said heard heed home carrier".split())


def identifiers_of(tree: ast.AST) -> Iterable[tuple[int, str]]:
    """What a module binds: variables, parameters, attributes, functions and classes, with lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def is_forbidden(name: str) -> bool:
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return name.strip("_").lower() in BARE or bool(words & SPOKEN)


def test_identifiers_of_the_reading_path_are_nouns_and_verbs_of_the_field():
    forbidden = [
        f"{name}:{line} {identifier}" for name in sorted(reading_path())
        for line, identifier in identifiers_of(tree_of(MODULES[name]))
        if is_forbidden(identifier)
    ]  # fmt: skip
    assert forbidden == []
    assert is_forbidden("_found") and is_forbidden("RankHome") and is_forbidden("told_by_all")
    assert not is_forbidden("own_rows") and not is_forbidden("Transport")


def test_the_house_does_not_grow():
    path = reading_path()
    assert not any(name.startswith("tools") for name in path)
    trainer = [name for name in MODULES if not name.startswith("tools")]
    sizes = {"reading path": path, "trainer": trainer, "package": MODULES}
    for what, modules in sizes.items():
        size = size_of(modules)
        print(f"{what}: {size[0]} modules, {size[1]} lines, {size[2:]} of code")
        assert all(now <= most for now, most in zip(size, MOST[what], strict=True)), (what, size)


def test_no_public_name_is_that_of_a_module():
    """The module would take its place in the package as soon as it is imported."""
    names = {*megatron_burst.__all__}
    assert len(names) >= 19 and not names & {name.partition(".")[0] for name in MODULES}
