"""Where the parts of a shell script begin and end, and its arithmetic."""

import ast
import operator
import re
from collections.abc import Iterator
from typing import Any

_QUOTED = r"""\\.|'[^']*+'|"(?:\\.|[^"\\])*+\""""


def _between(opening: str, closing: str) -> str:
    """A pattern of brackets and what is in them, up to six brackets deep; open ones end with the
    text."""
    inside = rf"(?:{_QUOTED}|[^{opening}{closing}])*+"
    for _ in range(5):
        inside = rf"(?:{_QUOTED}|[^{opening}{closing}]|{opening}{inside}(?:{closing}|\Z))*+"
    return rf"{opening}{inside}(?:{closing}|\Z)"


_ROUND, _CURLY = _between(r"\(", r"\)"), _between(r"\{", r"\}")
# texts, which `re` compiles, and keeps, when a script is read
_CONTINUED = r"\\[ \t]*\n"
_COMMENT_OR_TEXT = rf"(?s)(?<!\S)(#[^\n]*)|{_CONTINUED}|{_QUOTED}"
_STATEMENT = rf"(?s)(?:{_QUOTED}|{_ROUND}|[^\n;])++"
_WORD = (
    rf"""(?s)(?:"(?:\\.|\$(?:{_ROUND}|{_CURLY})|[^"\\])*+"|{_QUOTED}|\$?{_ROUND}|\${_CURLY}|\S)*+"""
)
SUBSTITUTION = rf"(?s)\\?\$(?:{_ROUND}|{_CURLY}|\w+|[@*#?!$-])?"
_HERE = r"(?sm)(?<!<)<<-?[ \t]*([\"']?)(\w+)\1([^\n]*)\n(.*?)^[ \t]*\2[ \t]*$"
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def statements(text: str) -> Iterator[str]:
    """Commands without comments and continued lines; arrays and strings may have several lines."""

    def clean(found: re.Match[str]) -> str:
        return "" if found[1] else re.sub(_CONTINUED, " ", found[0])

    text = re.sub(_COMMENT_OR_TEXT, clean, re.sub(_HERE, _as_commands, text))
    return filter(None, map(str.strip, re.findall(_STATEMENT, text)))


def _as_commands(here: re.Match[str]) -> str:
    """A here document as commands that do nothing, because it is text in which any quote may be."""
    lines = (f": {line}" for line in re.sub("[\"'()]", "", here[4]).splitlines())
    return "\n".join((here[3], *lines))


def first_word(text: str) -> str:
    """The word, or the array, that a text begins with."""
    found = re.match(_WORD, text)
    assert found  # also matches nothing
    return found[0]


def one_word(text: str) -> str:
    """Without blanks and quotes."""
    return re.sub(r"[\s\"']", "", text)


def arithmetic(text: str) -> Any:
    """The value of numbers, lists, their sums and products, and comparisons of two.

    Raises:
        SyntaxError, ValueError, TypeError, ZeroDivisionError: if it has anything else.
    """
    return _evaluated(ast.parse(text.strip(), mode="eval").body)


def _evaluated(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_evaluated(item) for item in items]
        case (
            ast.BinOp(left=left, op=sign, right=right)
            | ast.Compare(left=left, ops=[sign], comparators=[right])
        ) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_evaluated(left), _evaluated(right))
    raise ValueError(ast.unparse(node))
