"""TransformerEngine's context-parallel attention, as Megatron-Core uses it."""

import importlib
from functools import cached_property
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megatron_burst.tools.world import World

MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")


class TransformerEngine:
    """DotProductAttention over all ranks, with a mode as its `cp_comm_type`."""

    def __init__(self, mode: str, world: World) -> None:
        self.mode, self.world = mode, world
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

    def refusal(self, heads_kv: int) -> str | None:
        """Why it cannot run with this many KV heads, or None."""
        size, rows = self.world.size, self.rows
        if self.missing:
            return self.missing
        if self.mode == "a2a+p2p" and (size % rows or size == rows):
            return f"a2a+p2p needs {rows} rows of equally many ranks, 2 or more; got {size} ranks"
        sharing = {"a2a": size, "a2a+p2p": size // rows}.get(self.mode, 1)
        if heads_kv % sharing:
            return f"{self.mode} shards KV heads over {sharing} ranks; got {heads_kv}"
        return None

    def prepare(self, heads: tuple[int, int], dims: tuple[int, int], causal: bool) -> None:
        """Set it up for query and KV heads, head dimensions of q, k and of v, and a mask; all
        ranks."""
        from transformer_engine.pytorch import DotProductAttention

        self.attention = DotProductAttention(
            num_attention_heads=heads[0], kv_channels=dims, num_gqa_groups=heads[1],
            attention_dropout=0.0, qkv_format="sbhd",
            attn_mask_type="causal" if causal else "no_mask",
        )  # fmt: skip
        ranks = dist.get_process_group_ranks(self.world.group)
        groups, stream = self._made_once
        self.attention.set_context_parallel_group(groups, ranks, stream, self.mode)

    @cached_property
    def _made_once(self) -> tuple[object, torch.cuda.Stream]:
        """Its process group or groups, and its stream."""
        stream = torch.cuda.Stream(self.world.device)
        if self.mode != "a2a+p2p":
            return self.world.group, stream
        shape = (self.rows, self.world.size // self.rows)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("p2p", "a2a"))
        return [mesh.get_group("a2a"), mesh.get_group("p2p")], stream

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """The output of this rank's rows, [s_local, b, h * d_v]; options apply to this call."""
        return self.attention(q, k, v, **options)
