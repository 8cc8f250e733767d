"""Stamps: what a rank begins, in 16 bytes; and the ranks that compare them."""

import json
import os
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_burst.comm.store import CP, WHO, ParallelKind, StoreConsensus
from megatron_burst.schedule.program import Program

_RUNS = 64  # passes that a CPU may be ahead of its GPU


class PassKind(IntEnum):
    """What a stamp announces; `_TEXTS` has the same order."""

    AGREEMENT, FORWARD, BACKWARD, EARLY_ROWS, END = range(5)
    REFUSAL, FAILURE, RECORDING, CHECK, OVER = range(5, 10)

    @property
    def text(self) -> str:
        """What a rank begins."""
        return _TEXTS[self]


_TEXTS = (
    "the first call of its kind", "a forward", "the backward of", "the recomputation of early rows",
    "the end of a step", "a refused call", "a pass that failed",
    "a forward whose results are kept for recomputation", "the check of a call",
    "the end of a backward",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a rank begins."""

    kind: PassKind
    call: int  # the number of the pass; of a backward, that of its forward
    layer: int  # the caller's number; 0: unknown
    digest: int  # of the call's terms

    def packed(self) -> tuple[int, int]:
        """Two 64-bit integers: call << 24 | layer << 4 | kind, and the digest."""
        return self.call << 24 | (self.layer & 0xFFFFF) << 4 | self.kind, self.digest

    @classmethod
    def of(cls, bits: int, digest: int) -> "Stamp":
        """The stamp that was packed."""
        return cls(PassKind(bits & 0xF), bits >> 24, bits >> 4 & 0xFFFFF, digest)

    def fingerprint(self, size: int) -> int:
        """A hash, the same in all processes, so small that the sum of `size` of them is exact."""
        return (hash(self.packed()) & (1 << 63) - 1) >> size.bit_length()

    @property
    def word(self) -> str:
        """The kind as text, such as "forward"."""
        return self.kind.name.lower().replace("_", " ")

    def __str__(self) -> str:
        words = self.kind.text
        if self.kind is PassKind.BACKWARD:
            words += f" pass {self.call}"
        return words + (f" in layer {self.layer}" if self.layer else "")


class RunningPass(NamedTuple):
    """A pass whose operations are being launched."""

    number: int
    stamp: Stamp
    program: Program  # of this rank
    unit: int  # how many rows one row of the program stands for
    handles: list[Any]  # by operation, and of the work before; emptied once a CPU has finished
    waits: Sequence[Sequence[int]]  # by operation, which other operations must finish first


@dataclass(slots=True)
class PendingPass:
    """A pass that has begun."""

    number: int
    stamp: Stamp
    terms: Mapping[str, str]
    fingerprint: int  # of the stamp
    fingerprints: array  # of all ranks, or their sum; valid once the work is done
    work: dist.Work
    begin_s: float  # of the monotonic clock
    is_posted: bool = False  # whether other ranks can read the terms


class PostedTerms(NamedTuple):
    """What a rank posts of a pass in which stamps differ."""

    stamp: Stamp | None  # None if it is not known
    terms: Mapping[str, str]  # of the call


class Members:
    """The ranks of a group that compare their passes, and this rank's latest passes.

    Args:
        group: a gloo group of all ranks, for stamps only; made by all of them together.
        store: shared by all of them; empty as long as they are in step.
        consensus: of the group; its time-out is how long a rank waits for others.
        waits: whether a pass waits for the stamps of all ranks when it begins.
        caller, kind: begin and word the sentences of errors.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, consensus: StoreConsensus, waits: bool,
        caller: str = WHO, kind: ParallelKind = CP,
    ) -> None:  # fmt: skip
        self.group, self.store, self.consensus, self.waits = group, store, consensus, waits
        self.rank, self.size = group.rank(), group.size()
        self.caller, self.parallel_kind = caller, kind
        self.number, self.stamp = 0, Stamp(PassKind.END, 0, 0, 0)  # of the latest pass
        # unique, because the store may still have keys of a group that was destroyed
        token = consensus.all_gather(os.urandom(8).hex(), caller, kind)[0]
        self.name = f"megatron_burst/passes/{token}"
        self.runs: deque[RunningPass] = deque(maxlen=_RUNS)  # the latest
        self.ranks = dist.get_process_group_ranks(group)  # in the job
        self.nodes: tuple[int, ...] = ()  # of the ranks, if known

    def post_terms(self, entry: PendingPass) -> None:
        """Let other ranks read this rank's terms of a pass."""
        self.store.set(self.terms_key(entry), json.dumps([entry.stamp.packed(), dict(entry.terms)]))
        entry.is_posted = True

    def posted_terms(self, key: str) -> PostedTerms | None:
        """What a rank has posted under its key, if anything."""
        if not self.store.check([key]):
            return None
        stamp, terms = json.loads(self.store.get(key))
        return PostedTerms(Stamp.of(*stamp), terms)

    def terms_key(self, entry: PendingPass) -> str:
        """The key of this rank's terms of a pass."""
        return f"{self.name}/{entry.number}/{self.rank}"

    def abort_key(self, entry: PendingPass) -> str:
        """The key that exists if a rank has given up a pass."""
        return f"{self.name}/{entry.number}/alarm"

    def waiting_key(self, rank: int) -> str:
        """The key that exists if a rank waits for others."""
        return f"{self.name}/waiting/{rank}"
