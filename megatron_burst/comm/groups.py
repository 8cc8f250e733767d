"""The communicators of a context-parallel group: intra and inter, for reading and for gradients."""

import logging
from collections.abc import Hashable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.comm.backend import backend_of
from megatron_burst.comm.nodes import check_devices, find_topology
from megatron_burst.comm.pass_log import PassLog
from megatron_burst.comm.queues import OneQueue, Queues, Streams
from megatron_burst.comm.slots import Parcels, SentSlots, Slots
from megatron_burst.comm.state import board_of, state_of
from megatron_burst.comm.subgroups import SubGroups
from megatron_burst.comm.symmetric import SymmetricError, SymmetricPool
from megatron_burst.comm.transfer import Transfer
from megatron_burst.comm.watch import Board
from megatron_burst.config import BurstConfig
from megatron_burst.plan.choose import Choice, choose_transfer
from megatron_burst.say import say
from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link, Topology

_WHO = "burst attention"


class Communicator:
    """Carries the hops of one context-parallel group.

    Data that is read and gradients have process groups of their own, so that on NCCL each has a
    stream of its own and neither waits for the other; likewise the intra and the inter ring.

    Attributes:
        topology: the arrangement of its ranks.
        cp_rank: this rank in the group.
        board: where its ranks agree out of band.
        transfer: how gathered keys move inside a node.
        overlaps: whether transfers run beside kernels.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        topology: Topology,
        board: Board,
        config: BurstConfig,
        sub_groups: SubGroups,
        read_groups: Sequence[dist.ProcessGroup] | None = None,
    ) -> None:
        self.topology, self.board = topology, board
        self.overlaps, self._asked = config.tuning.overlap, config.tuning.transfer
        self.cp_rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._buffers: dict[tuple, list[Tensor]] = {}
        self._queues: dict[torch.device, Queues] = {}
        row, column = topology.coord(self.cp_rank)
        members = {
            Link.INTRA: topology.grid[row],
            Link.INTER: tuple(ranks[column] for ranks in topology.grid),
        }
        several = {link: ranks for link, ranks in members.items() if len(ranks) > 1}
        bounded = config.tuning.nccl_ctas is not None  # what others have made is not
        given = {} if bounded else dict(zip(members, read_groups or (), strict=False))
        wanted = {
            (link, cargo): ranks
            for link, ranks in several.items()
            for cargo in Cargo
            if not (cargo is Cargo.READ and given)
        }
        self._groups = {(link, Cargo.READ): given[link] for link in several if given}
        self._groups |= sub_groups.of(wanted, config.tuning.nccl_ctas)
        self._pool = self._pool_of(self._groups.get((Link.INTRA, Cargo.READ)), sub_groups)
        device = "cuda" if backend_of(group) == "nccl" else "cpu"
        refusal = partial(self._pool.refusal, board) if self._pool else lambda: None
        self.transfer = choose_transfer(topology, device, config.tuning.transfer, refusal)

    def _pool_of(
        self, together: dist.ProcessGroup | None, sub_groups: SubGroups
    ) -> SymmetricPool | None:
        """Memory that the ranks of a row may read of each other, one for all communicators."""
        if together is None:
            return None
        pools, name = sub_groups.pools, together.group_name
        if name not in pools:
            # by rank in the group; torch sorts them, whatever the topology says
            ranks = [self._ranks.index(rank) for rank in dist.get_process_group_ranks(together)]
            pools[name] = SymmetricPool(together, ranks, self.cp_rank, board_of(together, None))
        return pools[name]

    def buffers(self, use: Hashable, count: int, num_bytes: int, device: torch.device) -> list:
        """`count` flat byte buffers, the same ones in every call: allocated once, kept, grown."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        pool = self._buffers.setdefault((use, device, stream), [])
        if pool and pool[0].numel() < num_bytes:
            pool.clear()
        size = pool[0].numel() if pool else num_bytes
        while len(pool) < count:
            pool.append(torch.empty(size, dtype=torch.uint8, device=device))
        return [buffer[:num_bytes] for buffer in pool[:count]]

    def release_buffers(self) -> None:
        """Give the memory of all buffers back; the next call allocates them again."""
        self._buffers.clear()

    def queues(self, device: torch.device) -> Queues:
        """Streams of a GPU; one queue where nothing overlaps."""
        if device not in self._queues:
            apart = device.type == "cuda" and self.overlaps
            self._queues[device] = Streams(device) if apart else OneQueue()
        return self._queues[device]

    def slots(self, cargo: Cargo, count: int, num_bytes: int, device: torch.device) -> Slots:
        """Slots for a call, which this rank shares with the others of its node.

        Args:
            cargo: what lies in them.
            count: how many are filled in turn.
            num_bytes: of a slot; the same on all ranks of the node.
            device: of the buffers.
        """
        pulls = self._pool and self.transfer.value == "pull"
        make = self._pulled_slots if pulls else self._sent_slots
        return make(cargo, count, num_bytes, device)

    def _pulled_slots(
        self, cargo: Cargo, count: int, num_bytes: int, device: torch.device
    ) -> Slots:
        """Slots in symmetric memory. Where a rank has no room for them all ranks of its node send
        from now on, unless the user asked for pulling."""
        try:
            return self._pool.slots(cargo, count, num_bytes, device)
        except SymmetricError as error:
            if self._asked == "pull":
                raise
            self.transfer = Choice("send", error.reason)
            say(f"{_WHO}: from now on {self.transfer}", logging.WARNING)
            return self._sent_slots(cargo, count, num_bytes, device)

    def _sent_slots(
        self, cargo: Cargo, count: int, num_bytes: int, device: torch.device
    ) -> SentSlots:
        buffers = self.buffers(cargo, count, num_bytes, device)
        return SentSlots(buffers, partial(self.send, Link.INTRA, cargo))

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> Transfer:
        """Start behind what the current stream has queued; those between two ranks match in
        order. Returns at once."""
        peers = ", ".join(f"{peer}" for peer, _ in recvs)
        name = f"{link} {cargo} transfer from cp rank {peers or 'none'} to {self.cp_rank}"
        operations = [
            dist.P2POp(operation, tensor, self._ranks[peer], self._groups[link, cargo])
            for operation, parcels in ((dist.isend, sends), (dist.irecv, recvs))
            for peer, tensor in parcels
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        # on a GPU a wait with a time-out would block the CPU; there NCCL's own watchdog looks on
        on_cpu = all(tensor.device.type == "cpu" for _, tensor in (*sends, *recvs))
        timeout_s = self.board.timeout_s if on_cpu else None
        return Transfer(works, timeout_s, lambda error: self.board.explain(error, _WHO, name))


def communicator_of(
    group: dist.ProcessGroup,
    config: BurstConfig,
    hcp_groups: Sequence[dist.ProcessGroup] | None = None,
    flat: bool = False,
) -> Communicator:
    """The communicator of a context-parallel group; made at first use by all its ranks together.

    Args:
        group: the context-parallel group.
        config: of its tuning `nodes` pretends nodes (otherwise ranks tell each other their node's
            name); `transfer`, `nccl_ctas` and `overlap` say how data are carried.
        hcp_groups: [intra, inter] sub-groups that exist already (Megatron's hierarchical ones).
        flat: treat all ranks as one row, whatever their nodes.

    Raises:
        BurstError: if the nodes do not fit, or the sub-groups do not tile the group.
    """
    state = state_of(group, config.tuning.timeout_s)
    made, board = state.communicators, state.board
    tuning = config.tuning
    carried = (tuning.nodes, tuning.transfer, tuning.nccl_ctas, tuning.overlap)
    names = tuple(sub_group.group_name for sub_group in hcp_groups or ())
    key = (*carried, flat, names)
    if key not in made:
        board.agree({"config": str(config), "hcp_groups": str(bool(hcp_groups))}, _WHO)
        check_devices(group, board)
        topology = find_topology(group, config, board, hcp_groups)
        if flat:
            topology, hcp_groups = topology.flat(), None
        if state.log is None and group.size() > 1:
            state.log = PassLog.over(group, board, state.sub_groups)
        made[key] = Communicator(group, topology, board, config, state.sub_groups, hcp_groups)
    return made[key]
