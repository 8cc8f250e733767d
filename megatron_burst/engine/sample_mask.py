"""What the engine needs of a packed sample: the interface of documents and of slices."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron_burst.kernels.interface import Backend, QuerySide
from megatron_burst.kernels.visible import Visible
from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.layout import Chunks
from megatron_burst.schedule.mask import Band, TilePositions


class TileCalls(Protocol):
    """Several kernel calls that compute one tile, whose mask no single call of the kernel has."""

    def forward(
        self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float,
        into: tuple[Tensor, Tensor] | None = None, softcap: float = 0.0,
        largest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `Backend.forward`."""
        ...

    def backward(
        self, backend: Backend, side: QuerySide, k: Tensor, v: Tensor, scale: float,
        into: tuple[Tensor, Tensor, Tensor] | None = None, deterministic: bool = False,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `Backend.backward`."""
        ...


class SampleMask(Protocol):
    """Documents (`masks.documents`) or slices (`masks.slices`) of one sample, built once for all
    layers.

    Attributes:
        text: texts that ranks compare, by name; None while they are being copied from a GPU.
    """

    text: Mapping[str, str] | None

    def checked_text(self) -> Mapping[str, str]:
        """`text`, once the GPU has copied it. Raises BurstError if the sample is invalid."""
        ...

    def is_seen(self, between: NeededBy) -> bool:
        """Whether any of these queries sees any of these keys; True if that is not known."""
        ...

    def visible(
        self, band: Band, positions: TilePositions, unit: int, backend: Backend
    ) -> "Visible | TileCalls":
        """What the queries of a tile see, or the calls that compute it. `positions`: of queries and
        keys, in units of rows, or as chunks of every document."""
        ...

    def arrange_index(self, src_blocks: tuple[Chunks, ...], dst_chunks: Chunks) -> Tensor:
        """Index that puts rows of `src_blocks` into the order of `dst_chunks`: int64 [rows]."""
        ...

    def restore_index(self, src_blocks: tuple[Chunks, ...], dst_chunks: Chunks) -> Tensor:
        """For each source row, the arranged rows that are copies of it: int64 [copies, rows], -1
        where there are fewer."""
        ...
