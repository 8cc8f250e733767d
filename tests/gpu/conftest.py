"""Tests that share a GPU leave it as they find it, and what one compiles the others find."""

import os
from pathlib import Path

import pytest
import torch

_COMPILED = Path(__file__).parents[2] / ".cache" / "flash-attn-4"
# FlashAttention-4 compiles each variant for seconds, in each process without this
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_COMPILED))


@pytest.fixture(autouse=True)
def no_idle_memory():
    """Frees what a test leaves in torch's cache of this process."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
