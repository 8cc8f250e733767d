"""Generates pages from the code: flags, the command line, errors, columns of CSVs.

python docs/reference_pages.py
"""

import ast
import re
import runpy
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from megatron_burst.mcore.args import add_flags
from megatron_burst.mcore.refusals import TABLE
from megatron_burst.tools.main import app

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "megatron_burst"


def flags() -> str:
    """A table of the flags that burst adds to Megatron's parser."""
    parser = ArgumentParser(add_help=False)
    add_flags(parser)
    lines = [
        "# Flags",
        "",
        "This page lists all flags that burst adds to Megatron's command line. "
        "[Settings](../how-to/settings.md) says when to use them, and has options for experiments.",
    ]
    for group in parser._action_groups[2:]:
        lines += ["", f"## {group.title}", "", group.description or "", ""]
        lines += ['<div class="flags" markdown>', "", "| flag | values | meaning |"]
        lines += ["| --- | --- | --- |", *map(_row, group._group_actions), "", "</div>"]
    return "\n".join([*lines, ""])


def _row(action: Action) -> str:
    values = ", ".join(f"`{x}`" for x in action.choices or ()) or f"`{action.metavar or 'on'}`"
    default = "" if action.default in (None, False, SUPPRESS) else f" (default `{action.default}`)"
    cells = f"`{action.option_strings[0]}`", values + default, action.help or ""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def command_line() -> str:
    """What `megatron-burst --help` says, for all commands."""
    command = get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="megatron-burst", title="Command line"
    )
    return re.sub(r"<([a-z|0-9_ ]+)>", r"&lt;\1&gt;", text)


API = (
    "attention.burst_attention", "config.BurstConfig",
    "comm.cp_groups.cp_groups", "comm.cp_groups.CPGroups",
    "recompute.keep.keep", "loss.linear.linear_cross_entropy",
    "loss.linear.token_log_probs", "loss.next_tokens.next_tokens",
    "loss.supervised.count_supervised",
    *(f"loss.distillation.{name}" for name in (
        "top_k_log_probs", "class_log_probs", "top_k_kl", "distillation_loss",
    )),
    "mcore.fused_loss.fuse_loss", "mcore.specs.burst_spec", "mcore.sliced.SlicedSeqParams",
    "mcore.balanced.BalancedBatches",
    "shards.shard", "shards.unshard", "shards.position_ids",
    "errors.BurstError",
)  # fmt: skip
MODULES = {
    "slices": "Masks of slices: `megatron_burst.slices`",
    "hf": "transformers: `megatron_burst.hf`",
    "titan": "torchtitan: `megatron_burst.titan`",
    "auto": "Frameworks on Megatron: `megatron_burst.auto`",
    "compat": "The original BurstAttention's interface: `megatron_burst.compat`",
}


def python() -> str:
    """The public names: a table to read as it is, and where the site puts docstrings."""
    lines = [
        "# Python interface",
        "",
        "Everything in this table is importable from `megatron_burst`. Arguments, shapes, dtypes "
        "and errors are in the docstrings: in the linked files, and on the site (`make docs`) "
        "below.",
        "",
        "| name | what it does |",
        "| --- | --- |",
    ]
    for name in API:
        node, path = _definition(name)
        words = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
        link = f"../../{path.relative_to(DOCS.parent)}"
        lines.append(f"| [`{_signature(node)}`]({link}) | {words.replace('|', chr(92) + '|')} |")
    lines += ["", "## Docstrings", ""]
    shown = _examples()
    for name in API:
        lines += [f"::: megatron_burst.{name}", "", *shown.pop(name.rpartition(".")[2])]
    for module, title in MODULES.items():
        lines += [f"## {title}", "", f"::: megatron_burst.{module}", "    options:"]
        lines += ["      show_root_heading: false", "", *shown.pop(module)]
    assert not shown, shown.keys()
    return "\n".join(lines)


def _examples() -> dict[str, list[str]]:
    """Lines of the example of each name, from api_examples.py; the first block is what all use."""
    blocks = re.split(r"^# %% (\w+)\n", (DOCS / "api_examples.py").read_text(), flags=re.MULTILINE)
    found = dict(zip(blocks[3::2], blocks[4::2], strict=True))
    return {name: ["Example:", "", "```python", text.strip("\n"), "```", ""]
            for name, text in found.items()}  # fmt: skip


def _definition(name: str) -> tuple[ast.AST, Path]:
    """A function or class of the package, and its file."""
    module, _, last = name.rpartition(".")
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    nodes = ast.parse(path.read_text()).body
    (found,) = [node for node in nodes if getattr(node, "name", None) == last]
    return found, path


