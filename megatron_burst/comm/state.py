"""What belongs to a process group on this rank, for as long as the group lives."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.comm.pass_log import Kind, Marks, PassLog
from megatron_burst.comm.symmetric import SymmetricPool
from megatron_burst.comm.watch import WHO, Board, Latest, backend_of, set_seconds
from megatron_burst.errors import BurstError
from megatron_burst.schedule.call import Cargo
from megatron_burst.schedule.topology import Link

if TYPE_CHECKING:
    from megatron_burst.comm.groups import Communicator

_CALLS = 128  # whose programs are kept
_SAMPLES = 8  # micro-batches whose layers are under way
_SAME = -1.0  # no time-out
_CONNECT_S = 60  # within which ranks must reach each other over gloo
type Names = tuple[Link, Cargo]
# Up to which number groups have names, as long as the default group lives.
_MOST: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
# What belongs to a group goes when the group does.
_STATES: WeakKeyDictionary[dist.ProcessGroup, "GroupState"] = WeakKeyDictionary()


class SubGroups:
    """Process groups of some ranks of a group, one for equal ranks, cargo and thread blocks.

    Making one takes up to seconds, so configurations share them. They wait as long as the group's
    board; torch keeps them until all groups are destroyed.
    """

    def __init__(self, group: dist.ProcessGroup, board: Board) -> None:
        self._ranks, self._backend = dist.get_process_group_ranks(group), backend_of(group)
        self._board, self._timeout_s = board, 0.0
        self._made: dict[tuple, dist.ProcessGroup] = {}
        self._beside: dist.ProcessGroup | None = None
        self.pools: dict[str, SymmetricPool] = {}  # by the name of a sub-group

    def of(
        self, wanted: Mapping[Names, Sequence[int]], ctas: int | None
    ) -> dict[Names, dist.ProcessGroup]:
        """Sub-groups of the wanted cp ranks, by name; all ranks of the group together.

        `ctas`: most thread blocks of a transfer; None leaves it to NCCL.
        """
        keys = {name: (*sorted(ranks), name[1], ctas) for name, ranks in wanted.items()}
        names = list(wanted)
        lacking = [place for place, name in enumerate(names) if keys[name] not in self._made]
        for place in self._level(lacking):
            self._made[keys[names[place]]] = self._new(wanted[names[place]], ctas)
        return {name: self._made[key] for name, key in keys.items()}

    def beside(self) -> dist.ProcessGroup:
        """A gloo group of all ranks, for what passes by the GPUs; all ranks together.

        It waits twice as long as others: what gloo says of it names no ranks.
        """
        self._level([0])
        self._beside = dist.new_group(
            self._ranks, timedelta(seconds=_CONNECT_S), "gloo", use_local_synchronization=True
        )
        set_seconds(self._beside, 2 * self._board.timeout_s)
        return self._beside

    def _level(self, lacking: Sequence[int]) -> list[int]:
        """Let all ranks know of equally many process groups; what any of them lacks.

        torch counts them into the name under which the members of a locally synchronised group
        find each other (distributed_c10d.py, _hash_ranks_to_str); with unequal counts they hang.
        """
        known, default = len(distributed_c10d._world.pg_names), dist.group.WORLD
        # a number that was used, before a group was destroyed, would give two groups one name
        used = max(known, _MOST.get(default, 0))
        mine = json.dumps({"process groups": used, "lacking": lacking})
        everyones = [json.loads(text) for text in self._board.share(mine, WHO)]
        missing = sorted({place for theirs in everyones for place in theirs["lacking"]})
        most = max(theirs["process groups"] for theirs in everyones)
        for _ in range(most - known if missing else 0):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _MOST[default] = most + len(missing)
        return missing

    def _new(self, cp_ranks: Sequence[int], ctas: int | None) -> dist.ProcessGroup:
        """A new group of some of the ranks; only its members take part in making it."""
        options = None
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if ctas is not None:
                options.config.max_ctas = options.config.min_ctas = ctas
        ranks, limit = [self._ranks[rank] for rank in cp_ranks], timedelta(seconds=self._timeout_s)
        return dist.new_group(ranks, limit, self._backend, options, use_local_synchronization=True)

    def follow(self) -> None:
        """Wait as long as the board does: what the user gave, or the group's time-out now."""
        if self._timeout_s != self._board.timeout_s:
            self._timeout_s = self._board.timeout_s
            for group in self._made.values():
                set_seconds(group, self._timeout_s)
            if self._beside is not None:
                set_seconds(self._beside, 2 * self._timeout_s)


