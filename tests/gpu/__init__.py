"""Tests that need CUDA GPUs.

Where there are fewer GPUs than ranks, ranks share them (see `tests/ranks.py`): that is right for
correctness, never for times. Each of them then counts as a node of its own unless a test passes
`nodes`.
"""

from importlib.util import find_spec

import pytest
import torch

GPUS = torch.cuda.device_count()
if GPUS:
    from tests.gpu import compiling

    compiling.in_triton()
    compiling.in_flash_attention()
RANKS = max(GPUS, 4) if GPUS else 1  # as many as tests run with
SEVERAL = 4 if GPUS >= 4 else 2  # ranks of a test that can have any number


def needs_gpus(count: int = 1):
    """The mark of a test that needs this many GPUs, not only ranks."""
    reason = f"needs {count} CUDA GPU{'s' * (count > 1)}, found {GPUS}"
    return pytest.mark.skipif(count > GPUS, reason=reason)


def needs_transformer_engine():
    """The mark of a test whose ranks import TransformerEngine. It is not imported here: after a
    call of cuDNN it may find other libraries of cuDNN than torch did."""
    missing = find_spec("transformer_engine") is None
    return pytest.mark.skipif(missing, reason="TransformerEngine is not installed")
