"""TransformerEngine's context-parallel attention, as Megatron-Core uses it."""

import importlib
import os
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megatron_burst.cli.world import World

MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")


class TransformerEngine:
    """DotProductAttention over all ranks.

    Args:
        mode: its `cp_comm_type`.
        world: all ranks.
    """

    def __init__(self, mode: str, world: World) -> None:
        self.mode, self.world = mode, world
        self.attention: torch.nn.Module | None = None
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

    def refusal(self, heads_kv: int) -> str | None:
        """Why it cannot run with so many KV heads, or None."""
        if self._missing:
            return self._missing
        size, rows = self.world.size, self._rows
        if self.mode == "a2a+p2p" and (size % rows or size == rows):
            return f"a2a+p2p needs {rows} rows of equally many ranks, 2 or more; got {size} ranks"
        exchanging = {"a2a": size, "a2a+p2p": size // rows}.get(self.mode, 1)
        if heads_kv % exchanging:
            return f"{self.mode} shards KV heads over {exchanging} ranks; got {heads_kv}"
        return None

    @property
    def _rows(self) -> int:
        """Rows of ranks that exchange heads: nodes, or halves of one node."""
        return max(2, self.world.nodes)

    @cached_property
    def _groups(self) -> dist.ProcessGroup | list[dist.ProcessGroup]:
        if self.mode != "a2a+p2p":
            return self.world.group
        shape = (self._rows, self.world.size // self._rows)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("p2p", "a2a"))
        return [mesh.get_group("a2a"), mesh.get_group("p2p")]

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.world.device)

    def prepare(self, heads: tuple[int, int], dims: tuple[int, int], causal: bool) -> None:
        """Make it for query and KV heads, widths of q, k and of v, and a mask; all ranks."""
        from transformer_engine.pytorch import DotProductAttention

        self.attention = DotProductAttention(
            num_attention_heads=heads[0],
            kv_channels=dims,
            num_gqa_groups=heads[1],
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal" if causal else "no_mask",
        )
        ranks = dist.get_process_group_ranks(self.world.group)
        self.attention.set_context_parallel_group(self._groups, ranks, self._stream, self.mode)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """The output of this rank's rows, [s_local, b, h * d_v]; options are of this call."""
        return self.attention(q, k, v, **options)


def _prefer_torchs_cudnn() -> None:
    """Have TransformerEngine load the cuDNN that torch brings, unless a variable names another.

    By itself it takes the system's, which may be older. Its own look-up reads CUDNN_HOME first
    (transformer_engine/common/__init__.py, 2.20.2).
    """
    folder = Path(torch.__file__).parents[1] / "nvidia" / "cudnn"
    if folder.is_dir() and "CUDNN_PATH" not in os.environ:
        os.environ.setdefault("CUDNN_HOME", str(folder))
