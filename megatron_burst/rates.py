"""Speeds of one GPU, for choices at run time: a plan has those of its hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from megatron_burst.errors import BurstError


@dataclass(frozen=True, slots=True)
class Rates:
    """What one GPU does in a second; the defaults are those of an H200, rounded down."""

    matmul_tflops: float = 600.0  # dense bf16 in a layer's matrix products, sustained
    attention_tflops: float = 600.0  # attention's forward, sustained
    host_gbs: float = 20.0  # GB/s to pinned host memory while all GPUs of the node copy

    @classmethod
    def of(cls, found: Mapping[str, Any], where: str) -> "Rates":
        """The rates in a file, `where`; those that it lacks are the defaults.

        Raises:
            BurstError: if one is unknown or not a positive number.
        """
        names = {field.name for field in fields(cls)}
        for name, value in found.items():
            if name not in names or not isinstance(value, Real) or not value > 0:
                raise BurstError(
                    f"{where}: rates must be positive numbers among {', '.join(sorted(names))}, "
                    f"because choices follow from them; got {name}: {value!r}; make the file with "
                    "megatron-burst plan"
                )
        return cls(**found)

    def matmul_s(self, flops: float) -> float:
        """Seconds of matrix products."""
        return flops / (self.matmul_tflops * 1e12)

    def attention_s(self, flops: float) -> float:
        """Seconds of attention's forward."""
        return flops / (self.attention_tflops * 1e12)

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of a copy to pinned host memory, or back."""
        return num_bytes / (self.host_gbs * 1e9)
