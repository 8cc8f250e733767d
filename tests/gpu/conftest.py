"""Tests that share a GPU leave it as they find it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_idle_memory():
    """Frees what a test leaves in torch's cache of this process."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
