"""Keeps ranks in step: each rank announces what it begins to all others in 16 bytes.

Ranks out of step would exchange shards of different calls and compute wrong numbers. So every pass
begins with a stamp, sent to all ranks of the group over gloo, apart from the data: no GPU takes
part, and a mismatch is found even if GPU transfers hang. On CPU ranks wait for each other's stamps
before anything is sent, because a gloo receive of another size ends the process. On GPUs nothing
waits: the stamps of a pass are compared when a later one begins, before an optimizer writes
weights, and once a second by a thread, which logs what it finds, as this process may be waiting for
a hung GPU.
"""

import json
import logging
import os
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from time import monotonic, sleep
from weakref import ReferenceType, finalize, ref

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_burst.comm.stamps import IN_WORDS, Kind, Stamp, at_one_place, differences
from megatron_burst.comm.watch import CP, WHO, Board, Parallel
from megatron_burst.errors import BurstError, DisagreementError
from megatron_burst.transforms import uncompiled

_LOOK_S = 0.5  # how often a waiting rank checks whether others have given up
_WATCH_S = 1.0  # how often the thread compares stamps on GPUs
_TELL_S = 5.0  # how long a rank waits for the terms of others whose stamps it has
_GRACE_S = 1.5  # how long it waits for a word of others before it says that they are missing


@dataclass(slots=True)
class _Entry:
    """A pass that has begun, and the stamps of all ranks for it."""

    number: int
    stamp: Stamp
    terms: Mapping[str, str]
    room: "_Room"
    work: dist.Work
    begun: float  # when, in seconds of the monotonic clock
    told: bool = False  # whether others can read its terms


class _Room:
    """Send and receive memory for stamps, which Python writes and reads without torch.

    Attributes:
        mine: this rank's, once for each rank: 64-bit integers.
        stamps: of all ranks.
        tensors: the same memory, (stamps, mine).
    """

    def __init__(self, size: int) -> None:
        self.mine, self.stamps = (array("q", [0] * 2 * size) for _ in range(2))
        self.tensors = tuple(
            torch.frombuffer(x, dtype=torch.int64) for x in (self.stamps, self.mine)
        )


