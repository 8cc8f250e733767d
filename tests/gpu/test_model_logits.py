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
        try:
            errors, cores = errors_of(path, dtype, backend)
        except Exception as error:  # so that one model does not hide the others
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = float(errors.max()), float(errors.median()), bf16, cores
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    """In float32 to some hundred roundings of 6e-8. In bf16 the median token is at most 1.5 times
    as far off as in transformers' own bf16; a token that a router sends to
    another expert is farther off."""
    dtype, backend, environment = CASES[case]
    every = run_ranks(
        all_errors,
        2,
        dtype,
        backend,
        backend="nccl",
        environment=environment,
        fresh=True,
        timeout_s=500,
    )
    wrong = [f"{name}: {got}" for name, got in every[0].items() if isinstance(got, str)]
    for name in every[0].keys() - {text.partition(":")[0] for text in wrong}:
        most, middle = (max(ranks[name][place] for ranks in every) for place in (0, 1))
        *_, bf16, cores = every[0][name]
        print(f"{name}, {case}: largest {most:.1e}, median {middle:.1e}; "
              f"transformers' bf16: median {bf16:.1e}")  # fmt: skip
        right = (most <= 1e-5) if dtype is torch.float32 else (middle <= 1.5 * bf16)
        if not right or cores != {"BurstTECoreAttention"}:
            wrong.append(f"{name}: {most}, {middle}, {cores}")
    assert not wrong, wrong
