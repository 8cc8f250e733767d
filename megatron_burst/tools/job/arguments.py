"""Megatron's arguments in what --burst-dump-args wrote, a shell script, or YAML."""

import os
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

from megatron_burst.errors import BurstError

# what a user can do where a shell would know more
DUMP = "or start it with --burst-dump-args args.json, and plan that file"
DUMPED = "megatron_arguments"  # the key of that file
_LISTS = ("recompute_modules",)  # flags with several values, here words of one text
SWITCHES = {  # flags without a value that plans depend on
    "sft", "swiglu", "group_query_attention", "multi_latent_attention", "recompute_activations",
    "untie_embeddings_and_output_weights", "reset_attention_mask", "disable_bias_linear",
    "bf16", "fp16",
    "dataloader_inter_document_masking", "use_torch_fsdp2", "use_megatron_fsdp",
}  # fmt: skip
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_ABSENT = ("", "null", "~")
_HERE = r"(?sm)(?<!<)<<-?[ \t]*([\"']?)(\w+)\1[^\n]*\n.*?^[ \t]*\2[ \t]*$"
_YAML_KEY = r"^[ \t]*-{0,2}([A-Za-z][\w-]*)[ \t]*:"


def megatron_arguments(text: str) -> dict[str, Any]:
    """Arguments in a text, dashes as underscores; a flag without a value is True.

    Understood are `--flag value` anywhere in a shell script, on continued lines and in arrays and
    quotes too; and YAML lines `flag: value`, with or without dashes and indentation; of YAML lists
    in brackets and with an item a line, truths and null, which is left out. Shell variables that
    the script does not set have the environment's value, or their default (`${X:-1}`). A value that
    only a shell would know has a `$` in it.

    Raises:
        BurstError: if a script sources another one.
    """
    if re.search(r"^\s*--[\w-]+:\s", text, re.MULTILINE):
        return _yaml(text)
    if sourced := re.search(r"^\s*(?:source|\.)\s+(.*)", text, re.MULTILINE):
        raise BurstError(
            "plan: a script must have all flags of its job in it, because those of other files are "
            f"not read; got one that sources {sourced[1].strip()}; write them there, {DUMP}"
        )
    is_shell = re.search(r"(^|[\s(\"'])--[a-z]", text, re.MULTILINE)
    return (_shell(text) if is_shell else {}) or _yaml(text)


def arguments_in_json(data: Any) -> dict[str, Any] | None:
    """What --burst-dump-args wrote, as words; None if it is anything else."""
    found = data.get(DUMPED) if isinstance(data, dict) else None
    if not isinstance(found, dict):
        return None
    lists = {
        name: " ".join(map(str, found[name])) for name in _LISTS if type(found.get(name)) is list
    }
    given = {name: value for name, value in found.items() if value is not None} | lists
    return {name: v if isinstance(v, bool) else str(v) for name, v in given.items()}


def _yaml(text: str) -> dict[str, Any]:
    text = re.sub(r"(^|[ \t])#.*", "", text, flags=re.MULTILINE)
    blocks = re.compile(_YAML_KEY + r"[ \t]*\n((?:[ \t]*(?:-[ \t]+[^:\n]*)?\n)+)", re.MULTILINE)
    text = blocks.sub(_in_brackets, text + "\n")
    pairs = re.findall(_YAML_KEY + r"[ \t]*(\[[^\]]*\]|[^#\n]*)", text, re.MULTILINE)
    found: dict[str, Any] = {}
    for key, value in ((_key(key), value.strip()) for key, value in pairs):
        plain = value.strip("\"'")
        if key in _LISTS and value.startswith("["):
            found[key] = " ".join(re.sub("[\"',]", " ", value.strip("[]")).split())
        elif value.lower() not in _ABSENT:
            found[key] = _TRUTHS.get(plain.lower(), plain)
    return found


def _in_brackets(block: re.Match[str]) -> str:
    """A list with an item a line, on one line; what has no items is left as it is."""
    items = [line.strip().removeprefix("-").strip() for line in block[2].splitlines()]
    items = [item for item in items if item]
    return f"{block[1]}: [{', '.join(items)}]\n" if items else block[0]


def _shell(text: str) -> dict[str, Any]:
    """Flags of a script. What stands in a branch or a loop may not be run, so it has no value."""
    arguments: dict[str, Any] = {}
    for words, is_run in _commands(text):
        for at, (word, after) in enumerate(pairwise([*words, ""])):
            flag, equals, value = word.partition("=")
            if flag.startswith("--"):
                key, found = _key(flag.lstrip("-")), value if equals else _value(after)
                if key in SWITCHES and "$" in str(found):
                    found = True
                if key in _LISTS and found is not True:
                    # the first as it is, so that one that cannot be read is not lost
                    some = takewhile(re.compile(r"[\w,]+$").match, words[at + 1 :])
                    found = " ".join(some) or after
                arguments[key] = found if is_run else f"{found} if $(...)"
    return arguments


def _value(after: str) -> str | bool:
    """Of a flag, given the next word; True if that is none of its own."""
    return True if not after or after.startswith("--") or "[@]}" in after else after


def _commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words of each command, without quotes, and whether it is always run."""
    depth, if_so = 0, False
    for words, after in _statements(_with_environment(re.sub(_HERE, "", text))):
        while words and words[0] in ("then", "else", "do"):
            words = words[1:]
        first = words[0] if words else ""
        depth -= first in ("fi", "done", "esac")
        yield words, depth <= 0 and not if_so
        depth += first in ("if", "for", "while", "until", "case", "select")
        if_so = after in ("&&", "||") and first in ("[", "[[", "test")


def _statements(text: str) -> Iterator[tuple[list[str], str]]:
    """Words, and what separates them from the next statement."""
    text = re.sub(r"\\[ \t]*\n", " ", text)
    text = re.sub(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`", "$?", text)
    parts = shlex.shlex(text.replace("\n", "\n;"), posix=True, punctuation_chars=";&|()")
    parts.whitespace_split = True
    words: list[str] = []
    try:
        for part in parts:
            if set(part) <= set(";&|()"):
                if separator := part.strip("()"):
                    yield words, separator
                    words = []
            else:
                plain = re.sub("[\"']", "", re.sub(r"^\w+\+?=", "", part))  # NAME="--flag ..."
                words += [word for word in plain.split() if word != ";"]
    except ValueError:  # a quote that is not closed
        words.append("--$")
    yield words, ""


def _with_environment(text: str) -> str:
    """With the values, or defaults, of variables that the script does not set."""
    own = {*re.findall(r"(?<!\w)([A-Za-z_]\w*)\+?=", text), *re.findall(r"\bfor (\w+)", text)}

    def known(found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[3]
        value = found[0] if default is None else default
        return found[0] if name in own else os.environ.get(name, value)

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^{}$]*))?\})", known, text)


def _key(flag: str) -> str:
    return flag.replace("-", "_").lower()
