"""Tests that share a GPU leave it as they find it, and what one compiles the others find."""

import os
from pathlib import Path

import pytest
import torch

_COMPILED = Path(__file__).parents[2] / ".cache" / "flash-attn-4"
# FlashAttention-4 compiles each variant for seconds, in each process without this
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_COMPILED))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadscope`, one worker runs all tests of a module that starts ranks, which share
    processes; other tests run wherever there is time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRanks(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return path if "run_ranks" in (config.rootpath / path).read_text() else nodeid

    return ByRanks(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(autouse=True)
def no_idle_memory():
    """Frees what a test leaves in torch's cache of this process."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
