"""Speeds of one GPU, for choices at run time: a plan has those of its hardware."""

from dataclasses import dataclass

from megatron_burst.files import Positive


@dataclass(frozen=True, slots=True)
class Rates:
    """What one GPU does in a second; the defaults are those of an H200, rounded down."""

    matmul_tflops: Positive = 600.0  # dense bf16 in a layer's matrix products, sustained
    attention_tflops: Positive = 600.0  # attention's forward, sustained
    host_gbs: Positive = 20.0  # GB/s to pinned host memory while all GPUs of the node copy

    def matmul_s(self, flops: float) -> float:
        """Seconds of matrix products."""
        return flops / (self.matmul_tflops * 1e12)

    def attention_s(self, flops: float) -> float:
        """Seconds of attention's forward."""
        return flops / (self.attention_tflops * 1e12)

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of a copy to pinned host memory, or back."""
        return num_bytes / (self.host_gbs * 1e9)
