"""The communicators of a context-parallel group: intra and inter, for reading and for gradients."""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_burst.comm.aside import Aside
from megatron_burst.comm.hop import Transfer
from megatron_burst.comm.hosts import check_devices, find_topology
from megatron_burst.comm.pass_log import Marks, PassLog
from megatron_burst.comm.slots import Parcels, SentSlots, SerialSlots, Slots
from megatron_burst.comm.stamp import Kind
from megatron_burst.comm.symmetric import SymmetricPool
from megatron_burst.comm.watch import Board
from megatron_burst.config import BurstConfig
from megatron_burst.plan.choose import choose_transfer
from megatron_burst.plan.schedule import Cargo, Hop
from megatron_burst.plan.slots import sent_count
from megatron_burst.plan.topology import Link, Topology

_WHO = "burst attention"
# The one cache of the process: communicators and their buffers live as long as their group.
_COMMUNICATORS: WeakKeyDictionary[dist.ProcessGroup, dict[object, "Communicator"]] = (
    WeakKeyDictionary()
)
_BOARDS: WeakKeyDictionary[dist.ProcessGroup, Board] = WeakKeyDictionary()
_LOGS: WeakKeyDictionary[dist.ProcessGroup, PassLog] = WeakKeyDictionary()


class Communicator:
    """Carries the hops of one context-parallel group.

    Data that is read and gradients have process groups of their own, so that on NCCL each has a
    stream of its own and neither waits for the other; likewise the intra and the inter ring.

    Attributes:
        topology: the arrangement of its ranks.
        cp_rank: this rank in the group.
        board: where its ranks agree out of band.
        transfer: how gathered keys move inside a host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        topology: Topology,
        board: Board,
        config: BurstConfig,
        read_groups: Sequence[dist.ProcessGroup] | None = None,
    ) -> None:
        self.topology, self.board = topology, board
        self._nccl_ctas, self._overlap = config.nccl_ctas, config.overlap
        self.cp_rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._buffers: dict[tuple, list[Tensor]] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        row, column = topology.coord(self.cp_rank)
        members = {
            Link.INTRA: topology.grid[row],
            Link.INTER: tuple(ranks[column] for ranks in topology.grid),
        }
        bounded = config.nccl_ctas is not None  # what others have made is not
        given = {} if bounded else dict(zip(members, read_groups or (), strict=False))
        self._backend = dist.get_backend(group)
        self._level_names()
        if group not in _LOGS and group.size() > 1:
            _LOGS[group] = PassLog.over(group, board)
        self._groups = {
            (link, cargo): given.get(link) if cargo is Cargo.READ and given else self._new(ranks)
            for link, ranks in members.items()
            for cargo in Cargo
            if len(ranks) > 1
        }
        device = "cuda" if self._backend == "nccl" else "cpu"
        together = self._groups.get((Link.INTRA, Cargo.READ))
        self._pool = together and SymmetricPool(
            together,
            self._cp_ranks_of(together),
            self.cp_rank,
            board_of(together, config.timeout_s),
        )
        refusal = partial(self._pool.refusal, board) if self._pool else lambda: None
        self.transfer = choose_transfer(topology, device, config.transfer, refusal)

    def _new(self, cp_ranks: Sequence[int]) -> dist.ProcessGroup:
        """A new group of some of the ranks; only its members take part in making it."""
        options = None
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if self._nccl_ctas is not None:
                options.config.max_ctas = options.config.min_ctas = self._nccl_ctas
        return dist.new_group(
            [self._ranks[rank] for rank in cp_ranks],
            timeout=timedelta(seconds=self.board.timeout_s),
            backend=self._backend,
            pg_options=options,
            use_local_synchronization=True,
        )

    def _cp_ranks_of(self, group: dist.ProcessGroup) -> list[int]:
        """By rank in a group of some of the ranks; torch sorts them, whatever the topology says."""
        return [self._ranks.index(rank) for rank in dist.get_process_group_ranks(group)]

    def _level_names(self) -> None:
        """Let all ranks know of equally many process groups.

        torch counts them into the name under which the members of a locally synchronised group
        find each other (distributed_c10d.py, _hash_ranks_to_str); with unequal counts they hang.
        """
        known = len(distributed_c10d._world.pg_names)
        most = max(map(int, self.board.share(f"{known}", _WHO)))
        for _ in range(most - known):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

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
        if self._pool:
            self._pool.release()

    @property
    def symmetric_bytes(self) -> int:
        """Device memory that torch's caching allocator knows nothing of."""
        return self._pool.num_bytes if self._pool else 0

    def start(self, hop: Hop, send: Tensor, recv: Tensor) -> Transfer:
        """Post one hop behind what the current stream has queued; returns at once."""
        name = f"{hop.ring} {hop.cargo} hop from cp rank {hop.source} to {self.cp_rank}"
        group = hop.ring, hop.cargo
        transfer = self._post(group, [(hop.dest, send)], [(hop.source, recv)], name)
        if not self._overlap:
            transfer.wait()
        return transfer

    def beside(self, device: torch.device) -> Aside:
        """Where waits, copies and posts do not hold up the current stream's kernels."""
        if device.type != "cuda" or not self._overlap:
            return Aside(None)
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device, priority=-1)
        return Aside(self._sides[device])

    def slots(self, cargo: Cargo, rounds: int, num_bytes: int, device: torch.device) -> Slots:
        """Slots for a call of so many rounds, which this rank shares with the others of its host.

        Args:
            cargo: what lies in them.
            rounds: how often they are filled and exchanged in the call.
            num_bytes: of a slot; the same on all ranks of the host.
            device: of the buffers.
        """
        pulls = self._pool and self.transfer.value == "pull"
        make = self._pool.slots if pulls else self._sent_slots
        slots = make(cargo, rounds, num_bytes, device)
        return slots if self._overlap else SerialSlots(slots)

    def _sent_slots(
        self, cargo: Cargo, rounds: int, num_bytes: int, device: torch.device
    ) -> SentSlots:
        buffers = self.buffers(cargo, sent_count(rounds), num_bytes, device)
        return SentSlots(buffers, partial(self.exchange, cargo))

    def exchange(self, cargo: Cargo, sends: Parcels, recvs: Parcels) -> Transfer:
        """Post sends and receives inside the host; those between two ranks match in order."""
        name = f"{Link.INTRA} {cargo} exchange of cp rank {self.cp_rank}"
        return self._post((Link.INTRA, cargo), sends, recvs, name)

    def _post(
        self, group: tuple[Link, Cargo], sends: Parcels, recvs: Parcels, name: str
    ) -> Transfer:
        operations = [
            dist.P2POp(operation, tensor, self._ranks[peer], self._groups[group])
            for operation, parcels in ((dist.isend, sends), (dist.irecv, recvs))
            for peer, tensor in parcels
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        # on a GPU a wait with a time-out would block the CPU; there NCCL's own watchdog looks on
        on_cpu = all(tensor.device.type == "cpu" for _, tensor in (*sends, *recvs))
        timeout_s = self.board.timeout_s if on_cpu else None
        return Transfer(works, timeout_s, lambda error: self.board.explain(error, _WHO, name))


def release_buffers(group: dist.ProcessGroup) -> None:
    """Give back the memory that a group's communicators keep; all its ranks together."""
    for communicator in _COMMUNICATORS.get(group, {}).values():
        communicator.release_buffers()


def symmetric_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of a group's symmetric memory on this rank, which no allocator of torch's counts."""
    return sum(made.symmetric_bytes for made in _COMMUNICATORS.get(group, {}).values())


def board_of(group: dist.ProcessGroup, timeout_s: float) -> Board:
    """The group's board; made at first use."""
    if group not in _BOARDS:
        _BOARDS[group] = Board(group, timeout_s)
    _BOARDS[group].timeout_s = timeout_s
    return _BOARDS[group]


def pass_log_of(group: dist.ProcessGroup) -> PassLog | None:
    """Where the group's ranks compare their passes; made with its first communicator.

    None before, and for a single rank.
    """
    return _LOGS.get(group)


def check_in_step(group: dist.ProcessGroup) -> None:
    """Make sure that all ranks of a context-parallel group have made the same calls so far.

    Each call makes sure of those before it; this does of the last ones, at the end of a step or of
    an evaluation. All ranks call it together; it waits for their CPUs, not for GPUs.

    Raises:
        BurstError: on all ranks, naming those that have begun something else.
    """
    Marks(pass_log_of(group)).begin(Kind.END)


def communicator_of(
    group: dist.ProcessGroup,
    config: BurstConfig,
    hcp_groups: Sequence[dist.ProcessGroup] | None = None,
    flat: bool = False,
) -> Communicator:
    """The communicator of a context-parallel group; made at first use by all its ranks together.

    Args:
        group: the context-parallel group.
        config: `hosts` pretends hosts; otherwise ranks tell each other their host's name;
            `transfer`, `nccl_ctas` and `overlap` say how data are carried.
        hcp_groups: [intra, inter] sub-groups that exist already (Megatron's hierarchical ones).
        flat: treat all ranks as one row, whatever their hosts.

    Raises:
        BurstError: if the hosts do not fit, or the sub-groups do not tile the group.
    """
    made = _COMMUNICATORS.setdefault(group, {})
    carried = (config.hosts, config.transfer, config.nccl_ctas, config.overlap)
    key = (*carried, flat, tuple(hcp_groups or ()))
    if key not in made:
        board = board_of(group, config.timeout_s)
        board.agree({"config": str(config), "hcp_groups": str(bool(hcp_groups))}, _WHO)
        check_devices(group, board)
        topology = find_topology(group, config, board, hcp_groups)
        made[key] = (
            Communicator(group, topology.flat(), board, config)
            if flat
            else Communicator(group, topology, board, config, hcp_groups)
        )
    return made[key]
