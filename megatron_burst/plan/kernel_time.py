"""How long kernels take on given hardware."""

from dataclasses import dataclass
from math import ceil, inf

from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.mask import Mask, Tile
from megatron_burst.plan.schedule import Direction

_BACKWARD_KERNELS = 3  # rowsum(dO O) and zeroed sums; the products; sums in the inputs' dtype
_BLOCK = 128  # query rows (backward: key rows) of a thread block in current attention kernels


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
        forward = direction is Direction.FORWARD
        dims = shape.dim_qk + shape.dim_v if forward else 3 * shape.dim_qk + 2 * shape.dim_v
        flops = 2 * tile.pairs * shape.batch * shape.heads_q * dims
        rows = len(tile.q) if forward else len(tile.kv)
        blocks = ceil(rows / _BLOCK) * shape.batch * shape.heads_q
        units = self.hardware.gpu.multiprocessors
        waves = max(1.0, blocks / units) if tile.mask is Mask.CAUSAL else ceil(blocks / units)
        busy = blocks / (units * waves)
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
