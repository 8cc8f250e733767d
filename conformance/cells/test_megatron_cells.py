"""Megatron's tests of attention and of THD with other sizes, by its own test functions.

Attention at context parallelism 2, for two GPUs: its own cases need four. THD at context
parallelism 2 and 4 without tensor parallelism: its own have four and eight ranks.
"""

import os

import pytest
from tests.unit_tests.transformer import test_attention as attention
from tests.unit_tests.transformer import test_thd_correctness as thd

RANKS = int(os.environ["CONFORMANCE_RANKS"])
# name, hidden size, heads, KV heads, ffn, lengths: as in Megatron's own cases, but for TP
THD = (
    ("short_seqs", 1024, 16, 4, 4096, [17, 31, 11]),
    ("extreme_mixed", 4096, 32, 8, 14336, [4093, 127, 257]),
    ("cp4_sp", 4096, 64, 4, 12288, [2039, 1013, 509]),
    ("long_short_mix", 4096, 32, 8, 14336, [65535, 512, 1024]),
    ("longseq", 4096, 32, 8, 14336, [65536, 8191, 4096]),
)


@pytest.mark.parametrize("sequence_packing", [False, True])
@pytest.mark.parametrize("apply_rope_fusion", [False, True])
@pytest.mark.parametrize("qk_layernorm", [False, True])
@pytest.mark.parametrize("output_gate", [False, True])
def test_attention_at_two(
    tmp_path_dist_ckpt, sequence_packing, apply_rope_fusion, qk_layernorm, output_gate
):
    attention.test_parallel_attention_correctness(
        tmp_path_dist_ckpt, sequence_packing, apply_rope_fusion, tp=1, sp=False, cp=2,
        qk_layernorm=qk_layernorm, output_gate=output_gate,
    )  # fmt: skip


@pytest.mark.parametrize("case", THD, ids=lambda case: case[0])
def test_thd(case):
    thd.test_thd_format(thd.TestCase(*case, tp_size=1, cp_size=RANKS))
