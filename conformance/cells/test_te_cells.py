"""Cells that TransformerEngine's program skips, by its own runner against its own reference.

Windows: its p2p has none. Documents: before it runs THD it asks for a kernel of causal padding that
is aligned to the bottom right, which neither its reference nor burst needs, and skips without.
"""

import pytest
from test_attention_with_cp import _submit, cp_pool, model_configs_fused_attn  # noqa: F401

WINDOWS = ("cp_1_5", "cp_2_1", "cp_2_6")
CAUSAL = ("cp_2_0", "cp_4_0", "cp_3_0")  # grouped heads, and MLA


def submit(pool, **case) -> None:
    """Run a case on two GPUs: bf16 or fp16 attention by TransformerEngine's cuDNN kernels."""
    _submit(
        pool, **case, kernel_backend="FusedAttention", fp8_bwd=False, fp8_dpa=False, fp8_mha=False,
        scaling_mode=None, f16_O=True, is_training=True, deterministic=False, log_level="WARNING",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("model", WINDOWS)
def test_windows_in_place_of_p2p(cp_pool, model, qkv_format, dtype):  # noqa: F811
    assert model_configs_fused_attn[model].window_size[0] > 0
    submit(cp_pool(2), dtype=dtype, model=model, qkv_format=qkv_format, cp_comm_type="p2p")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("model", [*WINDOWS, *CAUSAL])
def test_documents(cp_pool, model, cp_comm_type, dtype):  # noqa: F811
    submit(cp_pool(2), dtype=dtype, model=model, qkv_format="thd", cp_comm_type=cp_comm_type)
