"""TransformerEngine's context-parallel attention, as Megatron-Core uses it."""

import importlib
import os
import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megatron_burst.cli.cases import Case
from megatron_burst.cli.impls import Impl
from megatron_burst.cli.peers import Autograd, Shard
from megatron_burst.cli.world import World


class TransformerEngine(Autograd):
    """DotProductAttention; `impl.mode` is its cp_comm_type."""

    attention: torch.nn.Module | None = None

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        if not self._missing:
            _prefer_torchs_cudnn()
            # a cuDNN that is not torch's must be loaded first
            importlib.import_module("transformer_engine.pytorch")

    @property
    def _missing(self) -> str | None:
        if find_spec("transformer_engine") is None:
            return (
                "TransformerEngine is not installed; pip install --no-build-isolation -e '.[te]' "
                "in megatron_burst's checkout"
            )
        if self.world.device.type != "cuda":
            return "TransformerEngine runs on CUDA only"
        return None

    def refusal(self, case: Case) -> str | None:
        if self._missing:
            return self._missing
        size, rows = self.world.size, self._rows
        if self.impl.mode == "a2a+p2p" and (size % rows or size == rows):
            return f"a2a+p2p needs {rows} rows of equally many ranks, 2 or more; got {size} ranks"
        exchanging = {"a2a": size, "a2a+p2p": size // rows}.get(self.impl.mode, 1)
        if case.heads_kv % exchanging:
            return (
                f"{self.impl.mode} deals key heads out over {exchanging} ranks; got {case.heads_kv}"
            )
        return None

    @property
    def _rows(self) -> int:
        """Rows of ranks that exchange heads: hosts, or halves of one host."""
        return max(2, self.world.hosts)

    @cached_property
    def _groups(self) -> dist.ProcessGroup | list[dist.ProcessGroup]:
        if self.impl.mode != "a2a+p2p":
            return self.world.group
        shape = (self._rows, self.world.size // self._rows)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("p2p", "a2a"))
        return [mesh.get_group("a2a"), mesh.get_group("p2p")]

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.world.device)

    def prepare(self, shard: Shard) -> None:
        from transformer_engine.pytorch import DotProductAttention

        super().prepare(shard)
        self.note, case = "", shard.case
        self.attention = DotProductAttention(
            num_attention_heads=case.heads_q,
            kv_channels=(case.head_dim_qk, case.head_dim_v),
            num_gqa_groups=case.heads_kv,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal" if case.mask == "causal" else "no_mask",
        )
        ranks = dist.get_process_group_ranks(self.world.group)
        self.attention.set_context_parallel_group(self._groups, ranks, self._stream, self.impl.mode)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.attention(q, k, v)
        self.note = self.note or f"kernel {_chosen_kernel()}"
        return out

    def release(self) -> None:
        super().release()
        self.attention = None


def _prefer_torchs_cudnn() -> None:
    """Have TransformerEngine load the cuDNN that torch brings, unless a variable names another.

    By itself it takes the system's, which may be older. Its own look-up reads CUDNN_HOME first
    (transformer_engine/common/__init__.py, 2.20.2).
    """
    folder = Path(torch.__file__).parents[1] / "nvidia" / "cudnn"
    if folder.is_dir() and "CUDNN_PATH" not in os.environ:
        os.environ.setdefault("CUDNN_HOME", str(folder))


def _chosen_kernel() -> str:
    """Which of its kernels the last call took, as its own debug output would say."""
    module = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    chosen = getattr(sys.modules.get(module), "_attention_backends", {})
    if chosen.get("use_flash_attention"):
        return f"FlashAttention {chosen['flash_attention_backend']}"
    if chosen.get("use_fused_attention"):
        return f"cuDNN (sub-backend {int(chosen['fused_attention_backend'])})"
    return "unfused" if chosen.get("use_unfused_attention") else "unknown"
