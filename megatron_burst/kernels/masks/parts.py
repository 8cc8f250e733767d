"""What a kernel call sees as parts of its score matrix."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

FAR = 1 << 40  # more than any distance of two positions: no bound


@dataclass(frozen=True, eq=False)
class Parts:
    """Which keys each query sees, as parts of the score matrix that do not overlap. On the CPU.

    Attributes:
        table: int64 [parts, 6]: rows [begin, end), keys [begin, end), low and high. Row i of a part
            sees its keys from i + low to i + high. Each row sees one, each key is seen.
        kept: what kernels derive from the parts, by their own keys.
    """

    table: np.ndarray
    kept: dict = field(default_factory=dict, init=False)

    def seen(self, rows: slice, keys: int, device: torch.device) -> Tensor:
        """bool [rows, keys]: whether some queries see each key."""
        visible = torch.zeros(rows.stop - rows.start, keys, dtype=torch.bool, device=device)
        of_rows = (self.table[:, 0] < rows.stop) & (self.table[:, 1] > rows.start)
        for begin, end, first, last, low, high in self.table[of_rows].tolist():
            begin, end = max(begin, rows.start), min(end, rows.stop)
            row = torch.arange(begin, end, device=device).unsqueeze(1)
            ahead = torch.arange(first, last, device=device) - row
            part = visible[begin - rows.start : end - rows.start, first:last]
            part |= (ahead >= low) & (ahead <= high)
        return visible


def listed(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of ranges, `counts` from `first` on: of which range each is, and the number."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) + (first - np.cumsum(counts) + counts)[index]


def transposed(parts: np.ndarray) -> np.ndarray:
    """The same pairs of the transposed score matrix, as of `Parts`."""
    return parts[:, [2, 3, 0, 1, 5, 4]] * [1, 1, 1, 1, -1, -1]


def trimmed(parts: np.ndarray) -> np.ndarray:
    """The same pairs: without rows and keys that have none, and with the tightest bounds."""
    begin, end, first, last, low, high = parts.T
    begin, end = np.maximum(begin, first - high), np.minimum(end, last - low)
    first, last = np.maximum(first, begin + low), np.minimum(last, end + high)
    some = (begin < end) & (first < last) & (low <= high)
    low, high = np.maximum(low, first - end + 1), np.minimum(high, last - 1 - begin)
    return np.stack((begin, end, first, last, low, high), 1)[some]


def is_full(parts: np.ndarray) -> np.ndarray:
    """Whether all rows of each part see all of its keys."""
    begin, end, first, last, low, high = parts.T
    return (low == first - end + 1) & (high == last - 1 - begin)


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The same numbers on the device, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
