"""TransformerEngine's context-parallel attention as a peer."""

import sys

from torch import Tensor

from benchmarks import te
from benchmarks.cases import Case
from benchmarks.impls import Impl
from benchmarks.peers import Autograd, Shard
from megatron_burst.tools.world import World


class TransformerEngine(Autograd):
    """TransformerEngine's; `impl.mode` is its cp_comm_type."""

    def __init__(self, impl: Impl, world: World) -> None:
        super().__init__(impl, world)
        self.attention = te.TransformerEngine(impl.mode, world)

    def refusal(self, case: Case) -> str | None:
        return self.attention.refusal(case.heads_kv)

    def prepare(self, shard: Shard) -> None:
        super().prepare(shard)
        self.note, case = "", shard.case
        dims = case.head_dim_qk, case.head_dim_v
        self.attention.prepare((case.heads_q, case.heads_kv), dims, case.mask == "causal")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.attention(q, k, v)
        self.note = self.note or self.kernel_note()
        return out

    @staticmethod
    def kernel_note() -> str:
        """Names the kernel that the last call used."""
        return f"kernel {_chosen_kernel()}"

    def release(self) -> None:
        super().release()
        self.attention.attention = None


def _chosen_kernel() -> str:
    """The kernel that the last call used, as in its own debug output."""
    module = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    chosen = getattr(sys.modules.get(module), "_attention_backends", {})
    if chosen.get("use_flash_attention"):
        return f"FlashAttention {chosen['flash_attention_backend']}"
    if chosen.get("use_fused_attention"):
        return f"cuDNN (sub-backend {int(chosen['fused_attention_backend'])})"
    return "unfused" if chosen.get("use_unfused_attention") else "unknown"
