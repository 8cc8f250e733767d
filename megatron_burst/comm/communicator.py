"""The transfers of a context-parallel group, over a process group for each (link, cargo).

Links are intra and inter (inside a node, between nodes); cargo is what is read, or gradients.
"""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist

from megatron_burst.comm.detector import PassAnnouncer, PassKind
from megatron_burst.comm.group import Group, SubGroups, state_of
from megatron_burst.comm.nodes import check_devices, find_topology
from megatron_burst.comm.stamps import RunningPass
from megatron_burst.comm.store import WHO, backend_of
from megatron_burst.comm.transport import (
    FlatBuffers,
    OneQueue,
    Parcels,
    Placement,
    Queues,
    SendRecvs,
    SentSlots,
    Slots,
)
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.logs import Decision, log_message
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link, Topology


class Communicator:
    """The transfers of one context-parallel group; see `Transport`.

    On NCCL each process group has a stream of its own, so none waits for another one's transfers.
    """

    def __init__(
        self, group: dist.ProcessGroup, topology: Topology, state: Group, config: BurstConfig
    ) -> None:
        self.topology, self.consensus, self._memory = topology, state.consensus, state.memory
        self._log, self.overlaps, self._requested = state.log, config.overlap, config.force.transfer
        self._error_of: Any = WeakMethod(state.log.lost_hop) if state.log else None
        if state.log:  # None in a group of one rank
            state.log.nodes = topology.node_of
        self.cp_rank = group.rank()
        self.checks: int | None = None  # the number of the next spot check
        self.ranks = dist.get_process_group_ranks(group)
        self._streams: dict[torch.device, dict[Hashable, torch.cuda.Stream]] = {}
        row, column = topology.coord(self.cp_rank)
        intra, inter = topology.grid[row], tuple(ranks[column] for ranks in topology.grid)
        members = {Link.INTRA: intra, Link.INTER: inter}
        rings = {link: ranks for link, ranks in members.items() if len(ranks) > 1}
        ring_ranks = {(link, cargo): ranks for link, ranks in rings.items() for cargo in Cargo}
        self.groups = state.sub_groups.obtain(ring_ranks, config.nccl_ctas)
        checks = config.check and state.log  # in a group of their own, apart from all else
        self.spot_check_group = state.sub_groups.for_spot_checks() if checks else None
        self.pool = self._pool_of(self.groups.get((Link.INTRA, Cargo.READ)), state.sub_groups)
        device = "cuda" if backend_of(group) == "nccl" else "cpu"
        refusal = partial(self.pool.refusal, state.consensus) if self.pool else lambda: None
        self.transfer = choose_transfer(topology, device, self._requested, refusal)  # inside a node

    def _pool_of(self, together: dist.ProcessGroup | None, sub_groups: SubGroups) -> Any:
        """The `SymmetricPool` of the ranks of a row, shared by all communicators; None for one."""
        if together is None:
            return None
        from megatron_burst.comm.symmetric import SymmetricPool  # it loads much of torch

        pools, name = sub_groups.pools, together.group_name
        if name not in pools:
            # by rank in the group; torch sorts them, whatever the topology's order
            ranks = [self.ranks.index(rank) for rank in dist.get_process_group_ranks(together)]
            consensus = state_of(together).consensus
            pools[name] = SymmetricPool(together, ranks, self.cp_rank, consensus)
        return pools[name]

    def buffers(self, use: Hashable, count: int, nbytes: int, placement: Placement) -> FlatBuffers:
        """As `Transport.buffers`."""
        return self._memory.buffers(use, count, nbytes, placement)

    def queues(self, device: torch.device, follows: bool = True) -> OneQueue | Queues:
        """As `Transport.queues`; one queue where nothing overlaps. `follows`: whether the call
        starts after the previous one."""
        if device.type != "cuda":
            return OneQueue(Placement(device))
        queues = Queues(device, self._streams.setdefault(device, {}))
        if follows:
            self._memory.begin(queues.stream)
        return queues if self.overlaps else OneQueue(queues.placement)

    def slots(self, cargo: Cargo, count: int, nbytes: int, placement: Placement) -> Slots:
        """As `Transport.slots`. If a rank lacks symmetric memory, all ranks of its node send from
        now on, unless the user asked for pulling."""
        if self.pool and self.transfer.value == "pull":
            from megatron_burst.comm.symmetric import SymmetricError

            try:
                return self.pool.slots(cargo, count, nbytes, placement)
            except SymmetricError as error:
                if self._requested == "pull":
                    raise
                self.transfer = Decision("send", error.reason)
                log_message(f"{WHO}: from now on ranks {self.transfer}", logging.WARNING)
        memory = self.buffers(cargo, count, nbytes, placement)
        return SentSlots(memory, count, partial(self.send, Link.INTRA, cargo))

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> SendRecvs:
        """As `Transport.send`; returns at once."""
        group, ranks = self.groups.get((link, cargo)), self.ranks
        operations = [dist.P2POp(dist.isend, rows, ranks[peer], group) for peer, rows in sends]
        operations += [dist.P2POp(dist.irecv, rows, ranks[peer], group) for peer, rows in recvs]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._error_of()(error) from error
        # on a GPU a wait with a time-out would block the CPU; NCCL has a watchdog
        if operations and operations[0].tensor.is_cuda:
            return SendRecvs(works, (), None, self._error_of)
        peers = [peer for peer, _ in (*sends, *recvs)]
        return SendRecvs(works, peers, self.consensus.timeout_s, self._error_of)

    def run(self, program: Program, unit: int, handles: list[Any], waits: Any) -> None:
        """As `Transport.run`."""
        if log := self._log:
            log.runs.append(RunningPass(log.number, log.stamp, program, unit, handles, waits))


