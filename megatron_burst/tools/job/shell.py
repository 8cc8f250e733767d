"""What a shell would make of a launch script, as far as text alone tells: variables, arithmetic,
conditions, arrays, and other scripts that it sources."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_burst.tools.job.shell_text import (
    SUBSTITUTION,
    arithmetic,
    first_word,
    one_word,
    statements,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARE = re.compile(r"(?:export|readonly|local|declare|typeset)(?:\s+-\w+)*\s+")
_CASE = re.compile(r"\(?[^()\s=]+(?:\s*\|\s*[^()\s=]+)*\)\s*")
_FUNCTION = re.compile(r"(?:function\s+)?[\w-]+\s*\(\s*\)\s*\{?\s*|function\s+[\w-]+\s*\{\s*")
_TEST = re.compile(r"(\[\[?\s.*?\s\]\]?|\(\(.*?\)\))\s*(&&|\|\|)\s*")
_LOOPS = ("for", "while", "until", "select")
_ENDS = {"fi": ("if",), "done": _LOOPS, "esac": ("case",), "}": ("function",)}
_COMPARED = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


@dataclass(slots=True)
class _Block:
    """Of an if, a loop, a case or a function. Attributes:
    runs: whether what follows is run; None: nobody knows.
    done: whether a branch before was run; None: perhaps.
    """

    word: str
    runs: bool | None = None
    done: bool | None = None


@dataclass(slots=True)
class _Shell:
    folder: Path | None
    # None: it has a value that is not known
    values: dict[str, str | None]
    blocks: list[_Block] = field(default_factory=list)
    sourced: set[Path] = field(default_factory=set)

    def run(self, text: str) -> Iterator[str]:
        """The commands that are run, or may be, expanded."""
        for statement in statements(text):
            yield from self._statement(statement)

    def _statement(self, text: str) -> Iterator[str]:
        word, _, rest = text.partition(" ")
        if word in ("if", "elif", "else", "then", "do", "case", *_LOOPS, *_ENDS):
            yield from self._keyword(word, rest.strip())
        elif found := _FUNCTION.match(text):
            self.blocks.append(_Block("function"))
            yield from self._rest(text[found.end() :])
        elif any(block.runs is False for block in self.blocks):
            pass
        elif self.blocks and self.blocks[-1].word == "case" and (found := _CASE.match(text)):
            yield from self._rest(text[found.end() :])
        elif found := _TEST.match(text):
            truth = self._truth(found[1])
            runs = truth if truth is None or found[2] == "&&" else not truth
            self.blocks.append(_Block("test", runs))
            yield from self._rest(text[found.end() :])
            self.blocks.pop()
        else:
            yield from self._command(text)

    def _rest(self, text: str) -> Iterator[str]:
        if text:
            yield from self._statement(text)

    def _keyword(self, word: str, rest: str) -> Iterator[str]:
        if word == "if":
            truth = self._truth(rest)
            self.blocks.append(_Block(word, truth, truth))
        elif word in ("case", *_LOOPS):
            self.blocks.append(_Block(word))
            if word in ("for", "select") and (name := re.match(r"\w+", rest)):
                self.values[name[0]] = None
        elif word in _ENDS:
            if self.blocks and self.blocks[-1].word in _ENDS[word]:
                self.blocks.pop()
        elif word in ("elif", "else") and self.blocks:
            block = self.blocks[-1]
            truth = self._truth(rest) if word == "elif" else True
            if block.done is not False:
                truth = None if block.done is None and truth is not False else False
            block.runs = truth
            if block.done is False:
                block.done = truth
        if word in ("then", "else", "do"):
            yield from self._rest(rest)

    def _command(self, text: str) -> Iterator[str]:
        if found := re.match(r"(?:source|\.)\s+", text):
            yield from self._source(first_word(text[found.end() :]))
            return
        bare = _DECLARE.sub("", text, count=1) if _DECLARE.match(text) else text
        if pairs := self._assignments(bare):
            for name, more, value in pairs:
                whole = self._expand(value)
                self._assign(name, whole, bool(more))
                yield f"{name}={whole}"
        else:
            yield self._expand(text)

    def _assignments(self, text: str) -> list[tuple[str, str, str]]:
        """Names, "+" or "", and values, if a command has nothing else."""
        found = []
        while text:
            start = _ASSIGNED.match(text)
            if not start:
                return []
            value = first_word(text[start.end() :])
            found.append((start[1], start[2], value))
            text = text[start.end() + len(value) :].lstrip()
        return found

    def _assign(self, name: str, text: str, more: bool) -> None:
        plain = re.sub("[\"']", "", text).strip()
        if text.startswith("("):
            plain = plain.removeprefix("(").removesuffix(")")
        before = self.values.get(name, "") if more else ""
        known = before is not None and not re.search("[$`]", plain)
        joined = f"{before} {plain}" if more else plain
        value = joined if known else None
        unsure = any(block.runs is None for block in self.blocks)
        self.values[name] = None if unsure and self.values.get(name) != value else value

    def _source(self, word: str) -> Iterator[str]:
        """What a sourced file runs, looked for beside the script and in the folders above it; of
        its own path what no variable has."""
        name = re.sub("[\"']", "", self._expand(word)).rpartition("$")[2]
        name = name.partition("/")[2] if name != word.strip("\"'") else name
        folders = [self.folder, *self.folder.parents[:2]] if self.folder and name else []
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        if paths and paths[0] not in self.sourced:
            self.sourced.add(paths[0])
            yield from self.run(paths[0].read_text(errors="replace"))

    def _truth(self, text: str) -> bool | None:
        """Of a condition; None: nobody knows."""
        if text.startswith("((") and text.endswith("))"):
            number = self._number(text[2:-2])
            return None if number is None else bool(number)
        found = re.fullmatch(r"\[\[?\s+(.*?)\s+\]\]?", text)
        inner = self._expand(found[1]) if found else ""
        if inner.startswith(("-n ", "-z ")):  # what is not set is empty
            unset = re.fullmatch(r"(-. )\"?\$\{?([A-Za-z_]\w*)\}?\"?", inner)
            inner = unset[1] if unset and unset[2] not in self.values else inner
        sides = re.sub("[\"']", " ", inner).split()
        if not sides or "$" in " ".join(sides) or "*" in " ".join(sides):
            return None
        if sides[0] in ("-n", "-z") and len(sides) <= 2:
            return (len(sides) == 2) == (sides[0] == "-n")
        if len(sides) != 3:
            return None
        one, sign, other = sides
        if sign in ("=", "==", "!="):
            return (one == other) == (sign != "!=")
        if sign not in _COMPARED:  # such as < of [[ ]], which compares text
            return None
        one, other = (f"{int(side)}" if side.isdecimal() else side for side in (one, other))
        number = self._number(f"{one} {_COMPARED[sign]} {other}")
        return None if number is None else bool(number)

    def _number(self, text: str) -> int | None:
        """Of whole numbers and variables."""
        try:
            text = _NAME.sub(lambda name: f"({self.values[name[0]]})", self._expand(text))
            return int(arithmetic(text.replace("/", "//")))
        except (KeyError, SyntaxError, ValueError, TypeError, ZeroDivisionError):
            return None

    def _expand(self, text: str) -> str:
        """With what variables stand for; the rest as it is, each a single word."""

        def known(found: re.Match[str]) -> str:
            value = None if found[0].startswith("\\") else self._value(found[0])
            return one_word(found[0]) if value is None else value

        return re.sub(SUBSTITUTION, known, re.sub(r"`([^`]*)`", r"$(\1)", text))

    def _value(self, whole: str) -> str | None:
        if whole.startswith("$(("):
            number = self._number(whole[3:-2])
            return None if number is None else str(number)
        found = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?(?:(:?[-+=?])(.*))?\}?", whole, re.DOTALL)
        if not found:
            return None
        name, how, other = found[1], found[2] or "", (found[3] or "").removesuffix("}")
        value = self.values.get(name, "")
        if value is None:
            return None
        there = bool(value) if how.startswith(":") else name in self.values
        if how.endswith("+"):
            return self._expand(other) if there else ""
        if there or (not how and name in self.values):
            return value
        if not how.endswith(("-", "=")):
            return None
        value = self._expand(other)
        if how.endswith("="):
            self._assign(name, value, more=False)
        return value


def expanded(text: str, folder: Path | None = None, given: Mapping[str, str] | None = None) -> str:
    """The commands of a script that are run, or may be, a line each, with what variables stand for.

    What cannot be known stays, `$` included, without blanks: other programs' output, parameters of
    the script, and variables with different values in branches of which nobody knows which runs.

    Args:
        text: of the script.
        folder: it is in, for other scripts that it sources.
        given: variables that it starts with; those of this process, unless given.
    """
    values: dict[str, str | None] = {**(os.environ if given is None else given)}
    if nodes := re.search(r"^#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)\s*$", text, re.MULTILINE):
        values.setdefault("SLURM_JOB_NUM_NODES", nodes[1])
        values.setdefault("SLURM_NNODES", nodes[1])
    return "\n".join(_Shell(folder, values).run(text))
