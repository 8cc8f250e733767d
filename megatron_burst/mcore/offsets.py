"""Kernels of other packages that count elements in signed 32 bits: whether a run stays below.

Beyond 2^31 elements they read and write out of bounds, often without an error. Nothing here loads
these packages.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MOST = 1 << 31
_SCAN = (  # mamba_ssm's files
    "ssd_chunk_state", "ssd_chunk_scan", "ssd_combined", "ssd_bmm", "ssd_state_passing",
    "layernorm_gated",
)  # fmt: skip


def rope_fits(fused: bool | None, o: Any) -> bool:
    """Whether fused RoPE can count the elements of a rank's Q, K and V.

    Source: TransformerEngine (fused_rope.cu: `offset_block = s_id * stride_s_or_t`), and Megatron's
    Triton kernels of MLA with YaRN (fused_mla_yarn_rope_apply.py: `pid_m * stride_x_seq`).
    """
    sizes = ("seq_length", "micro_batch_size", "num_attention_heads", "kv_channels")
    if not fused or None in [getattr(o, name, None) for name in sizes]:
        return True  # before Megatron validates, sizes may be unknown
    rows = o.seq_length * o.micro_batch_size // o.context_parallel_size
    return rows * _rotated_width(o) <= _MOST


def _rotated_width(o: Any) -> int:
    """Elements of a row of the widest tensor that fused RoPE rotates in; 0: it rotates none."""
    heads, tp = o.num_attention_heads, o.tensor_model_parallel_size
    if o.multi_latent_attention:
        width = o.qk_head_dim + max(o.qk_pos_emb_head_dim, o.v_head_dim)
        return heads * width // tp if o.rope_type == "yarn" else 0
    if not _is_fused(o):
        return 0
    if o.qk_layernorm or getattr(o, "qk_l2_norm", False):  # they copy Q and K first
        return heads * o.kv_channels // tp
    groups = (o.num_query_groups if o.group_query_attention else None) or heads
    gates = heads if getattr(o, "attention_output_gate", False) else 0
    width = (heads + gates + 2 * groups) * o.kv_channels  # K lies between Q and V
    return width // tp if groups >= tp else width  # then Megatron gathers all of it


def _is_fused(o: Any) -> bool:
    """Whether Megatron calls the fused kernel: for other samples than packed ones not if positions
    differ between samples, or YaRN scales the result (core/models/common/embeddings/rope_utils.py:
    292)."""
    packed = getattr(o, "sft", False) or getattr(o, "dataloader_inter_document_masking", False)
    kind = o.position_embedding_type
    return kind == "rope" or (kind == "yarn" and packed) or (
        kind == "mrope" and (packed or o.micro_batch_size == 1))  # fmt: skip


def mamba_fits(state: int | None, o: Any) -> bool:
    """Whether Mamba's kernels can count what a rank projects of all rows of its heads.

    Source: mamba_ssm up to 2.3.2 (ssd_chunk_state.py: `pid_c * chunk_size * stride_dt_seqlen`,
    where the stride is z's, x's, B's, C's and dt's together, unless --disable-mamba-mem-eff-path
    copies them), state-spaces/mamba issue 1015. causal_conv1d counts that stride in unsigned 32.
    """
    names = "seq_length micro_batch_size mamba_head_dim mamba_num_groups".split()
    rows, batch, dim, groups = (getattr(o, name, None) for name in names)
    hidden, heads = getattr(o, "hidden_size", None), getattr(o, "mamba_num_heads", None)
    heads = heads or (2 * hidden // dim if hidden and dim else None)
    if not _has_mamba(o) or None in (rows, batch, dim, groups, heads, state):
        return True  # before Megatron validates, sizes may be unknown
    ranks = o.tensor_model_parallel_size * o.context_parallel_size
    groups = max(1, groups // ranks)  # of more ranks than groups each has a copy of one
    elements = rows * batch * (heads // ranks * (2 * dim + 1) + 2 * groups * state)
    return elements <= _MOST or (elements <= 2 * _MOST and _scans_in_64_bits())


def _has_mamba(o: Any) -> bool:
    patterns = [getattr(o, f"hybrid_{name}_pattern", None) for name in ("layer", "override")]
    if any(patterns):
        return any("M" in pattern for pattern in patterns if pattern)
    return getattr(o, "is_hybrid_model", False)  # 0.16 builds hybrids of a ratio alone


@cache
def _scans_in_64_bits() -> bool:
    """Whether each kernel of the installed mamba_ssm's scan, and of the norm behind it, has a cast
    to 64 bits."""
    spec = find_spec("mamba_ssm")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0]) / "ops" / "triton"
    files = [folder / f"{name}.py" for name in _SCAN]
    kernels = [f.read_text().split("@triton.jit")[1:] if f.exists() else [] for f in files]
    return all(kernels) and all("int64" in kernel for file in kernels for kernel in file)
