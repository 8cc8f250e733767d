"""What lives as long as a process group: sub-groups, buffers, pass log, calls agreed on."""

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn
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

_CALLS = 128  # calls whose programs are cached
_SAMPLES = 8  # micro-batches in flight
_SAME = -1.0  # keep the time-out
_CONNECT_S = 60  # within which ranks must reach each other over gloo
type Names = tuple[Link, Cargo]
type Sharded = tuple[str, bool, int]  # layout, whether packed, and tokens, of a `shard`
# an entry is dropped with its group
_STATES: WeakKeyDictionary[dist.ProcessGroup, "Group"] = WeakKeyDictionary()


class SubGroups:
    """Sub-groups of a group, one for each set of ranks, cargo and thread blocks.

    Creating one can take seconds, so configurations share them. They have the time-out of the
    group's consensus, and are destroyed with the group: see `_drop_destroyed`.
    """

    def __init__(self, group: dist.ProcessGroup, consensus: StoreConsensus) -> None:
        self._ranks, self._backend = dist.get_process_group_ranks(group), backend_of(group)
        self._consensus, self._timeout_s = consensus, 0.0
        self._groups: dict[tuple, dist.ProcessGroup] = {}
        self._number = 0  # of groups that were made
        self._gloo_groups: list[dist.ProcessGroup] = []
        self.pools: dict[str, Any] = {}  # `SymmetricPool`s, by the name of a sub-group

    def obtain(
        self, ranks_of: Mapping[Names, Sequence[int]], ctas: int | None
    ) -> dict[Names, dist.ProcessGroup]:
        """Sub-groups of these cp ranks, by name; all ranks of the group call it together. `ctas`:
        thread blocks of a transfer, at most; None: NCCL's choice."""
        keys = {name: (*sorted(ranks), name[1], ctas) for name, ranks in ranks_of.items()}
        names = list(ranks_of)
        missing = [index for index, name in enumerate(names) if keys[name] not in self._groups]
        for name in [names[place] for place in self._missing_on_any_rank(missing)]:
            ranks, options = [self._ranks[rank] for rank in ranks_of[name]], self._bounded(ctas)
            self._groups[keys[name]] = self._new(ranks, self._timeout_s, self._backend, options)
        return {name: self._groups[key] for name, key in keys.items()}

    def for_spot_checks(self) -> dist.ProcessGroup:
        """A gloo group of all ranks; all of them call it together. Its time-out is twice that of
        other groups, because gloo's errors name no ranks."""
        self._missing_on_any_rank([0])
        group = self._new(self._ranks, _CONNECT_S, "gloo")
        set_seconds(group, 2 * self._consensus.timeout_s)
        self._gloo_groups.append(group)
        return group

    def _missing_on_any_rank(self, missing: Sequence[int]) -> list[int]:
        """The groups that any rank lacks; all ranks call it together."""
        texts = self._consensus.all_gather(json.dumps(missing), WHO)
        return sorted({index for text in texts for index in json.loads(text)})

    def _bounded(self, ctas: int | None) -> Any:
        """Options of a group whose transfers have at most so many thread blocks; of NCCL only."""
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
        limit, members = timedelta(seconds=timeout_s), "-".join(map(str, sorted(ranks)))
        with _named(f"{self._consensus.name}/{self._number}/{members}"):
            return dist.new_group(ranks, limit, backend, options, use_local_synchronization=True)

    def follow_timeout(self) -> None:
        """Adopt the time-out of the group's consensus."""
        if self._timeout_s != self._consensus.timeout_s:
            self._timeout_s = self._consensus.timeout_s
            for group in self._groups.values():
                set_seconds(group, self._timeout_s)
            for group in self._gloo_groups:
                set_seconds(group, 2 * self._timeout_s)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Have torch give a new group this name, under which its members find each other.

    torch's own names count the groups of a process. Ranks with different groups would wait for each
    other forever, and a group could get the name of a destroyed one.
    """
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


class GroupMemory:
    """The buffers that the calls of a group use on this rank, one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, FlatBuffers] = {}
        self._sizes: defaultdict[Hashable, BufferSize] = defaultdict(BufferSize)
        self._stream: torch.cuda.Stream | None = None  # of the latest call

    def buffers(self, use: Hashable, count: int, nbytes: int, placement: Placement) -> FlatBuffers:
        """As `Transport.buffers`."""
        largest = self._sizes[use]
        memory = None if largest.changes(count, nbytes) else self._buffers.get(use)
        if memory is None:
            self._buffers.pop(use, None)  # before allocating the new ones
            count, nbytes = largest.size
            try:
                flats = [_bytes(nbytes, placement.device) for _ in range(count)]
            except RuntimeError:
                del self._sizes[use]  # the next call may need less
                raise
            memory = self._buffers[use] = FlatBuffers(flats, placement)
        if memory.placement != placement:  # if freed, not to be reused before this call is over
            for flat in memory.flats:
                flat.record_stream(torch.cuda.current_stream(placement.device))
        return memory

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Make this stream wait for the latest call, if that was on another stream."""
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def release(self) -> None:
        """Free the buffers; the next call allocates them again."""
        self._buffers.clear()
        self._sizes.clear()


@torch.inference_mode(False)  # because training after an evaluation writes to them
def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


@dataclass(slots=True)
class Group:
    """All that lives as long as a process group, on this rank."""

    consensus: StoreConsensus
    sub_groups: SubGroups  # shared by its communicators
    memory: GroupMemory = field(default_factory=GroupMemory)  # likewise
    communicators: dict[Hashable, Any] = field(default_factory=dict)  # by options of transfers
    # `Passes` of calls that ranks agreed on and accepted
    resolved: BoundedDict[Hashable, Any] = field(default_factory=lambda: BoundedDict(_CALLS))
    # choices that were logged
    logged: BoundedDict[Hashable, None] = field(default_factory=lambda: BoundedDict(_CALLS))
    # packed samples
    samples: BoundedDict[Hashable, Any] = field(default_factory=lambda: BoundedDict(_SAMPLES))
    log: DesyncDetector | None = None  # None before the first communicator, and for a single rank
    sharded: Sharded | None = None  # of the last `shard`

    def agree(
        self, terms: Mapping[str, str], caller: str, key: Hashable = None, problem: str = "",
        kind: ParallelKind = CP,
    ) -> bool:  # fmt: skip
        """Agree on a call as `StoreConsensus.agree`; returns whether ranks compared its terms now.

        With a log they do so once per key, by default the terms. The log then tells ranks that
        agreed on the key before of a rank that did not, or that refuses the call. A call collects
        its terms and its problem without raising, and agrees before anything is computed or sent:
        so what is wrong on one rank is an error on all of them.
        """
        key = tuple(terms.items()) if key is None else key
        if not (self.log and self.consensus.has_agreed(key)):
            announced = {**terms, PROBLEM: problem} if problem else terms
            PassAnnouncer(self.log, announced).begin(PassKind.AGREEMENT)
            self.consensus.agree(terms, caller, key, problem, kind)
            return True
        if problem:
            self.refuse(BurstError(problem))
        return False

    def refuse(self, error: Exception, terms: Mapping[str, str] | None = None) -> NoReturn:
        """Give up a call that ranks have agreed on, before its pass, and announce that. Raises the
        error; DisagreementError if other ranks make the call, and stamps are waited for."""
        if self.log and not isinstance(error, BurstError):
            self.log.fail(error)
        elif isinstance(error, BurstError) and not isinstance(error, DisagreementError):
            announcer = PassAnnouncer.of(self.log, terms or {})
            announced = replace(announcer, terms={**announcer.terms, PROBLEM: str(error)})
            announced.begin(PassKind.REFUSAL)
        try:
            raise error
        finally:
            del error  # its traceback has this frame: tensors would live until garbage collection

    def open_log(
        self, group: dist.ProcessGroup, caller: str = WHO, kind: ParallelKind = CP
    ) -> None:
        """Have the group's ranks compare their passes from now on; all ranks call it together."""
        try:
            gloo_group, on_cpu = self.sub_groups.for_spot_checks(), backend_of(group) == "gloo"
            self.log = DesyncDetector(
                gloo_group, group.get_group_store(), self.consensus, on_cpu, caller, kind
            )
        except RuntimeError as error:
            raise BurstError(
                f"{WHO}: ranks must reach each other over gloo, because before each pass they "
                "compare what they are about to run, whatever backend carries the data; got "
                f"{str(error).splitlines()[0]}; set GLOO_SOCKET_IFNAME to a network interface "
                "that reaches all nodes"
            ) from error