class PassLog:
    """Numbers the passes of this rank and compares them with those of the group's other ranks.

    Args:
        group: a gloo group of all ranks, for stamps only; made by all of them together.
        store: shared by all of them; empty as long as they are in step.
        board: of the group; its time-out is how long a rank waits for others.
        waits: whether stamps are waited for where a pass begins.
        who, of: word its errors.
    """

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, board: Board, waits: bool,
        who: str = WHO, of: Parallel = CP,
    ) -> None:  # fmt: skip
        self._group, self._store, self._waits = group, store, waits
        self._rank, self._size, self._board = group.rank(), group.size(), board
        self._who, self._of, self._number = who, of, 0
        self._pending: deque[_Entry] = deque()
        self._rooms: list[_Room] = []  # free for reuse
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True
        self._broken: BurstError | None = None
        self._lock = threading.Lock()
        # a name of its own: keys of a group that was destroyed may still be in the store
        name = board.share(os.urandom(8).hex(), who, of)[0]
        self._name = f"megatron_burst/passes/{name}"
        self.heard = False  # whether the caller knows why its passes cannot be right
        if not waits:
            threading.Thread(target=_watch, args=(ref(self),), daemon=True).start()
            hook = register_optimizer_step_pre_hook(partial(_before_step, ref(self)))
            finalize(self, hook.remove)

    def begin(
        self, kind: Kind, digest: int, terms: Mapping[str, str], call: int = 0, layer: int = 0
    ) -> int:
        """Begin a pass with a stamp; returns its number, from 1.

        Raises:
            DisagreementError: if ranks have begun different passes: this one if stamps are waited
                for, else an earlier one.
            BurstError: if a rank has not begun it within the time-out, or is lost.
        """
        with self._lock, self._heard():
            self._look()
            self._number += 1
            stamp = Stamp(kind, call or self._number, layer, digest)
            self._post(stamp, terms)
            if self._waits or kind in (Kind.AGREEMENT, Kind.END):
                self._compare()
        return self._number

    def compare(self) -> None:
        """Wait until the passes begun so far are compared; raises as `begin`."""
        with self._lock, self._heard():
            self._look()
            self._compare()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Note that an error reaches the caller."""
        try:
            yield
        except BurstError:
            self.heard = True
            raise

    def _compare(self) -> None:
        while self._pending:
            self._await(self._pending[0])
            self._look()

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this one could not run a pass; waits for nobody.

        Ranks that all say so are in step. Else those that do not raise an error where they look.
        """
        with self._lock:
            if self._broken:
                return
            self._number += 1
            terms = {"failure": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            with suppress(RuntimeError):  # connections or the store may be gone, with a rank
                self._post(Stamp(Kind.FAILURE, self._number, 0, 0), terms)
                self._post_terms(self._pending[-1])

    def end(self, error: BurstError) -> BurstError:
        """Raise an error in all later passes, as none can be right; returns it."""
        self.fail(error)
        with self._lock:
            self._broken = self._broken or error
        return error

    def look(self) -> None:
        """Compare the stamps received so far without waiting; raises as `begin`."""
        with self._lock:
            self._look()

    def _post(self, stamp: Stamp, terms: Mapping[str, str]) -> None:
        room = self._rooms.pop() if self._rooms else _Room(self._size)
        room.mine[:] = array("q", stamp.packed() * self._size)
        # gloo gathers around a ring, rank by rank; an all-to-all sends to all ranks at once
        work = self._group.alltoall_base(*room.tensors, [], [], self._options)
        self._pending.append(_Entry(self._number, stamp, terms, room, work, monotonic()))

    def _look(self) -> None:
        if self._broken:
            raise type(self._broken)(*self._broken.args)
        while self._pending and self._pending[0].work.is_completed():
            entry = self._pending.popleft()
            try:
                entry.work.wait()
            except RuntimeError as error:
                raise self._lost(entry, str(error).splitlines()[0]) from error
            failed = entry.stamp.kind is Kind.FAILURE
            if entry.room.stamps != entry.room.mine:
                # this rank has raised its own error; where stamps are waited for, all are in step
                if not (failed and self._waits):
                    raise self._disagreement(entry)
            elif entry.told:
                self._store.delete_key(self._key(entry))
            self._rooms.append(entry.room)
        if self._pending:
            self._give_up_late(self._pending[0])

    def _await(self, entry: _Entry) -> None:
        alarmed = False
        while not entry.work.is_completed():
            with suppress(RuntimeError):  # not yet; `_look` reports what has failed for good
                entry.work.wait(timedelta(seconds=_LOOK_S))
            if entry.work.is_completed():
                return
            if alarmed:  # and nothing has arrived since
                raise self._lost(entry, "another rank has given up")
            self._give_up_late(entry)
            with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
                alarmed = self._store.check([self._alarm(entry)])

    def _give_up_late(self, entry: _Entry) -> None:
        """Give up a pass that has waited for as long as the time-out. From half of that on its
        terms are in the store, so that ranks that wait are known from those that are missing."""
        waited, limit = monotonic() - entry.begun, self._board.timeout_s
        if waited > limit:
            raise self._lost(entry, f"nothing came within {limit:g} s")
        if waited > limit / 2 and not entry.told:
            with suppress(RuntimeError):
                self._post_terms(entry)

    def _post_terms(self, entry: _Entry) -> None:
        self._store.set(self._key(entry), json.dumps(dict(entry.terms)))
        entry.told = True

    def _key(self, entry: _Entry) -> str:
        return f"{self._name}/{entry.number}/{self._rank}"

    def _alarm(self, entry: _Entry) -> str:
        return f"{self._name}/{entry.number}/alarm"

    def _tell(self, entry: _Entry, patience_s: float) -> list[Mapping[str, str] | None]:
        """Post this rank's terms; returns those of other ranks that post them soon, by rank."""
        keys = [f"{self._name}/{entry.number}/{rank}" for rank in range(self._size)]
        told: list[Mapping[str, str] | None] = [{}] * self._size  # nothing is known
        with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
            self._post_terms(entry)
            self._store.set(self._alarm(entry), "")
            with suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=patience_s))
            for rank, key in enumerate(keys):
                told[rank] = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return told

    def _disagreement(self, entry: _Entry) -> DisagreementError:
        stamps = [Stamp.of(*pair) for pair in zip(*[iter(entry.room.stamps)] * 2, strict=True)]
        told, of = self._tell(entry, _TELL_S), self._of
        others = [stamp for stamp in stamps if stamp.kind is not Kind.FAILURE]
        goes_on = self._waits and at_one_place(others)  # on GPUs some ranks are ahead, or hang
        where = "" if goes_on else ", in a new group, as ranks of this one are not at the same call"
        error = DisagreementError(
            f"{self._who}: all ranks of a {of.group} group must make the same calls in the same "
            f"order, with the same shapes and options, because {of.why}; got, as pass "
            f"{entry.number} of the group, {differences(stamps, told, of)}; pass the same on all "
            f"ranks, and run every forward and every backward on all of them{where}"
        )
        if len(others) < len(stamps):
            error = self._failure(entry, stamps, told)
        self._broken = None if goes_on else error
        return error

    def _failure(
        self, entry: _Entry, stamps: Sequence[Stamp], told: Sequence[Mapping[str, str] | None]
    ) -> DisagreementError:
        """The error if ranks failed."""
        rank_word = self._of.rank
        failed = [
            f"{(terms or {}).get('failure', 'an exception')} on {rank_word} {rank}"
            for rank, (stamp, terms) in enumerate(zip(stamps, told, strict=True))
            if stamp.kind is Kind.FAILURE
        ]
        begun = IN_WORDS[entry.stamp.kind]
        go_on = "catch it on all ranks and repeat the step on all of them"
        if not self._waits:  # transfers may wait for ever
            go_on = "start the processes again"
        return DisagreementError(
            f"{self._who}: a pass must succeed on every rank, because ranks send each other what "
            f"they compute; got {' and '.join(failed)}, while {rank_word} {self._rank} began "
            f"{begun} as pass {entry.number} of the group; look there first, and to go on after "
            f"such an error, {go_on}"
        )

    def _lost(self, entry: _Entry, why: str) -> BurstError:
        of, told = self._of, self._tell(entry, _GRACE_S)
        missing = [rank for rank, terms in enumerate(told) if terms is None]
        whom = f"no word from {of.rank}s {missing}" if missing else "a broken connection"
        self._broken = BurstError(
            f"{self._who}: all ranks of a {of.group} group must take part in every pass, "
            f"because {of.why}; got {whom} in pass {entry.number} of the group, "
            f"{entry.stamp}: {why}; check the output of these ranks first"
        )
        return self._broken


