"""Models by name, from Hugging Face's config.json, or from Megatron's arguments."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_burst.errors import BurstError, nearest
from megatron_burst.tools.job.arguments import DUMPED, megatron_arguments
from megatron_burst.tools.job.hugging_face import PRESETS, from_hugging_face, preset_name
from megatron_burst.tools.job.megatron import from_megatron
from megatron_burst.tools.job.model import Model

_HUB = "hf:"


def model_of(name_or_path: str) -> Model:
    """A preset by name, else the model that a file describes.

    Args:
        name_or_path: one of `PRESETS`; hf:ORG/NAME, which the local cache must have; a config.json
            or its folder; or a file with Megatron's arguments, as --burst-dump-args writes them, as
            `--flag value` text (a shell script) or as YAML (`flag: value`).

    Raises:
        BurstError: if it is none of them, or the file lacks something.
    """
    if preset := preset_name(name_or_path):
        return PRESETS[preset]
    on_hub = name_or_path.startswith(_HUB)
    path = _cached_config(name_or_path) if on_hub else Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        close = nearest(name_or_path.lower().rpartition("/")[2], PRESETS)
        raise BurstError(
            "plan: MODEL must be a preset or a file, because sizes come from there; got "
            f"{name_or_path!r}{close}; choose one of those that plan --help lists, hf:ORG/NAME, "
            "a config.json or its folder, or a file of Megatron's arguments"
        )
    text = text_of(path)
    if path.suffix == ".json" and DUMPED not in _json(text, path):
        return from_hugging_face(_json(text, path), name_or_path)
    return from_megatron(megatron_arguments(text), str(path))


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
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    path = folder / "snapshots" / commit / "config.json"
    if not repository:
        raise BurstError(
            "plan: hf: must be followed by a name, because the cache has models by name; got "
            f"{name!r}; write e.g. hf:Qwen/Qwen3-8B"
        )
    if not path.is_file():
        raise BurstError(
            f"plan: {name} must be in the local cache, because nothing is downloaded here; got no "
            f"{path}; run: hf download {repository} config.json"
        )
    return path


def text_of(path: Path) -> str:
    """The text of a model's file; bytes that are not UTF-8, as in old comments, are replaced.

    Raises:
        BurstError: if it cannot be read, or is a binary file.
    """
    try:
        data, got = path.read_bytes(), "a binary file"
    except OSError as error:
        data, got = b"\0", error.strerror or str(error)
    if b"\0" in data:
        raise BurstError(
            "plan: MODEL must name a text file, because sizes are read from its words; got "
            f"{path}: {got}; name a config.json, a file of Megatron's arguments, or a preset"
        )
    return data.decode(errors="replace")


def _json(text: str, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
        got = f"a {type(found).__name__}"
    except json.JSONDecodeError as error:
        found, got = None, str(error)
    if not isinstance(found, dict):
        raise BurstError(
            f"plan: {path} must hold a JSON object, because it is read as a Hugging Face config; "
            f"got: {got}; name a model's config.json"
        )
    return found
