"""What carries data between ranks: a `Communicator`, or a stand-in that joins simulated ranks."""

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from megatron_burst.comm.queues import Queues
from megatron_burst.comm.slots import Parcels, Slots, UnderWay
from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link


class Carrier(Protocol):
    """One rank's end of the wires.

    Attributes:
        cp_rank: this rank.
        overlaps: whether transfers run beside kernels.
    """

    cp_rank: int
    overlaps: bool

    def buffers(
        self, use: Hashable, count: int, num_bytes: int, device: torch.device
    ) -> list[Tensor]:
        """Flat byte buffers, the same ones in every call."""

    def slots(self, cargo: Cargo, count: int, num_bytes: int, device: torch.device) -> Slots:
        """Slots for a call, which this rank shares with the others of its node."""

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> UnderWay:
        """Start behind what the current stream has queued; those between two ranks match in
        order."""

    def queues(self, device: torch.device) -> Queues:
        """Where work of this carrier's calls is queued."""
