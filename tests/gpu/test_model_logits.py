"""Logits of transformers' models over two ranks of burst on GPUs, with TransformerEngine's layers.

The models are tiny and random. Megatron-Bridge converted them elsewhere, into files in the folder
that MODEL_LOGITS names (`tests/integrations/export_logits.py`). Guards against a kernel, or a layer
that only GPUs have, that computes another model than transformers does.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu import needs_gpus, needs_transformer_engine
from tests.ranks import run_ranks

FOLDER = os.environ.get("MODEL_LOGITS", "")
FILES = sorted(Path(FOLDER).glob("*.pt")) if FOLDER else []
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
    needs_transformer_engine(),
    pytest.mark.skipif(
        not FILES, reason=f"MODEL_LOGITS={FOLDER} names no folder of models to compare"
    ),
]
# TransformerEngine multiplies float32 in TF32, 1e-3 off, and has no setting; NVIDIA's libraries do.
EXACT = dict(NVIDIA_TF32_OVERRIDE="0")
CASES = {
    "float32": (torch.float32, "triton", EXACT),
    "bf16, auto": (torch.bfloat16, "auto", {}),
    "bf16, triton": (torch.bfloat16, "triton", {}),
}


def all_errors(rank: int, dtype: torch.dtype, backend: str) -> dict[str, tuple]:
    """By model: largest and median error of a rank's tokens, transformers' median in bf16, and
    core attentions."""
    from benchmarks.stack import start
    from tests.mcore.exported import errors_of

    start(False, 2)
    found = {}
    for path in FILES:
        name, bf16 = (torch.load(path, weights_only=False)[key] for key in ("name", "bf16"))
        errors, cores = errors_of(path, dtype, backend)
        found[name] = float(errors.max()), float(errors.median()), bf16, cores
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    """In float32 to some hundred roundings of 6e-8. In bf16 the median token is at most 1.5 times
    as far off as in transformers' own bf16; the largest error is of a token that a router sends to
    another expert."""
    dtype, backend, environment = CASES[case]
    every = run_ranks(
        all_errors, 2, dtype, backend, backend="nccl", environment=environment, fresh=True
    )
    for name in every[0]:
        found = [ranks[name] for ranks in every]
        most, middle = (max(one[place] for one in found) for place in (0, 1))
        bf16, cores = found[0][2:]
        print(f"{name}, {case}: largest {most:.1e}, median {middle:.1e}; "
              f"transformers' bf16: median {bf16:.1e}")  # fmt: skip
    for name in every[0]:
        for most, middle, bf16, cores in (ranks[name] for ranks in every):
            assert cores == {"BurstTECoreAttention"}, (name, cores)
            assert (most <= 1e-5) if dtype is torch.float32 else (middle <= 1.5 * bf16), name
