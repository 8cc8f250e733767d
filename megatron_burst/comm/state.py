"""What belongs to a process group on this rank, for as long as the group lives."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_burst.comm.latest import Latest
from megatron_burst.comm.pass_log import Marks, PassLog
from megatron_burst.comm.stamp import Kind
from megatron_burst.comm.subgroups import SubGroups
from megatron_burst.comm.watch import Board

if TYPE_CHECKING:
    from megatron_burst.comm.groups import Communicator

_CALLS = 128  # whose schedules are kept
_SAMPLES = 8  # micro-batches whose layers are under way
# The one cache of the process: what belongs to a group goes when the group does.
_STATES: WeakKeyDictionary[dist.ProcessGroup, "GroupState"] = WeakKeyDictionary()


@dataclass(slots=True)
class GroupState:
    """What belongs to a context-parallel group on this rank.

    Attributes:
        board: where its ranks agree out of band.
        sub_groups: that its communicators share.
        communicators: by how they carry data.
        settled: what has come of calls that were agreed upon and accepted, for their repetition.
        said: the choices that the user was told of.
        samples: what follows from where the documents of the latest packed samples begin.
        log: where its ranks compare their passes; made with the first communicator, and None
            before and for a single rank.
    """

    board: Board
    sub_groups: SubGroups
    communicators: dict[Hashable, "Communicator"] = field(default_factory=dict)
    settled: Latest[Hashable, Any] = field(default_factory=partial(Latest, _CALLS))
    said: Latest[Hashable, None] = field(default_factory=partial(Latest, _CALLS))
    samples: Latest[Hashable, Any] = field(default_factory=partial(Latest, _SAMPLES))
    log: PassLog | None = None


def state_of(group: dist.ProcessGroup, timeout_s: float | None) -> GroupState:
    """What belongs to a group; made at first use.

    Args:
        group: the group.
        timeout_s: seconds to wait for other ranks from now on; None: as the group's operations do.
    """
    if group not in _STATES:
        _drop_destroyed()
        board = Board(group, timeout_s)
        _STATES[group] = GroupState(board, SubGroups(group, board))
    state = _STATES[group]
    state.board.given_timeout_s = timeout_s
    state.sub_groups.follow()
    return state


def _drop_destroyed() -> None:
    """Let go of what belongs to destroyed groups that somebody still holds."""
    known = distributed_c10d._world.pg_map
    for group in [group for group in _STATES if group not in known]:
        del _STATES[group]


def board_of(group: dist.ProcessGroup, timeout_s: float | None) -> Board:
    """The group's board; made at first use."""
    return state_of(group, timeout_s).board


def release_buffers(group: dist.ProcessGroup) -> None:
    """Give back the memory that a group's communicators keep; all its ranks together."""
    if group in _STATES:
        for communicator in _STATES[group].communicators.values():
            communicator.release_buffers()
        _STATES[group].sub_groups.release()


def symmetric_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of a group's symmetric memory on this rank, which no allocator of torch's counts."""
    return _STATES[group].sub_groups.symmetric_bytes if group in _STATES else 0


def check_in_step(group: dist.ProcessGroup) -> None:
    """Make sure that all ranks of a context-parallel group have made the same calls so far.

    Each call makes sure of those before it; this does of the last ones, at the end of a step or of
    an evaluation. All ranks call it together; it waits for their CPUs, not for GPUs.

    Raises:
        BurstError: on all ranks, naming those that have begun something else.
    """
    if group in _STATES:
        Marks(_STATES[group].log).begin(Kind.END)
