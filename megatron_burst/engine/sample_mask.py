"""What the engine asks of a packed sample: the interface of documents and of slices."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron_burst.kernels.interface import Backend, QuerySide
from megatron_burst.kernels.visible import Visible
from megatron_burst.schedule.chunks import NeededBy
from megatron_burst.schedule.layout import Chunks
from megatron_burst.schedule.mask import Band, TilePositions


class TileCalls(Protocol):
    """Several kernel calls that compute one tile, for a kernel that cannot see it in one."""

    def forward(
        self, run: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `Backend.forward`."""
        ...

    def backward(
        self, run: Backend, side: QuerySide, k: Tensor, v: Tensor, scale: float,
        into: tuple[Tensor, Tensor, Tensor] | None = None, deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `Backend.backward`."""
        ...


class SampleMask(Protocol):
    """Documents (`masks.documents`) or slices (`masks.slices`) of one sample, built once for all
    layers.

    Attributes:
        known: a text that ranks compare, by name; None if it is still on its way from a GPU.
    """

    text: Mapping[str, str] | None

    def checked_text(self) -> Mapping[str, str]:
        """The text that ranks compare; waits for a GPU. Raises BurstError if it is invalid."""
        ...

    def is_seen(self, between: NeededBy) -> bool:
        """Whether any query of some chunks sees any key of some; True if that is not known."""
        ...

    def visible(
        self, band: Band, places: TilePositions, unit: int, run: Backend
    ) -> "Visible | TileCalls":
        """What a kernel call sees whose queries and keys are at these positions, in units of rows,
        or in these chunks of every document; or the calls that take its place."""
        ...

    def arrange_index(self, src_blocks: tuple[Chunks, ...], dst_chunks: Chunks) -> Tensor:
        """Row indices that arrange chunks of every document: int64 [rows]."""
        ...

    def restore_index(self, src_blocks: tuple[Chunks, ...], dst_chunks: Chunks) -> Tensor:
        """For each source row, the arranged rows that are copies of it: int64 [copies, rows]; -1
        for none."""
        ...
