"""Per-process-group state of this rank, which lives as long as the group."""

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

_CALLS = 128  # calls whose programs are cached
_SAMPLES = 8  # micro-batches in flight
_SAME = -1.0  # keep the time-out
_CONNECT_S = 60  # within which ranks must reach each other over gloo
type Names = tuple[Link, Cargo]
# The highest number used in names of groups, as long as the default group lives.
_MOST: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
# State is dropped when its group is.
_STATES: WeakKeyDictionary[dist.ProcessGroup, "GroupState"] = WeakKeyDictionary()


class SubGroups:
    """Sub-groups of a group, one for each set of ranks, cargo and thread blocks.

    Creating one can take seconds, so configurations share them. Their time-out is that of the
    group's board; torch keeps them until all groups are destroyed.
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
        """Sub-groups of the given cp ranks, by name; all ranks of the group call it together.

        `ctas`: most thread blocks of a transfer; None leaves it to NCCL.
        """
        keys = {name: (*sorted(ranks), name[1], ctas) for name, ranks in wanted.items()}
        names = list(wanted)
        lacking = [place for place, name in enumerate(names) if keys[name] not in self._made]
        for place in self._level(lacking):
            self._made[keys[names[place]]] = self._new(wanted[names[place]], ctas)
        return {name: self._made[key] for name, key in keys.items()}

    def beside(self) -> dist.ProcessGroup:
        """A gloo group of all ranks, for what bypasses the GPUs; all ranks call it together.

        Its time-out is twice that of others, because gloo's errors name no ranks.
        """
        self._level([0])
        self._beside = dist.new_group(
            self._ranks, timedelta(seconds=_CONNECT_S), "gloo", use_local_synchronization=True
        )
        set_seconds(self._beside, 2 * self._board.timeout_s)
        return self._beside

    def _level(self, lacking: Sequence[int]) -> list[int]:
        """Make all ranks count equally many process groups; returns groups that any rank lacks.

        torch counts them into the name under which the members of a locally synchronised group
        find each other (distributed_c10d.py, _hash_ranks_to_str); with unequal counts they hang.
        """
        known, default = len(distributed_c10d._world.pg_names), dist.group.WORLD
        # reusing the number of a destroyed group would give two groups one name
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
        """A new group of some of the ranks; only its members call it."""
        options = None
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if ctas is not None:
                options.config.max_ctas = options.config.min_ctas = ctas
        ranks, limit = [self._ranks[rank] for rank in cp_ranks], timedelta(seconds=self._timeout_s)
        return dist.new_group(ranks, limit, self._backend, options, use_local_synchronization=True)

    def follow(self) -> None:
        """Adopt the board's time-out: the user's, or the group's current one."""
        if self._timeout_s != self._board.timeout_s:
            self._timeout_s = self._board.timeout_s
            for group in self._made.values():
                set_seconds(group, self._timeout_s)
            if self._beside is not None:
                set_seconds(self._beside, 2 * self._timeout_s)


@dataclass(slots=True)
class GroupState:
    """State of a context-parallel group on this rank."""

    board: Board  # out-of-band agreement of its ranks
    sub_groups: SubGroups  # shared by its communicators
    # by how they carry data
    communicators: dict[Hashable, "Communicator"] = field(default_factory=dict)
    # results for calls that ranks agreed on and accepted, for when they are repeated
    resolved: Latest[Hashable, Any] = field(default_factory=partial(Latest, _CALLS))
    # choices already reported to the user
    said: Latest[Hashable, None] = field(default_factory=partial(Latest, _CALLS))
    # documents of the latest packed samples
    samples: Latest[Hashable, Any] = field(default_factory=partial(Latest, _SAMPLES))
    # its ranks' pass log; None before the first communicator, and for a single rank
    log: PassLog | None = None

    def open_log(self, group: dist.ProcessGroup) -> None:
        """Have the group's ranks compare their passes from now on; all ranks call it together."""
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
    """The state of a group; made at first use.

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
    """Drop the state of destroyed groups that are still referenced."""
    known = distributed_c10d._world.pg_map
    for group in [group for group in _STATES if group not in known]:
        del _STATES[group]


def release_buffers(group: dist.ProcessGroup) -> None:
    """Free the memory that a group's communicators hold; all its ranks call it together."""
    if group in _STATES:
        for communicator in _STATES[group].communicators.values():
            communicator.release_buffers()
        for pool in _STATES[group].sub_groups.pools.values():
            pool.release()


def symmetric_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of a group's symmetric memory on this rank, which torch's allocators do not count."""
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
