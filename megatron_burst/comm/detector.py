"""Keeps ranks in step: all ranks compare what they begin, by 8 bytes of each.

Ranks out of step would exchange shards of different calls and compute wrong numbers. So every pass
begins with a stamp. Its hash is summed over the ranks of the group by gloo, apart from the data: no
GPU takes part, and a mismatch is found even if GPU transfers hang. The sum goes around the ring of
ranks twice, so a rank sends two messages, however many ranks there are. It is over only when all
ranks have begun, and each sees from it whether all are alike. If not, they tell each other their
stamps through the store. On CPU ranks wait for the sum before anything is sent, because a gloo
receive of another size ends the process, and again at the end of a backward, so that all of them
hear of one that failed before anybody writes weights. On GPUs nothing waits: the sum of a pass is
looked at when a later one begins, before an optimizer writes weights, and once a second by a
thread, which logs what it finds, as this process may be waiting for a hung GPU.
"""

import json
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_burst.comm.stamps import Members, PassKind, PendingPass, Stamp
from megatron_burst.errors import BurstError
from megatron_burst.transforms import uncompiled

_POLL_S = 0.5  # how often a waiting rank checks whether others have given up
_EXIT_S = 5.0  # how long a process that ends waits for the thread


class DesyncDetector(Members):
    """Numbers the passes of this rank and compares them with those of the group's other ranks.

    Attributes:
        few: up to so many ranks send their stamps to each other, which is faster than around.
    """

    max_all_to_all_ranks = 4

    def __init__(self, *members: Any) -> None:
        super().__init__(*members)
        self._pending: deque[PendingPass] = deque()
        self._to_each, self._summed = dist.AllToAllOptions(), dist.AllreduceOptions()
        self.later_error: BurstError | None = None  # what later passes raise
        self._lock = threading.Lock()
        self.raised_to_caller = False  # whether the caller knows why its passes cannot be right
        watched = ref(self), (ended := threading.Event()), not self.waits
        (thread := threading.Thread(target=_watch, args=watched, daemon=True)).start()
        finalize(thread, _await_watch, thread.ident)
        finalize(self, ended.set)  # at exit before that, as the later of the two
        if not self.waits:
            hook = register_optimizer_step_pre_hook(partial(_before_step, ref(self)))
            finalize(self, hook.remove)

    def begin(
        self, kind: PassKind, digest: int, terms: Mapping[str, str], call: int = 0, layer: int = 0
    ) -> int:
        """Begin a pass with a stamp; returns its number, from 1.

        Raises:
            DisagreementError: if ranks have begun different passes: this one if stamps are waited
                for, else an earlier one.
            BurstError: if a rank has not begun it within the time-out, or is lost.
        """
        with self._lock, self._noting_errors():
            self._poll()
            self.number += 1
            self.stamp = Stamp(kind, call or self.number, layer, digest)
            self._post(self.stamp, terms)
            if self.waits or kind in (PassKind.AGREEMENT, PassKind.END, PassKind.CHECK):
                self._compare()
        return self.number

    def compare(self) -> None:
        """Wait until the passes begun so far are compared; raises as `begin`."""
        with self._lock, self._noting_errors():
            self._poll()
            self._compare()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Note that an error reaches the caller."""
        try:
            yield
        except BurstError:
            self.raised_to_caller = True
            raise

    def _compare(self) -> None:
        while self._pending:
            self._await(self._pending[0])
            self._poll()

    def fail(self, error: Exception, lost: str = "") -> None:
        """Tell the other ranks that this one could not run a pass; waits for nobody.

        Ranks that all say so are in step. Else those that do not raise an error where they look.

        Args:
            error: of this rank.
            lost: for which ranks it waited in vain, in words, if that is the error.
        """
        with self._lock:
            if self.later_error:
                return
            self._publish_failure(error, lost)
        if not lost:
            from megatron_burst.desync.verdict import own_failure

            own_failure(self, error)

    def _publish_failure(self, error: Exception, lost: str) -> None:
        self.number += 1
        words = [(str(error).splitlines() or [""])[0], *getattr(error, "__notes__", ())]
        terms = {"failure": f"{type(error).__name__}: {', '.join(words)}"}
        terms |= {"lost": lost} if lost else {}
        with suppress(RuntimeError):  # connections or the store may be gone, with a rank
            self._post(Stamp(PassKind.FAILURE, self.number, 0, 0), terms)
            self.post_terms(self._pending[-1])

    def lost_hop(self, error: Exception) -> BurstError:
        """The error of a transfer that failed, which later passes raise too."""
        from megatron_burst.desync.verdict import lost_hop

        return self.end(*lost_hop(self, error))

    def end(self, error: BurstError, lost: str) -> BurstError:
        """Raise `error` in all later passes; returns it. `lost` as in `fail`."""
        self.fail(error, lost)
        with self._lock:
            self._refuse_later_passes(self.later_error or error)
        return error

    def _refuse_later_passes(self, error: BurstError | None) -> None:
        """Have later passes raise this; without its traceback, which holds tensors and groups."""
        self.later_error = error and type(error)(*error.args)

    def poll(self) -> None:
        """Look at what is compared so far, without waiting for more; raises as `begin`."""
        with self._lock:
            self._poll()
            if self._pending and monotonic() - self._pending[0].begin_s > _POLL_S:
                self._check_abort(self._pending[0])

    def _post(self, stamp: Stamp, terms: Mapping[str, str]) -> None:
        sign, few = stamp.fingerprint(self.size), self.size <= self.max_all_to_all_ranks
        mine = array("q", [sign] * (self.size if few else 1))
        signs, tensor = array("q", mine), partial(torch.frombuffer, dtype=torch.int64)
        if few:
            work = self.group.alltoall_base(tensor(signs), tensor(mine), [], [], self._to_each)
        else:
            work = self.group.allreduce([tensor(signs)], self._summed)
        self._pending.append(PendingPass(self.number, stamp, terms, sign, signs, work, monotonic()))

    def _poll(self) -> None:
        if self.later_error:
            raise type(self.later_error)(*self.later_error.args)
        while self._pending and self._pending[0].work.is_completed():
            entry = self._pending.popleft()
            try:
                entry.work.wait()
            except RuntimeError as error:
                raise self._rank_missing(entry, str(error).splitlines()[0]) from error
            if entry.is_posted:
                self.store.delete_key(self.waiting(self.rank))
            if sum(entry.fingerprints) != entry.fingerprint * self.size:
                # this rank has raised its own error; where stamps are waited for, all are in step
                if not (self.waits and entry.stamp.kind is PassKind.FAILURE):
                    raise self._disagreement(entry)
            elif entry.is_posted:
                self.store.delete_key(self.key(entry))
        if self._pending:
            self._check_timeout(self._pending[0])

    def _await(self, entry: PendingPass) -> None:
        while not self._completes_soon(entry):
            self._check_timeout(entry)
            self._check_abort(entry)

    def _completes_soon(self, entry: PendingPass) -> bool:
        """Whether a pass is compared, which this waits for a moment."""
        with suppress(RuntimeError):  # not yet; `_look` reports what has failed for good
            entry.work.wait(timedelta(seconds=_POLL_S))
        return entry.work.is_completed()

    def _check_abort(self, entry: PendingPass) -> None:
        """Give up a pass that another rank gave up: only neighbours miss a rank at once."""
        alarmed = False
        with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
            alarmed = self.store.check([self.alarm(entry)])
        if alarmed and not self._completes_soon(entry):
            raise self._rank_missing(entry, "another rank has given up")

    def _check_timeout(self, entry: PendingPass) -> None:
        """Give up a pass that has waited for as long as the time-out. From half of that on its
        terms are in the store, so that ranks that wait are known from those that are missing."""
        waited, limit = monotonic() - entry.begin_s, self.consensus.timeout_s
        if waited > limit:
            raise self._rank_missing(entry, f"nothing came within {limit:g} s")
        if waited > limit / 2 and not entry.is_posted:
            with suppress(RuntimeError):
                self.post_terms(entry)
                self.store.set(self.waiting(self.rank), "")

    def _disagreement(self, entry: PendingPass) -> BurstError:
        from megatron_burst.desync.differing import disagreement

        error, goes_on = disagreement(self, entry)
        self._refuse_later_passes(None if goes_on else error)
        return error

    def _rank_missing(self, entry: PendingPass, why: str) -> BurstError:
        from megatron_burst.desync.verdict import lost_pass

        error, lost = lost_pass(self, entry, why)
        self._publish_failure(error, lost)  # a rank that comes later
        self._refuse_later_passes(error)
        return error


def _await_watch(ident: int | None) -> None:
    """At exit wait for the thread of a log, also of one that is gone: a C++ call that outlives the
    interpreter ends in abort."""
    if not threading.main_thread().is_alive():
        for thread in threading.enumerate():
            if thread.ident == ident:
                thread.join(_EXIT_S)


def _watch(*watched: Any) -> None:
    from megatron_burst.desync.verdict import watch

    watch(*watched)


@uncompiled
def _before_step(log: ReferenceType[DesyncDetector], *_: object) -> None:
    """Before an optimizer writes weights, wait until all passes so far are compared: gradients may
    come from a pass in which ranks differed. An error that was raised before is not repeated: the
    step may be that of another group."""
    if (living := log()) and not living.raised_to_caller:
        living.compare()


@dataclass(frozen=True, slots=True)
class PassAnnouncer:
    """Announces the passes of a call; a no-op without a log."""

    log: DesyncDetector | None = None
    terms: Mapping[str, str] = field(default_factory=dict)
    digest: int = 0

    @classmethod
    def of(cls, log: DesyncDetector | None, terms: Mapping[str, str]) -> "PassAnnouncer":
        text = json.dumps(dict(terms)).encode()
        return cls(log, terms, int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True))

    def begin(
        self, kind: PassKind, call: int = 0, layer: int = 0, data: Mapping[str, str] | None = None
    ) -> int:
        """Begin a pass; returns its number. See `DesyncDetector.begin`; `data`: what else must be
        equal on all ranks, as text by name."""
        if not self.log:
            return 0
        if data is None:
            return self.log.begin(kind, self.digest, self.terms, call, layer)
        both = PassAnnouncer.of(self.log, {**self.terms, **data})
        return self.log.begin(kind, both.digest, both.terms, call, layer)

    def reporting_errors(self) -> "Pass":
        """Context that tells the other ranks of an error in it, before the pass that they await."""
        return Pass(self, PassKind.FAILURE)


class Pass:
    """A pass of a call on this rank: `begin` announces it; as a context it tells the other ranks
    if it fails, and where stamps are waited for a backward raises on all of them if one failed.

    Attributes:
        number: of the pass, once it has begun.
    """

    def __init__(self, marks: PassAnnouncer, kind: PassKind, call: int = 0, layer: int = 0) -> None:
        self._marks, self._what, self.number = marks, (kind, call, layer), 0
        self._tells = marks.log is not None

    def begin(self, data: Mapping[str, str] | None = None) -> None:
        """As `PassAnnouncer.begin`, when this rank has what it needs to take part."""
        tells, self._tells = self._tells, False  # all ranks know what this raises
        self.number = self._marks.begin(*self._what, data)
        self._tells = tells

    def __enter__(self) -> "Pass":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        (what, _, layer), log = self._what, self._marks.log
        if isinstance(error, Exception) and layer and f"layer {layer}" not in str(error):
            error.add_note(f"in layer {layer}, {what.name.lower()}")
        if self._tells and log and isinstance(error, Exception):
            log.fail(error)
        elif error is None and self.number and log and log.waits and what is PassKind.BACKWARD:
            self._marks.begin(PassKind.OVER, self.number, layer)  # an optimizer's step may be next
