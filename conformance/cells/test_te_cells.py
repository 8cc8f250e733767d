"""Cells that TransformerEngine's program skips, by its own runner against its own reference.

Windows: its p2p has none. Documents: before it runs THD it asks for a kernel of causal padding that
is aligned to the bottom right, which neither its reference nor burst needs, and skips without.
Four ranks: it has them in a2a+p2p only, which is all that it runs with them.
"""

import os
from itertools import product

import pytest
from test_attention_with_cp import _submit, cp_pool, model_configs_fused_attn  # noqa: F401

WINDOWS = ("cp_1_5", "cp_2_1", "cp_2_6")
CAUSAL = ("cp_2_0", "cp_4_0", "cp_3_0")  # grouped heads, and MLA
WAYS = ("p2p", "all_gather", "a2a")
RANKS = int(os.environ["CONFORMANCE_RANKS"])
# over several nodes only an all-to-all has windows in documents; for p2p burst chooses
ONE_NODE = "CONFORMANCE_NODES" not in os.environ
WINDOWED = WAYS if RANKS == 2 and ONE_NODE else ("p2p", "a2a")
if RANKS == 2:
    DTYPES, FORMATS = ("bf16", "fp16"), ("sbhd", "bshd")
    ONE_SEQUENCE = list(product(["p2p"], WINDOWS))
    DOCUMENTS = [*product(WAYS, CAUSAL), *product(WINDOWED, WINDOWS)]
else:  # what differs from two ranks are the programs, not dtypes and formats
    DTYPES, FORMATS = ("bf16",), ("sbhd",)
    ONE_SEQUENCE = [*product(WAYS, [*CAUSAL, *WINDOWS]), *product(["a2a+p2p"], WINDOWS)]
    DOCUMENTS = [*product([*WAYS, "a2a+p2p"], CAUSAL), *product(WINDOWED, WINDOWS)]


def submit(pool, **case) -> None:
    """Run a case: bf16 or fp16 attention by TransformerEngine's cuDNN kernels."""
    _submit(
        pool, **case, kernel_backend="FusedAttention", fp8_bwd=False, fp8_dpa=False, fp8_mha=False,
        scaling_mode=None, f16_O=True, is_training=True, deterministic=False, log_level="WARNING",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qkv_format", FORMATS)
@pytest.mark.parametrize(("cp_comm_type", "model"), ONE_SEQUENCE)
def test_one_sequence(cp_pool, cp_comm_type, model, qkv_format, dtype):  # noqa: F811
    assert (model in WINDOWS) == (model_configs_fused_attn[model].window_size[0] > 0)
    case = {"dtype": dtype, "model": model, "qkv_format": qkv_format}
    submit(cp_pool(RANKS), **case, cp_comm_type=cp_comm_type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cp_comm_type", "model"), DOCUMENTS)
def test_documents(cp_pool, cp_comm_type, model, dtype):  # noqa: F811
    case = {"dtype": dtype, "model": model, "qkv_format": "thd"}
    submit(cp_pool(RANKS), **case, cp_comm_type=cp_comm_type)
