"""TransformerEngine's context-parallel attention, as Megatron-Core uses it, as a peer."""

import importlib
import sys
from functools import cached_property
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Case
from benchmarks.impls import Impl
from benchmarks.peers import Autograd, Shard
from megatron_burst.tools.world import World


class TransformerEngine(Autograd):
    """DotProductAttention over all ranks; `impl.mode` is its `cp_comm_type`."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.rows = max(2, world.nodes)  # of ranks with an all-to-all: nodes, or halves of one
        self.attention: torch.nn.Module | None = None
        self.missing = ""
        if find_spec("transformer_engine") is None:
            self.missing = (
                "TransformerEngine is not installed; pip install --no-build-isolation -e '.[te]' "
                "in megatron_burst's checkout"
            )
        elif world.device.type != "cuda":
            self.missing = "TransformerEngine runs on CUDA only"
        else:
            importlib.import_module("transformer_engine.pytorch")

    def refusal(self, case: Case) -> str | None:
        size, rows, mode = self.world.size, self.rows, self.impl.mode
        if self.missing:
            return self.missing
        if mode == "a2a+p2p" and (size % rows or size == rows):
            return f"a2a+p2p needs {rows} rows of equally many ranks, 2 or more; got {size} ranks"
        sharing = {"a2a": size, "a2a+p2p": size // rows}.get(mode, 1)
        if case.heads_kv % sharing:
            return f"{mode} shards KV heads over {sharing} ranks; got {case.heads_kv}"
        return None

    def prepare(self, shard: Shard) -> None:
        super().prepare(shard)
        self.set_up(shard.case, shard.case.mask == "causal")

    def set_up(self, case: Case, causal: bool) -> None:
        """Make its module for a problem; all ranks together."""
        from transformer_engine.pytorch import DotProductAttention

        self.note = ""
        self.attention = DotProductAttention(
            num_attention_heads=case.heads_q, kv_channels=(case.head_dim_qk, case.head_dim_v),
            num_gqa_groups=case.heads_kv, attention_dropout=0.0, qkv_format="sbhd",
            attn_mask_type="causal" if causal else "no_mask",
        )  # fmt: skip
        ranks = dist.get_process_group_ranks(self.world.group)
        groups, stream = self._made_once
        self.attention.set_context_parallel_group(groups, ranks, stream, self.impl.mode)

    @cached_property
    def _made_once(self) -> tuple[object, torch.cuda.Stream]:
        """Its process group or groups, and its stream."""
        stream = torch.cuda.Stream(self.world.device)
        if self.impl.mode != "a2a+p2p":
            return self.world.group, stream
        shape = (self.rows, self.world.size // self.rows)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("p2p", "a2a"))
        return [mesh.get_group("a2a"), mesh.get_group("p2p")], stream

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        out = self.attention(q, k, v, **options)
        self.note = self.note or f"kernel {_chosen_kernel()}"
        return out

    def release(self) -> None:
        super().release()
        self.attention = None


def _chosen_kernel() -> str:
    """The kernel that the last call used, as in its own debug output."""
    module = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    chosen = getattr(sys.modules.get(module), "_attention_backends", {})
    if chosen.get("use_flash_attention"):
        return f"FlashAttention {chosen['flash_attention_backend']}"
    if chosen.get("use_fused_attention"):
        return f"cuDNN (sub-backend {int(chosen['fused_attention_backend'])})"
    return "unfused" if chosen.get("use_unfused_attention") else "unknown"
