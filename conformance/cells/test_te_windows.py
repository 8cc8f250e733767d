"""Windows where TransformerEngine's program skips them for p2p, which has none: its own runner and
its own reference, with burst in the place of p2p."""

import pytest
from test_attention_with_cp import _submit, cp_pool, model_configs_fused_attn  # noqa: F401

WINDOWS = ("cp_1_5", "cp_2_1", "cp_2_6")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "thd", "bshd"])
@pytest.mark.parametrize("model", WINDOWS)
def test_windows_in_place_of_p2p(cp_pool, model, qkv_format, dtype):  # noqa: F811
    assert model_configs_fused_attn[model].window_size[0] > 0
    _submit(
        cp_pool(2), dtype=dtype, model=model, qkv_format=qkv_format, cp_comm_type="p2p",
        kernel_backend="FusedAttention", fp8_bwd=False, fp8_dpa=False, fp8_mha=False,
        scaling_mode=None, f16_O=True, is_training=True, deterministic=False, log_level="WARNING",
    )  # fmt: skip
