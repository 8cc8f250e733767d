"""How long kernels take on given hardware."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from megatron_burst.plan.hardware import Hardware
from megatron_burst.schedule.call import AttentionShape, Direction
from megatron_burst.schedule.mask import Tile

_BACKWARD_KERNELS = 3  # rowsum(dO O) and zeroed sums; the products; sums in the inputs' dtype
_BLOCK = 128  # query rows (backward: key rows) of a thread block in current attention kernels


def thread_blocks(rows: int) -> int:
    """Thread blocks of a tile with so many rows, for each head of each sequence."""
    return ceil(rows / _BLOCK)


def share_busy(kernels: Sequence[int], multiprocessors: int) -> float:
    """Share of the multiprocessors that compute, over all waves of kernels with so many blocks."""
    waves = sum(ceil(blocks / multiprocessors) for blocks in kernels)
    return sum(kernels) / (multiprocessors * waves)


@dataclass(frozen=True, slots=True)
class Timer:
    """Times kernels.

    Attributes:
        hardware: that they run on.
        backend: of attention; "auto" for the first one that the hardware lists.
        pass_tflop: what the GPU computes without pause; infinite in training, where it never rests.
    """

    hardware: Hardware
    backend: str = "auto"
    pass_tflop: float = inf

    def tile(self, tile: Tile, shape: AttentionShape, direction: Direction) -> float:
        """Seconds of a tile of a call with these heads.

        A pair costs two products forward and five backward. A GPU with fewer blocks than
        multiprocessors is partly idle, and so it is in the last wave of blocks that are alike;
        causal kernels begin with their longest blocks, which evens out the end.
        """
        rows = len(tile.q) if direction is Direction.FORWARD else len(tile.kv)
        return self._kernel(tile.pairs, rows, tile.mask.causal, shape, direction)

    def window(self, keys: float, shape: AttentionShape, direction: Direction) -> float:
        """Seconds of sliding-window attention of a call's queries.

        Kernels skip what no query of a block sees, and compute the blocks at both ends of a window
        whole: a block of keys more for each query.

        Args:
            keys: that a query sees on average.
            shape: of the call.
            direction: which pass.
        """
        return self._kernel(shape.tokens * (keys + _BLOCK), shape.tokens, False, shape, direction)

    def _kernel(
        self, pairs: float, rows: int, causal: bool, shape: AttentionShape, direction: Direction
    ) -> float:
        forward = direction is Direction.FORWARD
        dims = shape.dim_qk + shape.dim_v if forward else 3 * shape.dim_qk + 2 * shape.dim_v
        flops = 2 * pairs * shape.batch * shape.heads_q * dims
        blocks = thread_blocks(rows) * shape.batch * shape.heads_q
        units = self.hardware.gpu.multiprocessors
        busy = min(1.0, blocks / units) if causal else share_busy([blocks], units)
        kernel = self.hardware.kernel((shape.dim_qk + shape.dim_v) / 2, self.backend)
        speed = (kernel.forward if forward else kernel.backward).at(self.pass_tflop)
        launches = 1 if forward else _BACKWARD_KERNELS
        return launches * self._launch + flops / (speed * 1e12 * busy)

    def memory(self, num_bytes: float) -> float:
        """Seconds of an element-wise kernel with so much memory traffic."""
        if not num_bytes:
            return 0.0
        return self._launch + num_bytes / (self.hardware.gpu.memory_gbs * 1e9)

    def matmul(self, flops: float) -> float:
        """Seconds of large matrix products."""
        return flops / (self.hardware.gpu.matmul_tflops * 1e12)

    @property
    def _launch(self) -> float:
        return self.hardware.gpu.launch_us * 1e-6
