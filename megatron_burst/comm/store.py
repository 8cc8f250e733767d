"""Out-of-band agreement of ranks, through the process group's store.

A collective would hang if only one rank had something new to agree on; the store shows who is
missing. Keys carry a name unique to the board, so what a destroyed group left in a store is never
read.
"""

import json
import time
from collections.abc import Hashable, Mapping
from datetime import timedelta
from typing import NamedTuple
from uuid import uuid4
from weakref import ref

import torch
import torch.distributed as dist

from megatron_burst.errors import BurstError

WHO = "burst attention"
PREFIX = "megatron_burst"  # of keys in stores and names of groups
_POLL_S = 0.005
_AGREEMENTS = 256  # a model has a few configurations
PROBLEM = "problem"  # the term that says why a rank refuses a call


class ParallelKind(NamedTuple):
    """What a group is for, in the words of errors."""

    group: str
    rank: str
    reason: str  # its ranks must do the same
    changes: Mapping[str, str] = {}  # what to change where a term differs, if something special


CP = ParallelKind("context-parallel", "cp rank", "they send each other shards")
TP = ParallelKind(
    "tensor-parallel", "tp rank", "each computes its part of every token's logits",
    {"weight": "pad the vocabulary until tp divides it (--make-vocab-size-divisible-by)"},
)  # fmt: skip