def _watch(log: ReferenceType[PassLog]) -> None:
    """Check a log as long as it lives; log what is found, once."""
    while living := log():
        try:
            living.look()
        except BurstError as error:
            logging.getLogger(__name__).error("%s", error)
            return
        del living
        sleep(_WATCH_S)


@uncompiled
def _before_step(log: ReferenceType[PassLog], *_: object) -> None:
    """Before an optimizer writes weights, wait until all passes so far are compared: gradients may
    come from a pass in which ranks differed. An error that was raised before is not repeated: the
    step may be that of another group."""
    if (living := log()) and not living.heard:
        living.compare()


@dataclass(frozen=True, slots=True)
class Marks:
    """Announces the passes of a call; a no-op without a log."""

    log: PassLog | None = None
    terms: Mapping[str, str] = field(default_factory=dict)
    digest: int = 0

    @classmethod
    def of(cls, log: PassLog | None, terms: Mapping[str, str]) -> "Marks":
        text = json.dumps(dict(terms)).encode()
        return cls(log, terms, int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True))

    def begin(
        self, kind: Kind, call: int = 0, layer: int = 0, data: Mapping[str, str] | None = None
    ) -> int:
        """Begin a pass; returns its number. See `PassLog.begin`; `data`: what else all ranks must
        have in common, as text by name."""
        if not self.log:
            return 0
        if data is None:
            return self.log.begin(kind, self.digest, self.terms, call, layer)
        both = Marks.of(self.log, {**self.terms, **data})
        return self.log.begin(kind, both.digest, both.terms, call, layer)

    def telling(self) -> "Pass":
        """Context that tells the other ranks of an error in it, before the pass that they await."""
        return Pass(self, Kind.FAILURE)


class Pass:
    """A pass of a call on this rank: `begin` announces it; as a context it tells the other ranks
    if it fails.

    Attributes:
        number: of the pass, once it has begun.
    """

    def __init__(self, marks: Marks, kind: Kind, call: int = 0, layer: int = 0) -> None:
        self._marks, self._what, self.number = marks, (kind, call, layer), 0
        self._tells = marks.log is not None

    def begin(self, data: Mapping[str, str] | None = None) -> None:
        """As `Marks.begin`, when this rank has what it needs to take part."""
        tells, self._tells = self._tells, False  # all ranks know what this raises
        self.number = self._marks.begin(*self._what, data)
        self._tells = tells

    def __enter__(self) -> "Pass":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._tells and self._marks.log and isinstance(error, Exception):
            self._marks.log.fail(error)