def _signature(node: ast.AST) -> str:
    """Names of a function's arguments; a class's own name."""
    if isinstance(node, ast.ClassDef):
        return node.name
    given = node.args
    names = [arg.arg for arg in [*given.posonlyargs, *given.args]]
    if given.kwonlyargs:
        names += ["*", *(f"{arg.arg}=" for arg in given.kwonlyargs)]
    return f"{node.name}({', '.join(names)})"


class Refused(NamedTuple):
    """An error of the code: what must hold, and what to change if it does not."""

    where: str
    must: str
    change: str


def refusals() -> str:
    """A table of every error with which burst refuses something."""
    every = sorted({*_of_the_code(), *_of_megatron()})
    lines = [
        "# Errors",
        "",
        "Every error with which burst refuses an input, an option or an environment, generated "
        "from the code. The first column is the condition and its reason, the second what to "
        "change. Parts in braces are placeholders. The message also says who raises it and what "
        "it got instead. Burst raises these errors before it computes or sends anything.",
        "",
        f"{len(every)} errors.",
    ]
    for where in dict.fromkeys(row.where for row in every):
        lines += ["", f"## {where}", "", "| what must hold, and why | what to change |"]
        lines += ["| --- | --- |"]
        lines += [f"| {_cell(x.must)} | {_cell(x.change)} |" for x in every if x.where == where]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Underscores inside of words mean themselves in Markdown: they stay, so that a search finds
    them."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def _of_megatron() -> Iterator[Refused]:
    """Rows of the table of refusals."""
    tree = ast.parse((PACKAGE / "mcore" / "refusals.py").read_text())
    made = {x.lineno: _text(x.body) for x in ast.walk(tree) if isinstance(x, ast.Lambda)}
    for row in TABLE:
        is_text = isinstance(row.change, str)
        change = row.change if is_text else made[row.change.__code__.co_firstlineno]
        must = f"cannot run with {row.named}, because {row.why}"
        yield Refused("mcore: Megatron's options", must, change)


def _of_the_code() -> Iterator[Refused]:
    """Sentences of `BurstError("who: must; got ...; change")` and of needs."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        where = inside.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            sentence = _text(node.args[0]) if isinstance(node, ast.Call) and node.args else ""
            if sentence.count("; got") == 1 and ": " in sentence:
                must, _, rest = sentence.partition(": ")[2].partition("; got")
                yield Refused(where, must, rest.partition("; ")[2] or "see the message")
            need = [*map(_text, node.elts)] if isinstance(node, ast.Tuple) else []
            if len(need) == 4 and " must " in need[1] and need[3]:
                yield Refused(where, need[1], need[3])


def _text(node: ast.AST) -> str:
    """A string's text with its placeholders in braces; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            x.value if isinstance(x, ast.Constant) else f"{{{_filled_in(x.value)}}}"
            for x in node.values
        )
    return ""


def _filled_in(node: ast.AST) -> str:
    """What a placeholder stands for, in words where the code would puzzle a reader."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "nearest_multiples":
        return f"multiple of {_filled_in(node.args[1])}"
    return re.sub(r"\b(?:o|self)\.", "", ast.unparse(node))


def csvs() -> str:
    """Columns of the benchmarks' CSVs: which each kind has, and what they mean."""
    sheets = runpy.run_path(str(DOCS.parent / "benchmarks" / "sheets.py"))
    kinds = {}
    for name, each in sheets.items():
        if name.endswith("_CSV"):
            kinds.setdefault(each.kind, each.writer)
    lines = [
        "# Columns of the CSVs",
        "",
        "All CSVs below `benchmarks/results` and `benchmarks/predictions` have rows of these "
        "kinds, generated from `benchmarks/sheets.py`. A column has one meaning in all of them. A "
        "last column `superseded`, where there is one, has the commit that made a row obsolete "
        "([rows stay](../docs/benchmarks/how-measured.md#rows-stay)).",
        "",
        "| written by | columns |",
        "| --- | --- |",
    ]
    for kind, writer in kinds.items():
        columns = ", ".join(f"`{column}`" for column in sheets["columns_of"](kind))
        lines.append(f"| `{writer}` | {columns} |")
    lines += ["", "Numbers are empty where nothing was measured.", ""]
    lines += ["| column | type | meaning |", "| --- | --- | --- |"]
    for name, row in sheets["GLOSSARY"].items():
        meaning = row["meaning"].replace("|", "\\|")
        lines.append(f"| `{name.rstrip('_')}` | {row['type']} | {meaning} |")
    return "\n".join([*lines, ""])


PAGES = {
    "reference/api.md": python,
    "reference/flags.md": flags,
    "reference/command-line.md": command_line,
    "reference/errors.md": refusals,
    "../benchmarks/columns.md": csvs,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