class BoundedDict[K, V](dict[K, V]):
    """A dictionary of at most `most` entries, which evicts the oldest.

    Ranks that insert the same entries evict the same ones.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]

    def recent(self, key: K) -> V | None:
        """The value of a key, which becomes the newest; None if missing."""
        value = self.get(key)
        if value is not None and value is not next(reversed(self.values())):
            super().__setitem__(key, self.pop(key))
        return value


class StoreConsensus:
    """A board on which each rank of a group posts texts and reads the others'.

    Posts that all ranks have read are deleted from the store. A board does not keep its group
    alive.

    Args:
        group: the context-parallel group; all its ranks must post the same topics in the same
            order.
        timeout_s: seconds to wait for the others' posts; None: the group's own time-out. May be
            changed later.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None = None) -> None:
        self._group, self._store = ref(group), group.get_group_store()
        self._rank, self._size = group.rank(), group.size()
        self.own_timeout_s = timeout_s
        # unique; empty until the first post
        self.name, self._posts = "", 0
        self._agreed: BoundedDict[Hashable, None] = BoundedDict(_AGREEMENTS)

    @property
    def timeout_s(self) -> float:
        """Seconds that this rank waits for others."""
        if self.own_timeout_s is not None:
            return self.own_timeout_s
        group = self._group()
        return seconds_of(group) if group is not None else 0.0

    def all_gather(self, text: str, who: str, of: ParallelKind = CP) -> list[str]:
        """Post a text; returns the texts of all ranks in rank order.

        `who`, `of`: begin and word the sentence of an error.

        Raises:
            BurstError: naming the ranks that posted nothing in time.
        """
        if self._size == 1:
            return [text]
        if not self.name:
            self.name = self._obtain_name(who, text, of)
        keys = self.keys()
        read = f"{self.name}/{self._posts}/read"
        self._posts += 1
        self._store.set(keys[self._rank], text)
        is_first = self._rank == 0 and self._posts == 1
        if late := self._give_out_name(keys) if is_first else self._wait(keys):
            raise self._missing_ranks(late, who, text, of)
        texts = [found.decode() for found in self._store.multi_get(keys)]
        if self._store.add(read, 1) == self._size:
            for key in (*keys, read):
                self._store.delete_key(key)
        return texts

    def agree(
        self, terms: Mapping[str, str], who: str, key: Hashable = None, problem: str = "",
        of: ParallelKind = CP,
    ) -> None:  # fmt: skip
        """Make sure that all ranks have the same terms and that none refuses the call.

        Args:
            terms: by name.
            who: begins the sentence of an error.
            key: by which `knows` remembers the agreement; equal on ranks with equal terms.
            problem: the sentence with which this rank refuses the call; empty if it does not.
            of: what the group is for.

        Raises:
            BurstError: on all ranks, with the first rank's problem.
            DisagreementError: on all ranks, naming the first term that differs.
        """
        post = dict(terms) | ({PROBLEM: problem} if problem else {})
        everyones = [json.loads(text) for text in self.all_gather(json.dumps(post), who, of)]
        for rank, theirs in enumerate(everyones):
            if wrong := theirs.get(PROBLEM):
                raise BurstError(f"{wrong} ({of.rank} {rank})")
        if any(theirs != post for theirs in everyones):
            from megatron_burst.desync.terms import refuse_differences

            refuse_differences(who, everyones, self._rank, of)
        self._agreed[key] = None

    def has_agreed(self, key: Hashable) -> bool:
        """Whether ranks have agreed on terms with this key. A rank that relies on that leaves out
        an agreement, for which others would wait if they do not know the key."""
        return key in self._agreed

    def _obtain_name(self, who: str, text: str, of: ParallelKind) -> str:
        """The board's name: rank 0 makes it up and gives it to ranks that ask under a new key."""
        mine = uuid4().hex
        if self._rank == 0:
            return f"{PREFIX}/{mine}"
        self._store.set(f"{PREFIX}/hello/{self._rank}", mine)
        answer = f"{PREFIX}/welcome/{mine}"
        if self._wait([answer]):
            raise self._missing_ranks([0], who, text, of)
        return self._store.get(answer).decode()

    def _give_out_name(self, keys: list[str]) -> list[int]:
        """Give out the board's name until all others have posted; returns those that did not in
        time.

        A request may be stale, left by an earlier group, so requests are checked until then.
        """
        end, answers = time.monotonic() + self.timeout_s, set()
        requests = [f"{PREFIX}/hello/{rank}" for rank in range(self._size)]
        late = list(range(self._size))
        while late := [rank for rank in late if not self._store.check([keys[rank]])]:
            asking = [requests[rank] for rank in late if self._store.check([requests[rank]])]
            fresh = {f"{PREFIX}/welcome/{self._store.get(key).decode()}" for key in asking}
            for answer in fresh - answers:
                self._store.set(answer, self.name)
            answers |= fresh
            if time.monotonic() > end:
                return late
            time.sleep(_POLL_S)
        for key in (*requests, *answers):
            self._store.delete_key(key)
        return []

    def _wait(self, keys: list[str]) -> list[int]:
        """Wait for keys; returns the positions of those missing after the time-out."""
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError:  # raised by FileStore; TCPStore raises a subclass
            return [place for place, key in enumerate(keys) if not self._store.check([key])]
        return []

    def _missing_ranks(self, late: list[int], who: str, text: str, of: ParallelKind) -> BurstError:
        return BurstError(
            f"{who}: all ranks of a {of.group} group must make the same calls, because "
            f"{of.reason}; got no word from {of.rank}s {late} within {self.timeout_s:g} s about "
            f"{text}; check that they run and that their batches have the same shape"
        )

    def keys(self) -> list[str]:
        """Keys of the ranks' posts on the next topic."""
        return [f"{self.name}/{self._posts}/{rank}" for rank in range(self._size)]


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend of a group's tensors, such as "nccl" or "gloo"; of two, the GPU's.

    `dist.get_backend` returns "undefined" for a group made without one, and both for a group for
    CPU and GPU; TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    """
    return _backend(group).name()


def seconds_of(group: dist.ProcessGroup) -> float:
    """Seconds after which the group's operations fail."""
    return _backend(group).options._timeout.total_seconds()


def set_seconds(group: dist.ProcessGroup, seconds: float) -> None:
    """Make the group's operations fail after this many seconds."""
    _backend(group)._set_default_timeout(timedelta(seconds=seconds))


def _backend(group: dist.ProcessGroup):
    device, *more = group._device_types
    if more:  # called in every call, so look for GPUs only if it matters
        kinds = {device.type: device for device in (device, *more)}
        device = kinds["cuda"] if "cuda" in kinds and torch.cuda.is_available() else kinds["cpu"]
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)
