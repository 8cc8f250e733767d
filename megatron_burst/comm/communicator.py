"""The communicators of a context-parallel group: intra and inter, for reading and for gradients."""

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any
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
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link, Topology

if TYPE_CHECKING:
    from megatron_burst.comm.symmetric import SymmetricPool
    from megatron_burst.schedule.program import Program


class Communicator:
    """The transfers of one context-parallel group; see `Transport`.

    Inputs and gradients have separate process groups, so that on NCCL each has its own stream and
    neither waits for the other; likewise the intra and the inter ring.
    """

    def __init__(
        self, group: dist.ProcessGroup, topology: Topology, state: Group, config: BurstConfig
    ) -> None:
        self.topology, self.consensus, self._memory = topology, state.consensus, state.memory
        self._log, self.overlaps, self._asked = state.log, config.overlap, config.force.transfer
        self._lost: Any = WeakMethod(state.log.lost_hop) if state.log else None
        if state.log:  # one rank has none, and sends nothing
            state.log.nodes = topology.node_of
        self.cp_rank = group.rank()
        self.checks: int | None = None  # the number of its next spot check
        self.ranks = dist.get_process_group_ranks(group)
        self._streams: dict[torch.device, dict[Hashable, torch.cuda.Stream]] = {}
        row, column = topology.coord(self.cp_rank)
        intra, inter = topology.grid[row], tuple(ranks[column] for ranks in topology.grid)
        members = {Link.INTRA: intra, Link.INTER: inter}
        several = {link: ranks for link, ranks in members.items() if len(ranks) > 1}
        wanted = {(link, cargo): ranks for link, ranks in several.items() for cargo in Cargo}
        self.groups = state.sub_groups.of(wanted, config.nccl_ctas)
        # what spot checks compare goes through a group of its own, so that nothing can mix with it
        self.spot_check_group = (
            state.sub_groups.for_spot_checks() if config.check and state.log else None
        )
        self._pool = self._pool_of(self.groups.get((Link.INTRA, Cargo.READ)), state.sub_groups)
        device = "cuda" if backend_of(group) == "nccl" else "cpu"
        refusal = partial(self._pool.refusal, state.consensus) if self._pool else lambda: None
        self.transfer = choose_transfer(topology, device, self._asked, refusal)  # inside a node

    def _pool_of(
        self, together: dist.ProcessGroup | None, sub_groups: SubGroups
    ) -> "SymmetricPool | None":
        """Memory that the ranks of a row can read from each other, shared by all communicators."""
        if together is None:
            return None
        from megatron_burst.comm.symmetric import SymmetricPool  # which loads much of torch

        pools, name = sub_groups.pools, together.group_name
        if name not in pools:
            # by rank in the group; torch sorts them, whatever the topology's order
            ranks = [self.ranks.index(rank) for rank in dist.get_process_group_ranks(together)]
            board = state_of(together).consensus
            pools[name] = SymmetricPool(together, ranks, self.cp_rank, board)
        return pools[name]

    def buffers(self, use: Hashable, count: int, num_bytes: int, where: Placement) -> FlatBuffers:
        """As `Transport.buffers`."""
        return self._memory.of(use, count, num_bytes, where)

    def queues(self, device: torch.device) -> OneQueue | Queues:
        """As `Transport.queues`; one queue where nothing overlaps."""
        if device.type != "cuda":
            return OneQueue(Placement(device))
        queues = Queues(device, self._streams.setdefault(device, {}))
        self._memory.begin(queues.stream)
        return queues if self.overlaps else OneQueue(queues.placement)

    def slots(self, cargo: Cargo, count: int, num_bytes: int, where: Placement) -> Slots:
        """As `Transport.slots`; sizes are the same on all ranks of the node.

        If a rank lacks symmetric memory, all ranks of its node send from now on, unless the user
        asked for pulling.
        """
        if self._pool and self.transfer.value == "pull":
            from megatron_burst.comm.symmetric import SymmetricError

            try:
                return self._pool.slots(cargo, count, num_bytes, where)
            except SymmetricError as error:
                if self._asked == "pull":
                    raise
                self.transfer = Decision("send", error.reason)
                log_message(f"{WHO}: from now on {self.transfer}", logging.WARNING)
        memory = self.buffers(cargo, count, num_bytes, where)
        return SentSlots(memory, count, partial(self.send, Link.INTRA, cargo))

    def send(self, link: Link, cargo: Cargo, sends: Parcels, recvs: Parcels) -> SendRecvs:
        """As `Transport.send`; returns at once."""
        group, ranks = self.groups.get((link, cargo)), self.ranks
        operations = [dist.P2POp(dist.isend, rows, ranks[peer], group) for peer, rows in sends]
        operations += [dist.P2POp(dist.irecv, rows, ranks[peer], group) for peer, rows in recvs]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost()(error) from error
        # on a GPU a wait with a time-out would block the CPU; there NCCL's own watchdog looks on
        if operations and operations[0].tensor.is_cuda:
            return SendRecvs(works, (), None, self._lost)
        peers = [peer for peer, _ in (*sends, *recvs)]
        return SendRecvs(works, peers, self.consensus.timeout_s, self._lost)

    def run(self, program: "Program", unit: int, over: list[Any], waits: Any) -> None:
        """As `Transport.run`."""
        if log := self._log:
            log.runs.append(RunningPass(log.number, log.stamp, program, unit, over, waits))


def choose_transfer(
    topology: Topology, device: str, asked: str, try_out: Callable[[], str | None]
) -> Decision:
    """How gathered keys move inside a node: "send" or "pull".

    `try_out` returns why ranks cannot pull here, or None; called only if nothing else rules it out.

    Raises:
        BurstError: if pulling was asked for and cannot be done.
    """
    if topology.cp_size == 1:
        return Decision("send", "one rank")
    if asked == "send":
        return Decision("send", "asked for")
    cannot: str | None
    if device != "cuda":
        cannot = f"the ranks must use GPUs, because only GPUs have copy engines; got {device}"
    elif topology.spans_nodes or topology.intra_size == 1:
        cannot = (
            "a rank must share its node with those it gathers from, because it reads their memory; "
            f"got {topology}"
        )
    else:
        reason = try_out()
        cannot = reason and f"symmetric memory must work between the GPUs; got: {reason}"
    if cannot and asked == "pull":
        raise BurstError(
            f"burst attention: to pull, {cannot}; pass --burst-tune transfer=send or transfer=auto"
        )
    if cannot:
        return Decision("send", cannot)
    return Decision("pull", "asked for" if asked == "pull" else "by copy engine, while kernels run")


def communicator_of(
    group: dist.ProcessGroup, config: BurstConfig, flat: bool = False
) -> Communicator:
    """The communicator of a context-parallel group; made at first use by all its ranks together.

    `flat`: whether to treat all ranks as one row, whatever their nodes.

    Raises:
        BurstError: if the nodes do not fit.
    """
    state = state_of(group, config.timeout_s)
    made, board = state.communicators, state.consensus
    carried = (config.nodes, config.force.transfer, config.nccl_ctas, config.overlap)
    key = (*carried, bool(config.check), flat)
    if key not in made:
        terms = {"config": str(config)}
        PassAnnouncer(state.log, terms, digest=1).begin(
            PassKind.AGREEMENT
        )  # others may agree on a call
        board.agree(terms, WHO)
        check_devices(group, board)
        topology = find_topology(group, config, board)
        if flat:
            topology = topology.flat()
        if state.log is None and group.size() > 1:
            state.open_log(group)
        made[key] = Communicator(group, topology, state, config)
    return made[key]