def state_of(group: dist.ProcessGroup, timeout_s: float | None = _SAME) -> Group:
    """The state of a group; made at first use. `timeout_s`: seconds to wait for other ranks from
    now on; None: the group's own time-out; if not passed, as before."""
    state = _STATES.get(group)
    if state is None:
        _drop_destroyed(group)
        consensus = StoreConsensus(group, None if timeout_s == _SAME else timeout_s)
        state = _STATES[group] = Group(consensus, SubGroups(group, consensus))
    if timeout_s != _SAME:
        state.consensus.own_timeout_s = timeout_s
    state.sub_groups.follow_timeout()
    return state


def _drop_destroyed(new: dist.ProcessGroup) -> None:
    """In the first call of a new group, drop the state of destroyed groups, and destroy their
    sub-groups, whose threads and connections torch would keep. NCCL waits for all ranks of what is
    destroyed, so only sub-groups inside the new group are."""
    world = distributed_c10d._world
    for group in [group for group in _STATES if group not in world.pg_map]:
        del _STATES[group]
    owners = tuple(f"{state.consensus.name}/" for state in _STATES.values() if state.consensus.name)
    local_ranks = set(dist.get_process_group_ranks(new))
    for group, name in [*world.pg_names.items()]:
        if not name.startswith(f"{PREFIX}/") or name.startswith(owners):
            continue
        if local_ranks.issuperset(dist.get_process_group_ranks(group)):
            dist.destroy_process_group(group)


def release_buffers(group: dist.ProcessGroup) -> None:
    """Free the memory of a group's communicators; all its ranks call it together."""
    if group in _STATES:
        _STATES[group].memory.release()
        for pool in _STATES[group].sub_groups.pools.values():
            pool.release()


def symmetric_bytes(group: dist.ProcessGroup) -> int:
    """Bytes of a group's symmetric memory on this rank; torch's allocators do not count them."""
    pools = _STATES[group].sub_groups.pools.values() if group in _STATES else ()
    return sum(pool.num_bytes for pool in pools)


def log_of(group: dist.ProcessGroup | None) -> DesyncDetector | None:
    """The pass log of a group; None before its first call, and for a single rank."""
    return _STATES[group].log if group in _STATES else None


def check_in_step(group: dist.ProcessGroup) -> None:
    """Check that all ranks of a context-parallel group have made the same calls so far.

    Each call checks the calls before it, and torch's optimizers check all calls before they write
    weights. This function checks the last calls where no optimizer steps, such as after an
    evaluation. All ranks call it together. It waits for their CPUs, not for their GPUs.

    Raises:
        BurstError: on all ranks, naming the ranks that made other calls.
    """
    PassAnnouncer(log_of(group)).begin(PassKind.END)
