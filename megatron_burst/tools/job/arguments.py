"""Megatron's arguments in a text: a shell script, or YAML."""

import re
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from megatron_burst.tools.job.shell import expanded

_LISTS = ("recompute_modules",)  # flags with several values, here words of one text
_SWITCHES = {  # flags without a value that plans depend on
    "sft", "swiglu", "group_query_attention", "multi_latent_attention", "recompute_activations",
    "untie_embeddings_and_output_weights", "reset_attention_mask", "disable_bias_linear",
    "bf16", "fp16",
    "dataloader_inter_document_masking",
}  # fmt: skip
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_ABSENT = ("", "null", "~")
_YAML_KEY = r"^[ \t]*-{0,2}([A-Za-z][\w-]*)[ \t]*:"


def megatron_arguments(text: str, folder: Path | None = None) -> dict[str, Any]:
    """Arguments in a text, dashes as underscores; a flag without a value is True.

    Understood are `--flag value` anywhere on a line or on continued lines (shell scripts, arrays,
    quotes, comments, variables: `shell.expanded`; `folder`: the script's, for those it sources) and
    YAML lines `flag: value`, with or without dashes and indentation; of YAML lists in brackets and
    with an item a line, truths and null, which is left out.
    """
    if re.search(r"^\s*--[\w-]+:\s", text, re.MULTILINE):
        return _yaml(text)
    found = _shell(expanded(text, folder)) if _is_shell(text) else {}
    return found or _yaml(text)


def _is_shell(text: str) -> bool:
    return bool(re.search(r"(^|[\s(\"'])--[a-z]|^\s*(source|\.)\s", text, re.MULTILINE))


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
    arguments: dict[str, Any] = {}
    value: str | bool
    for line in text.splitlines():
        line = re.sub(r"(^|\s)\w+\+?=(?=\(?[\"']?\s*(--|$))", " ", line)  # NAME="--flag ...
        words = [word for word in re.sub("[\"']", "", line).split() if word not in "()"]
        for at, (word, after) in enumerate(pairwise([*words, ""])):
            flag, equals, text = word.lstrip("(").partition("=")
            if flag.startswith("--"):
                key, value = _key(flag.lstrip("-").rstrip(")")), text
                if not equals:
                    alone = not after or after.startswith("--") or "[@]}" in after
                    alone = alone or (key in _SWITCHES and "$" in after)
                    value = True if alone else after if "(" in after else after.rstrip(")")
                if key in _LISTS and value is not True:
                    some = (one.rstrip(")") for one in words[at + 1 :])
                    # the first as it is, so that one that cannot be read is not lost
                    value = " ".join(takewhile(re.compile(r"[\w,]+$").match, some)) or after
                arguments[key] = value
    return arguments


def _key(flag: str) -> str:
    return flag.replace("-", "_").lower()
