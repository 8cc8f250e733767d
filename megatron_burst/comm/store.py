"""Out-of-band agreement of ranks, through the process group's store.

A collective would hang if only some ranks took part; the store shows which ranks are missing.
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

from megatron_burst.errors import BurstError, DisagreementError

WHO = "burst attention"
PREFIX = "megatron_burst"  # of keys in stores and names of groups
_POLL_S = 0.005
_AGREEMENTS = 256  # a model has a few configurations
PROBLEM = "problem"  # the term that says why a rank refuses a call


class ParallelKind(NamedTuple):
    """The words of errors about a kind of group."""

    group: str
    rank: str
    reason: str  # why ranks must do the same
    changes: Mapping[str, str] = {}  # by term, what to change if ranks differ in it


CP = ParallelKind("context-parallel", "cp rank", "they send each other shards")
TP = ParallelKind(
    "tensor-parallel", "tp rank", "each computes its part of every token's logits",
    {"weight": "pad the vocabulary until tp divides it (--make-vocab-size-divisible-by)"},
)  # fmt: skip


class BoundedDict[K, V](dict[K, V]):
    """A dictionary that evicts its oldest entries: the same ones on ranks that insert the same."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._capacity:
            del self[next(iter(self))]

    def recent(self, key: K) -> V | None:
        """The value of a key, whose entry becomes the newest; None if missing."""
        value = self.get(key)
        if value is not None and value is not next(reversed(self.values())):
            super().__setitem__(key, self.pop(key))
        return value


class StoreConsensus:
    """All-gathers texts over a group's store; all ranks make the same calls in the same order.

    Texts that all ranks have read are deleted. Keys begin with a name that is unique in the store,
    so what a destroyed group left there is never read.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None = None) -> None:
        # a weak reference: groups live as long as their users want
        self._group, self._store = ref(group), group.get_group_store()
        self._rank, self._size = group.rank(), group.size()
        self.own_timeout_s = timeout_s  # None: the group's
        self.name, self._posts = "", 0  # the name is empty until the first post
        self._agreed: BoundedDict[Hashable, None] = BoundedDict(_AGREEMENTS)

    @property
    def timeout_s(self) -> float:
        """Seconds that this rank waits for other ranks."""
        if self.own_timeout_s is not None:
            return self.own_timeout_s
        group = self._group()
        return seconds_of(group) if group is not None else 0.0

    def all_gather(self, text: str, caller: str, kind: ParallelKind = CP) -> list[str]:
        """The texts of all ranks, by rank. Raises BurstError, which `caller` begins and `kind`
        words, naming the ranks that posted nothing in time."""
        if self._size == 1:
            return [text]
        if not self.name:
            self.name = self._obtain_name(caller, text, kind)
        keys = self.keys()
        read = f"{self.name}/{self._posts}/read"
        self._posts += 1
        self._store.set(keys[self._rank], text)
        is_first = self._rank == 0 and self._posts == 1
        missing = self._publish_name(keys) if is_first else self._wait(keys)
        if missing:
            raise self._missing_ranks(missing, caller, text, kind)
        texts = [value.decode() for value in self._store.multi_get(keys)]
        if self._store.add(read, 1) == self._size:
            for key in (*keys, read):
                self._store.delete_key(key)
        return texts

    def agree(
        self, terms: Mapping[str, str], caller: str, key: Hashable = None, problem: str = "",
        kind: ParallelKind = CP,
    ) -> None:  # fmt: skip
        """Make sure that all ranks have the same terms and that none refuses the call.

        Args:
            terms: texts by name.
            key: for `has_agreed`; equal on ranks with equal terms.
            problem: the sentence with which this rank refuses the call; "" if it does not.
            caller, kind: as in `all_gather`.

        Raises:
            BurstError: on all ranks, with the first rank's problem.
            DisagreementError: on all ranks, naming the first term that differs.
        """
        own = dict(terms) | ({PROBLEM: problem} if problem else {})
        posts = [json.loads(text) for text in self.all_gather(json.dumps(own), caller, kind)]
        for rank, post in enumerate(posts):
            if refusal := post.get(PROBLEM):
                raise BurstError(f"{refusal} ({kind.rank} {rank})")
        for rank, post in enumerate(posts):
            if post != own:
                term = next(key for key in [*own, *post] if own.get(key) != post.get(key))
                change = kind.changes.get(term, "give all ranks the same shapes and options")
                raise DisagreementError(
                    f"{caller}: all ranks of a {kind.group} group must call with the same shapes "
                    f"and options, because {kind.reason}; got {term}={own.get(term)} on {kind.rank}"
                    f" {self._rank} and {term}={post.get(term)} on {kind.rank} {rank}; {change}"
                )
        self._agreed[key] = None

    def has_agreed(self, key: Hashable) -> bool:
        """Whether ranks have agreed on terms with this key."""
        return key in self._agreed

    def _obtain_name(self, caller: str, text: str, kind: ParallelKind) -> str:
        """The common name: rank 0 makes it, and publishes it under the token of each rank."""
        token = uuid4().hex
        if self._rank == 0:
            return f"{PREFIX}/{token}"
        self._store.set(f"{PREFIX}/request/{self._rank}", token)
        reply = f"{PREFIX}/name/{token}"
        if self._wait([reply]):
            raise self._missing_ranks([0], caller, text, kind)
        return self._store.get(reply).decode()

    def _publish_name(self, keys: list[str]) -> list[int]:
        """Answer requests for the name until all ranks have posted; returns those that did not in
        time. A request may be that of an earlier group, so requests are read again until then."""
        end, replies = time.monotonic() + self.timeout_s, set()
        requests = [f"{PREFIX}/request/{rank}" for rank in range(self._size)]
        missing = list(range(self._size))
        while missing := [rank for rank in missing if not self._store.check([keys[rank]])]:
            pending = [requests[rank] for rank in missing if self._store.check([requests[rank]])]
            fresh = {f"{PREFIX}/name/{self._store.get(key).decode()}" for key in pending}
            for reply in fresh - replies:
                self._store.set(reply, self.name)
            replies |= fresh
            if time.monotonic() > end:
                return missing
            time.sleep(_POLL_S)
        for key in (*requests, *replies):
            self._store.delete_key(key)
        return []

    def _wait(self, keys: list[str]) -> list[int]:
        """Wait for keys; returns the indices of keys that are missing after the time-out."""
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError:  # raised by FileStore; TCPStore raises a subclass
            return [index for index, key in enumerate(keys) if not self._store.check([key])]
        return []

    def _missing_ranks(
        self, ranks: list[int], caller: str, text: str, kind: ParallelKind
    ) -> BurstError:
        return BurstError(
            f"{caller}: all ranks of a {kind.group} group must make the same calls, because "
            f"{kind.reason}; got no word from {kind.rank}s {ranks} within {self.timeout_s:g} s "
            f"about {text}; check that they run and that their batches have the same shape"
        )

    def keys(self) -> list[str]:
        """Keys of the next texts, by rank."""
        return [f"{self.name}/{self._posts}/{rank}" for rank in range(self._size)]


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend of a group's tensors, such as "nccl" or "gloo"; of two, the GPU's.

    Unlike `dist.get_backend` also for groups made without a backend, or with one for CPUs and one
    for GPUs, and under TORCH_DISTRIBUTED_DEBUG=DETAIL.
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
    if more:  # looking for GPUs takes time, and this runs in every call
        kinds = {device.type: device for device in (device, *more)}
        device = kinds["cuda"] if "cuda" in kinds and torch.cuda.is_available() else kinds["cpu"]
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)
