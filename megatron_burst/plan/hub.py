"""Configs of models that a local Hugging Face cache has; nothing is ever downloaded."""

import os
from pathlib import Path

from megatron_burst.errors import BurstError

_PREFIX = "hf:"


def is_on_hub(name: str) -> bool:
    """Whether a model is named as hf:ORG/NAME."""
    return name.startswith(_PREFIX)


def cached_config(name: str) -> Path:
    """The config.json of hf:ORG/NAME, or of hf:ORG/NAME@REVISION, in the cache.

    Raises:
        BurstError: if the cache does not have it.
    """
    repository, _, revision = name.removeprefix(_PREFIX).partition("@")
    folder = _cache() / f"models--{repository.replace('/', '--')}"
    revision = revision or "main"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    path = folder / "snapshots" / commit / "config.json"
    if not path.is_file():
        raise BurstError(
            f"plan: {name} must be in the local cache, because nothing is downloaded here; got no "
            f"{path}; run: hf download {repository} config.json"
        )
    return path


def _cache() -> Path:
    """Where huggingface_hub keeps what it downloads.

    Source: huggingface_hub/constants.py, HF_HUB_CACHE.
    """
    usual = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{usual}/huggingface")
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")
    return Path(os.environ.get("HF_HUB_CACHE", cache)).expanduser()
