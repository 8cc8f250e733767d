"""What lives as long as a process group: its board, sub-groups, buffers, log and known calls."""

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_burst.comm.detector import DesyncDetector, PassAnnouncer, PassKind
from megatron_burst.comm.store import (
    CP,
    PREFIX,
    PROBLEM,
    WHO,
    BoundedDict,
    ParallelKind,
    StoreConsensus,
    backend_of,
    set_seconds,
)
from megatron_burst.comm.transport import BufferSize, FlatBuffers, Placement
from megatron_burst.errors import BurstError, DisagreementError
from megatron_burst.schedule.spec import Cargo
from megatron_burst.schedule.topology import Link

if TYPE_CHECKING:  # loaded where ranks share a node
    from megatron_burst.comm.symmetric import SymmetricPool

_CALLS = 128  # calls whose programs are cached
_SAMPLES = 8  # micro-batches in flight
_SAME = -1.0  # keep the time-out
_CONNECT_S = 60  # within which ranks must reach each other over gloo
type Names = tuple[Link, Cargo]
# State is dropped when its group is.
_STATES: WeakKeyDictionary[dist.ProcessGroup, "Group"] = WeakKeyDictionary()


class SubGroups:
    """Sub-groups of a group, one for each set of ranks, cargo and thread blocks.

    Creating one can take seconds, so configurations share them. Their time-out is that of the
    group's board. They are destroyed with the group: see `state_of`.
    """

    def __init__(self, group: dist.ProcessGroup, board: StoreConsensus) -> None:
        self._ranks, self._backend = dist.get_process_group_ranks(group), backend_of(group)
        self._board, self._timeout_s = board, 0.0
        self._made: dict[tuple, dist.ProcessGroup] = {}
        self._number = 0  # of groups that were made
        self._beside: list[dist.ProcessGroup] = []
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
        for place in self._missing_on_any_rank(lacking):
            ranks = [self._ranks[rank] for rank in wanted[names[place]]]
            made = self._new(ranks, self._timeout_s, self._backend, self._bounded(ctas))
            self._made[keys[names[place]]] = made
        return {name: self._made[key] for name, key in keys.items()}

    def for_spot_checks(self) -> dist.ProcessGroup:
        """A gloo group of all ranks, for what bypasses the GPUs; all ranks call it together.

        Its time-out is twice that of others, because gloo's errors name no ranks.
        """
        self._missing_on_any_rank([0])
        made = self._new(self._ranks, _CONNECT_S, "gloo")
        set_seconds(made, 2 * self._board.timeout_s)
        self._beside.append(made)
        return made

    def _missing_on_any_rank(self, lacking: Sequence[int]) -> list[int]:
        """The groups that any rank lacks; all ranks call it together."""
        everyones = [json.loads(text) for text in self._board.all_gather(json.dumps(lacking), WHO)]
        return sorted({place for theirs in everyones for place in theirs})

    def _bounded(self, ctas: int | None) -> Any:
        """NCCL's options of a group whose transfers have at most so many thread blocks."""
        if self._backend != "nccl":
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if ctas is not None:
            options.config.max_ctas = options.config.min_ctas = ctas
        return options

    def _new(
        self, ranks: Sequence[int], timeout_s: float, backend: str, options: Any = None
    ) -> dist.ProcessGroup:
        """A new group of some of the ranks; only its members call it."""
        self._number += 1
        limit, of = timedelta(seconds=timeout_s), "-".join(map(str, sorted(ranks)))
        with _named(f"{self._board.name}/{self._number}/{of}"):
            return dist.new_group(ranks, limit, backend, options, use_local_synchronization=True)

    def follow(self) -> None:
        """Adopt the board's time-out: the user's, or the group's current one."""
        if self._timeout_s != self._board.timeout_s:
            self._timeout_s = self._board.timeout_s
            for group in self._made.values():
                set_seconds(group, self._timeout_s)
            for group in self._beside:
                set_seconds(group, 2 * self._timeout_s)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Have torch give a new group this name, under which its members find each other.

    torch's own names count the groups of a process, so ranks with other groups would wait for each
    other forever, and a group could get the name of one that was destroyed.
    """
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


class GroupMemory:
    """The buffers of a group's calls on this rank, which use them one after the other."""

    def __init__(self) -> None:
        self._made: dict[Hashable, FlatBuffers] = {}
        self._held: defaultdict[Hashable, BufferSize] = defaultdict(BufferSize)
        self._stream: torch.cuda.Stream | None = None  # of the latest call

    def of(self, use: Hashable, count: int, num_bytes: int, where: Placement) -> FlatBuffers:
        """As `Transport.buffers`."""
        held = self._held[use]
        memory = None if held.changes(count, num_bytes) else self._made.get(use)
        if memory is None:
            self._made.pop(use, None)  # free it before allocating others
            count, num_bytes = held.size
            try:
                made = [_bytes(num_bytes, where.device) for _ in range(count)]
            except RuntimeError:
                del self._held[use]  # what the next call needs may fit
                raise
            memory = self._made[use] = FlatBuffers(made, where)
        if memory.placement != where:  # once freed, they must not be used before this call is over
            for flat in memory.flats:
                flat.record_stream(torch.cuda.current_stream(where.device))
        return memory

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Let a call on this stream begin when the latest one, if on another, is over."""
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def release(self) -> None:
        """Free all of it; the next call allocates it again."""
        self._made.clear()
        self._held.clear()


@torch.inference_mode(False)  # kept: training after an evaluation writes to it
def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


@dataclass(slots=True)
class Group:
    """All that lives as long as a process group, on this rank."""

    consensus: StoreConsensus  # out-of-band agreement of its ranks
    sub_groups: SubGroups  # shared by its communicators
    memory: GroupMemory = field(default_factory=GroupMemory)  # likewise
    communicators: dict[Hashable, Any] = field(default_factory=dict)  # by how they carry data
    # results for calls that ranks agreed on and accepted, for when they are repeated
    resolved: BoundedDict[Hashable, Any] = field(default_factory=partial(BoundedDict, _CALLS))
    logged: BoundedDict[Hashable, None] = field(
        default_factory=partial(BoundedDict, _CALLS)
    )  # choices
    samples: BoundedDict[Hashable, Any] = field(
        default_factory=partial(BoundedDict, _SAMPLES)
    )  # packed
    # its ranks' pass log; None before the first communicator, and for a single rank
    log: DesyncDetector | None = None
    sharded: tuple[str, bool, int] | None = None  # layout, packed, tokens: of the last `shard`

    def agree(
        self, terms: Mapping[str, str], who: str, key: Hashable = None, problem: str = "",
        of: ParallelKind = CP,
    ) -> bool:  # fmt: skip
        """As `StoreConsensus.agree`, for a call; returns whether ranks have compared its terms now.
        With a detector they do so once per key, by default the terms: ranks that know the key also
        hear of a rank that does not, or that refuses the call.

        A call gathers its terms and its problem without raising, and comes here first. So what is
        wrong on one rank is an error on all of them, before anything is computed or sent.
        """
        key = tuple(terms.items()) if key is None else key
        if not (self.log and self.consensus.has_agreed(key)):
            PassAnnouncer(self.log, {**terms, PROBLEM: problem} if problem else terms).begin(
                PassKind.AGREEMENT
            )
            self.consensus.agree(terms, who, key, problem, of)
            return True
        if problem:
            self.refuse(BurstError(problem))
        return False

    def refuse(self, error: Exception, terms: Mapping[str, str] | None = None) -> NoReturn:
        """Give up a call that ranks have agreed on, before its pass; others in it are told.

        Raises:
            DisagreementError: if others make the call, and stamps are waited for.
            Exception: otherwise, this error.
        """
        if self.log and not isinstance(error, BurstError):
            self.log.fail(error)
        elif isinstance(error, BurstError) and not isinstance(error, DisagreementError):
            marks = PassAnnouncer.of(self.log, terms or {})
            replace(marks, terms={**marks.terms, PROBLEM: str(error)}).begin(PassKind.REFUSAL)
        try:
            raise error
        finally:
            del error  # whose traceback has this frame: else tensors live until the collector runs

    def open_log(self, group: dist.ProcessGroup, who: str = WHO, of: ParallelKind = CP) -> None:
        """Have the group's ranks compare their passes from now on; all ranks call it together.

        `who`, `of`: word its errors.
        """
        try:
            beside, on_cpu = self.sub_groups.for_spot_checks(), backend_of(group) == "gloo"
            self.log = DesyncDetector(
                beside, group.get_group_store(), self.consensus, on_cpu, who, of
            )
        except RuntimeError as error:
            raise BurstError(
                f"{WHO}: ranks must reach each other over gloo, because before each pass they "
                "compare what they are about to run, whatever backend carries the data; got "
                f"{str(error).splitlines()[0]}; set GLOO_SOCKET_IFNAME to a network interface "
                "that reaches all nodes"
            ) from error


def state_of(group: dist.ProcessGroup, timeout_s: float | None = _SAME) -> Group:
    """The state of a group; made at first use.

    `timeout_s`: seconds to wait for other ranks from now on; None: as the group's operations do;
    left out: as before.
    """
    state = _STATES.get(group)
    if state is None:
        _drop_destroyed(group)
        board = StoreConsensus(group, None if timeout_s == _SAME else timeout_s)
        state = _STATES[group] = Group(board, SubGroups(group, board))
    if timeout_s != _SAME:
        state.consensus.own_timeout_s = timeout_s
    state.sub_groups.follow()
    return state


def _drop_destroyed(new: dist.ProcessGroup) -> None:
    """Drop the state of destroyed groups that are still referenced; destroy their sub-groups, which
    torch would keep, with their threads and connections.

    NCCL destroys a communicator when all its ranks do, so only those whose ranks are all here: in
    the first call of a new group.
    """
    world = distributed_c10d._world
    for group in [group for group in _STATES if group not in world.pg_map]:
        del _STATES[group]
    owners = tuple(f"{state.consensus.name}/" for state in _STATES.values() if state.consensus.name)
    here = set(dist.get_process_group_ranks(new))
    for group, name in [*world.pg_names.items()]:
        if not name.startswith(f"{PREFIX}/") or name.startswith(owners):
            continue
        if here.issuperset(dist.get_process_group_ranks(group)):
            dist.destroy_process_group(group)


def release_buffers(group: dist.ProcessGroup) -> None:
    """Free the memory that a group's communicators hold; all its ranks call it together."""
    if group in _STATES:
        _STATES[group].memory.release()
        for pool in _STATES[group].sub_groups.pools.values():
            pool.release()


def symmetric_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of a group's symmetric memory on this rank, which torch's allocators do not count."""
    pools = _STATES[group].sub_groups.pools.values() if group in _STATES else ()
    return sum(pool.num_bytes for pool in pools)


def log_of(group: dist.ProcessGroup | None) -> DesyncDetector | None:
    """The pass log of a group; None if it has none yet, or a single rank."""
    return _STATES[group].log if group in _STATES else None


def check_in_step(group: dist.ProcessGroup) -> None:
    """Check that all ranks of a context-parallel group have made the same calls so far.

    Each call checks the calls before it, and an optimizer of torch's checks all of them before it
    writes weights. This function checks the last ones where no optimizer steps, such as after an
    evaluation. All ranks call it together. It waits for their CPUs, not for their GPUs.

    Raises:
        BurstError: on all ranks, naming the ranks that made other calls.
    """
    PassAnnouncer(log_of(group)).begin(PassKind.END)
