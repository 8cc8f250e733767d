"""Models by name, from Hugging Face's config.json, or from Megatron's arguments."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError, nearest
from megatron_burst.files import Reader, excerpt
from megatron_burst.tools.job.hugging_face import PRESETS, from_hugging_face, preset_name
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.model import Model

_HUB = "hf:"
_DUMPED = "megatron_arguments"  # the key of that file
_LISTS = ("recompute_modules",)  # flags with several values, here words of one text
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_CONFIG, _ARGUMENTS, _REVISION = 4 << 20, 64 << 10, 1 << 10  # bytes of a file


def model_of(name_or_path: str) -> Model:
    """A preset by name, else the model that a file describes.

    Args:
        name_or_path: one of `PRESETS`; hf:ORG/NAME, which the local cache must have; a config.json
            or its folder; or a file with Megatron's arguments, as --burst-dump-args writes them or
            as lines of `--flag value`.

    Raises:
        BurstError: if it is none of them, or the file lacks something.
    """
    if preset := preset_name(name_or_path):
        return PRESETS[preset]
    on_hub = name_or_path.startswith(_HUB)
    path = _cached_config(name_or_path) if on_hub else Path(name_or_path)
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path):
        close = _near(name_or_path.lower().rpartition("/")[2])
        raise BurstError(
            "plan: MODEL must be a preset or a file, because the planner needs its sizes; got "
            f"{excerpt(name_or_path)!r}{close}; choose one of those that plan --help lists, "
            "hf:ORG/NAME, a config.json or its folder, or a file of Megatron's arguments"
        )
    arguments = arguments_of(path)
    if arguments is not None:
        return from_megatron(arguments, str(path))
    return from_hugging_face(_config(path), name_or_path)


def _near(name: str) -> str:
    """ ", did you mean ...?" with a preset of the same family and version, or nothing."""
    letters, version = _family(name)
    same = (preset for preset in PRESETS if version in ("", _family(preset)[1]))
    return nearest(name, [one for one in same if get_close_matches(letters, [_family(one)[0]])])


def _family(name: str) -> tuple[str, str]:
    """("qwen", "3") of "qwen3-8b"; a number of weights is no version."""
    match = re.match(r"([a-z]*)[-_]?v?(\d+(?:\.\d+)?(?![\d.]*b))?", name)
    return (match[1], match[2] or "") if match else ("", "")


def _cached_config(name: str) -> Path:
    """The config.json of hf:ORG/NAME, or of hf:ORG/NAME@REVISION, in the local cache.

    Source of its location: huggingface_hub/constants.py, HF_HUB_CACHE.
    """
    usual = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{usual}/huggingface")
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    cache = os.environ.get("HF_HUB_CACHE", cache)
    repository, _, revision = name.removeprefix(_HUB).partition("@")
    folder = Path(cache).expanduser() / f"models--{repository.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = revision or "main"
    if os.path.isfile(reference):
        commit = _reader(reference, most=_REVISION).text().strip()
    path = folder / "snapshots" / commit / "config.json"
    if not repository:
        raise BurstError(
            "plan: hf: must be followed by a name, because the cache lists models by name; got "
            f"{name!r}; write e.g. hf:Qwen/Qwen3-8B"
        )
    if not os.path.isfile(path):
        raise BurstError(
            f"plan: {name} must be in the local cache, because nothing is downloaded here; got no "
            f"{path}; run: hf download {repository} config.json"
        )
    return path


def arguments_of(path: Path) -> dict[str, Any] | None:
    """What a file of Megatron's arguments has; None of a config.json.

    Raises:
        BurstError: if it cannot be read, or is neither, as a shell script or YAML is.
    """
    if path.suffix == ".json":
        return _arguments_in_json(_config(path))
    reader = _reader(path, most=_ARGUMENTS)
    text = reader.text(errors="replace")
    if f'"{_DUMPED}"' in text:
        return _arguments_in_json(reader.json(text))
    try:
        return megatron_arguments(text)
    except ValueError as error:
        change = "start the job once with --burst-dump-args args.json, and plan args.json"
        other = replace(reader, why="shell scripts and YAML are not read", change=change)
        must = "be a config.json, what --burst-dump-args wrote, or lines of --flag value"
        raise other.refusal(must, str(error)) from None


def megatron_arguments(text: str) -> dict[str, Any]:
    """Arguments in lines of `--flag value`, dashes as underscores; a flag without a value is True,
    and several values are words of one text. Quotes, comments and a backslash at the end of a line
    are a shell's.

    Raises:
        ValueError: of the first line that is anything else, as in a shell script or YAML.
    """
    arguments: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:  # a quote that is not closed
            words = [""]
        if "$" in line or "`" in line or not all(map(_FLAG.fullmatch, words[:1])):
            raise ValueError(line)
        for word in words:
            if flag := _FLAG.fullmatch(word):
                name = flag[1].replace("-", "_").lower()
                arguments[name] = True if flag[2] is None else flag[2]
            else:
                before = arguments[name]
                arguments[name] = word if before is True else f"{before} {word}"
    return arguments


def _arguments_in_json(data: Any) -> dict[str, Any] | None:
    """What --burst-dump-args wrote, as words; None if it is anything else."""
    arguments = data.get(_DUMPED) if isinstance(data, dict) else None
    if not isinstance(arguments, dict):
        return None
    lists = {
        name: " ".join(map(str, arguments[name]))
        for name in _LISTS
        if type(arguments.get(name)) is list
    }
    values = {name: value for name, value in arguments.items() if value is not None} | lists
    return {name: v if isinstance(v, bool) else str(v) for name, v in values.items()}


def _config(path: Path) -> dict[str, Any]:
    reader = _reader(path)
    config: dict[str, Any] = reader.typed(Mapping[str, Any], reader.json())
    return config


def _reader(path: Path, most: int = _CONFIG) -> Reader:
    change = "name a model's config.json, a file of Megatron's arguments, or a preset"
    return Reader("plan", str(path), "a model's sizes are read from it", change, most)
