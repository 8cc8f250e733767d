"""What ranks tell each other at the beginning of a pass, and what differs."""

import json
import os
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from megatron_burst.comm.store import CP, WHO, ParallelKind, StoreConsensus

if TYPE_CHECKING:
    from megatron_burst.schedule.program import Program

_RUNS = 64  # passes that a CPU may be ahead of its GPU


class PassKind(IntEnum):
    """What a stamp announces; in words below, in the same order."""

    AGREEMENT, FORWARD, BACKWARD, EARLY_ROWS, END = range(5)
    REFUSAL, FAILURE, KEPT, CHECK, OVER = range(5, 10)


KIND_TEXTS = (
    "a call that is new to it", "a forward", "the backward of", "the recomputation of early rows",
    "the end of a step", "a call that it refuses", "a pass that failed",
    "a forward whose results are kept for recomputation", "the check of a call",
    "the end of a backward",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a rank begins; packs into 16 bytes, of which ranks compare a number."""

    kind: PassKind
    call: int  # of a backward, the number of its forward; of anything else, its own
    layer: int  # the caller's number; 0 if it gave none
    digest: int  # of the call's terms

    def packed(self) -> tuple[int, int]:
        """As two 64-bit integers."""
        return self.call << 24 | (self.layer & 0xFFFFF) << 4 | self.kind, self.digest

    @classmethod
    def of(cls, what: int, digest: int) -> "Stamp":
        """Unpack a stamp."""
        return cls(PassKind(what & 0xF), what >> 24, what >> 4 & 0xFFFFF, digest)

    def fingerprint(self, size: int) -> int:
        """A number that differs if stamps do, so small that the sum of `size` of them is exact.
        Python hashes integers alike in all processes."""
        return (hash(self.packed()) & (1 << 63) - 1) >> size.bit_length()

    @property
    def word(self) -> str:
        """Its kind in a word, such as "forward"."""
        return self.kind.name.lower().replace("_", " ")

    def __str__(self) -> str:
        words = KIND_TEXTS[self.kind]
        if self.kind is PassKind.BACKWARD:
            words += f" pass {self.call}"
        return words + (f" in layer {self.layer}" if self.layer else "")


class RunningPass(NamedTuple):
    """A pass whose operations are issued."""

    number: int
    stamp: Stamp
    program: "Program"  # of this rank
    unit: int  # how many rows one row of the program stands for
    handles: list[Any]  # handles by operation, and of what came before; emptied when all is over
    waits: Sequence[Sequence[int]]  # by operation, which others must finish first


@dataclass(slots=True)
class PendingPass:
    """A pass that has begun."""

    number: int
    stamp: Stamp
    terms: Mapping[str, str]
    fingerprint: int  # of the stamp
    fingerprints: array  # of all ranks, or their sum; once the work is over
    work: dist.Work
    begin_s: float  # when, in seconds of the monotonic clock
    is_posted: bool = False  # whether others can read its terms


class PostedTerms(NamedTuple):
    """What a rank posts of a pass that not all ranks began alike.

    Attributes:
        stamp: None if it is not known.
        terms: of its call.
    """

    stamp: Stamp | None
    terms: Mapping[str, str]


class Members:
    """The ranks of a group that compare their passes, and what this one has begun.

    Args:
        group: a gloo group of all ranks, for stamps only; made by all of them together.
        store: shared by all of them; empty as long as they are in step.
        board: of the group; its time-out is how long a rank waits for others.
        waits: whether stamps are waited for where a pass begins.
        who, of: word its errors.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, board: StoreConsensus, waits: bool,
        who: str = WHO, of: ParallelKind = CP,
    ) -> None:  # fmt: skip
        self.group, self.store, self.consensus, self.waits = group, store, board, waits
        self.rank, self.size, self.who, self.parallel_kind = group.rank(), group.size(), who, of
        self.number, self.stamp = 0, Stamp(PassKind.END, 0, 0, 0)  # of the latest pass
        # a name of its own: keys of a group that was destroyed may still be in the store
        self.name = f"megatron_burst/passes/{board.all_gather(os.urandom(8).hex(), who, of)[0]}"
        self.runs: deque[RunningPass] = deque(maxlen=_RUNS)  # the latest
        self.ranks = dist.get_process_group_ranks(group)  # in the job
        self.nodes: tuple[int, ...] = ()  # of the ranks, if known

    def post_terms(self, entry: PendingPass) -> None:
        """Let others read this rank's terms of a pass."""
        self.store.set(self.key(entry), json.dumps([entry.stamp.packed(), dict(entry.terms)]))
        entry.is_posted = True

    def posted_terms(self, key: str) -> PostedTerms | None:
        """What a rank has posted under its key; None: nothing yet."""
        if not self.store.check([key]):
            return None
        stamp, terms = json.loads(self.store.get(key))
        return PostedTerms(Stamp.of(*stamp), terms)

    def key(self, entry: PendingPass) -> str:
        """Where these terms are."""
        return f"{self.name}/{entry.number}/{self.rank}"

    def alarm(self, entry: PendingPass) -> str:
        """The key that is there if a rank has given up a pass."""
        return f"{self.name}/{entry.number}/alarm"

    def waiting(self, rank: int) -> str:
        """The key that is there if a rank waits in some pass."""
        return f"{self.name}/waiting/{rank}"
