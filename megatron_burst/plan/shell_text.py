"""Where the parts of a shell script begin and end, and its arithmetic."""

import ast
import operator
import re
from collections.abc import Iterator
from typing import Any

_HERE = re.compile(
    r"(?<!<)<<-?[ \t]*([\"']?)(\w+)\1([^\n]*)\n(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE
)
_CLOSE = {"(": ")", "{": "}"}
_BINARY: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: dict[type, Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def statements(text: str) -> Iterator[str]:
    """Commands without comments and continued lines; arrays and strings may have several lines."""
    text = _HERE.sub(_as_commands, text)
    now, quote, depth, at = "", "", 0, 0
    while at < len(text):
        char, more = text[at], 1
        if char == "#" and not quote and (not now or now[-1].isspace()):
            more = (text + "\n").index("\n", at) - at
        elif char == "\\":
            joined = re.match(r"\\[ \t]*\n", text[at:])
            more = joined.end() if joined else 2
            now += " " if joined else text[at : at + 2]
        elif char in "\n;" and not quote and not depth:
            if now.strip():
                yield now.strip()
            now = ""
        else:
            now += char
            if char in "\"'" and quote in ("", char):
                quote = "" if quote else char
            elif not quote:
                depth = max(0, depth + (char == "(") - (char == ")"))
        at += more
    if now.strip():
        yield now.strip()


def _as_commands(here: re.Match[str]) -> str:
    """A here document as commands that do nothing, because it is text in which any quote may be."""
    lines = (f": {one_line}" for one_line in re.sub("[\"'()]", "", here[4]).splitlines())
    return "\n".join((here[3], *lines))


def closed(text: str, at: int, name: bool = False) -> int:
    """Where what begins at a place ends: with `name` a substitution, `$NAME`, `${...}`, `$(...)`,
    else a word or an array."""
    if name:
        if text[at + 1 : at + 2] in _CLOSE:
            return _bracket(text, at + 1)
        found = re.compile(r"\$(\w+|[@*#?!$-])?").match(text, at)
        assert found
        return found.end()
    quote = ""
    while at < len(text) and (quote or not text[at].isspace()):
        if text[at] in "\"'" and quote in ("", text[at]):
            quote = "" if quote else text[at]
        elif text[at] == "\\":
            at += 1
        elif text[at] == "(" or text[at : at + 2] == "${":
            at = _bracket(text, at + (text[at] == "$")) - 1
        at += 1
    return min(at, len(text))


def _bracket(text: str, at: int) -> int:
    """Behind the bracket that closes the one at a place."""
    opening, depth = text[at], 0
    for place in range(at, len(text)):
        depth += (text[place] == opening) - (text[place] == _CLOSE[opening])
        if not depth:
            return place + 1
    return len(text)


def one_word(text: str) -> str:
    """Without blanks and quotes."""
    return re.sub(r"[\s\"']", "", text)


def expression(text: str) -> int | None:
    """A shell's arithmetic of whole numbers; None if it has anything else."""
    try:
        return _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_COMPARE[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("no whole number")