@dataclass(slots=True)
class GroupState:
    """What belongs to a context-parallel group on this rank."""

    board: Board  # where its ranks agree out of band
    sub_groups: SubGroups  # that its communicators share
    # by how they carry data
    communicators: dict[Hashable, "Communicator"] = field(default_factory=dict)
    # what has come of calls that were agreed upon and accepted, for their repetition
    resolved: Latest[Hashable, Any] = field(default_factory=partial(Latest, _CALLS))
    # the choices that the user was told of
    said: Latest[Hashable, None] = field(default_factory=partial(Latest, _CALLS))
    # what follows from where the documents of the latest packed samples begin
    samples: Latest[Hashable, Any] = field(default_factory=partial(Latest, _SAMPLES))
    # where its ranks compare their passes; None before the first communicator, and of a single rank
    log: PassLog | None = None

    def open_log(self, group: dist.ProcessGroup) -> None:
        """Have the group's ranks compare their passes from now on; all together."""
        try:
            beside, on_cpu = self.sub_groups.beside(), backend_of(group) == "gloo"
            self.log = PassLog(beside, group.get_group_store(), self.board, waits=on_cpu)
        except RuntimeError as error:
            raise BurstError(
                f"{WHO}: ranks must reach each other over gloo, because before each pass they "
                "compare what they are about to run, whatever backend carries the data; got "
                f"{str(error).splitlines()[0]}; set GLOO_SOCKET_IFNAME to a network interface "
                "that reaches all nodes"
            ) from error


def state_of(group: dist.ProcessGroup, timeout_s: float | None = _SAME) -> GroupState:
    """What belongs to a group; made at first use.

    `timeout_s`: seconds to wait for other ranks from now on; None: as the group's operations do;
    left out: as before.
    """
    if group not in _STATES:
        _drop_destroyed()
        board = Board(group, None if timeout_s == _SAME else timeout_s)
        _STATES[group] = GroupState(board, SubGroups(group, board))
    state = _STATES[group]
    if timeout_s != _SAME:
        state.board.given_timeout_s = timeout_s
    state.sub_groups.follow()
    return state


def _drop_destroyed() -> None:
    """Let go of what belongs to destroyed groups that somebody still holds."""
    known = distributed_c10d._world.pg_map
    for group in [group for group in _STATES if group not in known]:
        del _STATES[group]


def release_buffers(group: dist.ProcessGroup) -> None:
    """Give back the memory that a group's communicators keep; all its ranks together."""
    if group in _STATES:
        for communicator in _STATES[group].communicators.values():
            communicator.release_buffers()
        for pool in _STATES[group].sub_groups.pools.values():
            pool.release()


def symmetric_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of a group's symmetric memory on this rank, which no allocator of torch's counts."""
    pools = _STATES[group].sub_groups.pools.values() if group in _STATES else ()
    return sum(pool.num_bytes for pool in pools)


def check_in_step(group: dist.ProcessGroup) -> None:
    """Check that all ranks of a context-parallel group have made the same calls so far.

    Each call checks the calls before it; this function checks the last ones, at the end of a step
    or an evaluation. All ranks call it together. It waits for their CPUs, not for their GPUs.

    Raises:
        BurstError: on all ranks, naming the ranks that made other calls.
    """
    if group in _STATES:
        Marks(_STATES[group].log).begin(Kind.END)