def choose_transfer(
    topology: Topology, device: str, requested: str, try_out: Callable[[], str | None]
) -> Decision:
    """How gathered keys move inside a node: "send" or "pull".

    `try_out` returns why ranks cannot pull, or None; called only if nothing else rules pulling out.
    Raises BurstError if pulling is requested and impossible.
    """
    if topology.cp_size == 1:
        return Decision("send", "one rank")
    if requested == "send":
        return Decision("send", "asked for")
    cannot: str | None = None
    if device != "cuda":
        cannot = f"the ranks must use GPUs, because only GPUs have copy engines; got {device}"
    elif topology.spans_nodes or topology.intra_size == 1:
        cannot = (
            "a rank must be on one node with the ranks it gathers from, because it reads their "
            f"memory; got {topology}"
        )
    elif failure := try_out():
        cannot = (
            f"symmetric memory must work between the GPUs, because ranks read it; got {failure}"
        )
    if not cannot:
        reason = "asked for" if requested == "pull" else "by copy engine, while kernels run"
        return Decision("pull", reason)
    if requested == "pull":
        raise BurstError(
            f"burst attention: with transfer=pull, {cannot}; pass --burst-tune force.transfer=send "
            "or auto"
        )
    return Decision("send", cannot)


def communicator_of(
    group: dist.ProcessGroup, config: BurstConfig, flat: bool = False
) -> Communicator:
    """The communicator of a context-parallel group; made at first use by all its ranks together.

    `flat`: whether all ranks are one row, whatever their nodes. Raises BurstError if
    `config.nodes` does not divide the ranks.
    """
    state = state_of(group, config.timeout_s)
    communicators, consensus = state.communicators, state.consensus
    options = config.nodes, config.force.transfer, config.nccl_ctas, config.overlap
    key = *options, bool(config.check), flat
    if key not in communicators:
        terms = {"config": str(config)}
        # other ranks may be about to agree on a call
        PassAnnouncer(state.log, terms, digest=1).begin(PassKind.AGREEMENT)
        consensus.agree(terms, WHO)
        check_devices(group, consensus)
        topology = find_topology(group.size(), config, consensus)
        if flat:
            topology = topology.flat()
        if state.log is None and group.size() > 1:
            state.open_log(group)
        communicators[key] = Communicator(group, topology, state, config)
    return communicators[key]
