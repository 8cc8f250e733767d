"""Documents of a call that a CUDA graph captures: each replay reads their boundaries again."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_burst.errors import require
from megatron_burst.masks.documents import Documents


class CapturedDocuments(Documents):
    """Documents whose boundaries are on the device alone, so nothing checks or compares them.

    Raises:
        BurstError: if boundaries are on the CPU, or the longest document is not known.
    """

    def _take_boundaries(self, bounds: Sequence[Tensor | None], device: torch.device) -> None:
        require(self._who, [
            (all(x is None or x.is_cuda for x in bounds), "cu_seqlens must be on the GPU while a "
             "CUDA graph is captured, because a replay reads boundaries there", "boundaries on the "
             "CPU", "pass tensors on the GPU, and write the next sample's boundaries into them"),
            (bool(self._sample.longest), "max_seqlen must be passed while a CUDA graph is "
             "captured, because kernels are launched for that many tokens in each replay",
             f"{self._sample.longest}", "pass the length of the longest document of all samples"),
        ])  # fmt: skip
        self._host, self._copied, self.text = [None for _ in bounds], None, None

    def checked_text(self) -> Mapping[str, str]:
        """Nothing, as boundaries are not known."""
        return {}

    def _table(self, values: Sequence) -> Tensor:
        """The values, which kernels write, as memory of the host may be gone in a replay."""
        numbers, device = np.array(values), self._row_starts.device
        written = [torch.full((), number, device=device) for number in numbers.ravel().tolist()]
        return torch.stack(written).view(numbers.shape)
