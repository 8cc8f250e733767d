"""Detects ranks that are out of step: all ranks compare the stamps of their passes.

    in step:  sum over ranks of fingerprint(stamp) = size * own fingerprint

Ranks out of step would send shards of different calls to each other and compute wrong numbers. The
sum is an all-reduce over gloo, apart from the data, so it works while GPU transfers hang. Where it
differs, ranks post their stamps and terms in the store, and each raises an error that names them.

On CPUs a pass waits for the sum when it begins, because gloo ends the process if a receive has
another size, and when a backward ends, because an optimizer may be next. On GPUs nothing waits: a
sum is read when a later pass begins, before an optimizer writes weights, and once a second by a
thread, which logs an error, as the process itself may be waiting for a GPU.
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

_POLL_S = 0.5  # how often a waiting rank checks whether another rank has given up
_EXIT_S = 5.0  # how long the end of the process waits for the thread


class DesyncDetector(Members):
    """Numbers the passes of this rank and compares them with those of the group's other ranks."""

    max_all_to_all_ranks = 4  # up to so many ranks an all-to-all is faster than an all-reduce

    def __init__(self, *members: Any) -> None:
        super().__init__(*members)
        self._pending: deque[PendingPass] = deque()
        self._all_to_all_options = dist.AllToAllOptions()
        self._sum_options = dist.AllreduceOptions()
        self.later_error: BurstError | None = None  # raised by all later passes
        self._lock = threading.Lock()
        self.raised_to_caller = False  # whether a pass has raised an error
        watched = ref(self), (ended := threading.Event()), not self.waits
        (thread := threading.Thread(target=_watch, args=watched, daemon=True)).start()
        finalize(thread, _join_watch, thread.ident)
        finalize(self, ended.set)  # at exit this comes first, as it was registered later
        if not self.waits:
            hook = register_optimizer_step_pre_hook(partial(_before_step, ref(self)))
            finalize(self, hook.remove)

    def begin(
        self, kind: PassKind, digest: int, terms: Mapping[str, str], call: int = 0, layer: int = 0
    ) -> int:
        """Begin a pass with a stamp; returns its number, from 1.

        Raises:
            DisagreementError: if ranks have begun different passes, this one or an earlier one.
            BurstError: if a rank has not begun a pass within the time-out, or has ended.
        """
        with self._lock, self._recording_errors():
            self._poll()
            self.number += 1
            self.stamp = Stamp(kind, call or self.number, layer, digest)
            self._post(self.stamp, terms)
            if self.waits or kind in (PassKind.AGREEMENT, PassKind.END, PassKind.CHECK):
                self._compare()
        return self.number

    def compare(self) -> None:
        """Wait until the passes begun so far are compared; raises as `begin`."""
        with self._lock, self._recording_errors():
            self._poll()
            self._compare()

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        """Record that an error reaches the caller."""
        try:
            yield
        except BurstError:
            self.raised_to_caller = True
            raise

    def _compare(self) -> None:
        while self._pending:
            entry = self._pending[0]
            while not self._completes_soon(entry):
                self._check_timeout(entry)
                self._check_abort(entry)
            self._poll()

    def fail(self, error: Exception, missing: str = "") -> None:
        """Announce that this rank could not run a pass, without waiting. Ranks that did run it then
        raise an error. `missing`: for which ranks this one waited in vain, as text, if it did."""
        with self._lock:
            if self.later_error:
                return
            self._publish_failure(error, missing)
        if not missing:
            from megatron_burst.desync.verdict import own_failure

            own_failure(self, error)

    def _publish_failure(self, error: Exception, missing: str) -> None:
        self.number += 1
        lines = [(str(error).splitlines() or [""])[0], *getattr(error, "__notes__", ())]
        terms = {"failure": f"{type(error).__name__}: {', '.join(lines)}"}
        terms |= {"lost": missing} if missing else {}
        with suppress(RuntimeError):  # connections and the store may be gone, with a rank
            self._post(Stamp(PassKind.FAILURE, self.number, 0, 0), terms)
            self.post_terms(self._pending[-1])

    def lost_hop(self, error: Exception) -> BurstError:
        """The error of a transfer that failed, which later passes raise too."""
        from megatron_burst.desync.verdict import lost_hop

        return self.abort(*lost_hop(self, error))

    def abort(self, error: BurstError, missing: str) -> BurstError:
        """Raise `error` in all later passes; returns it. `missing` as in `fail`."""
        self.fail(error, missing)
        with self._lock:
            self._refuse_later_passes(self.later_error or error)
        return error

    def _refuse_later_passes(self, error: BurstError | None) -> None:
        """Have later passes raise a copy, because a traceback holds tensors and groups."""
        self.later_error = error and type(error)(*error.args)

    def poll(self) -> None:
        """Check the passes compared so far, without waiting; raises as `begin`."""
        with self._lock:
            self._poll()
            if self._pending and monotonic() - self._pending[0].begin_s > _POLL_S:
                self._check_abort(self._pending[0])

    def _post(self, stamp: Stamp, terms: Mapping[str, str]) -> None:
        own, is_small = stamp.fingerprint(self.size), self.size <= self.max_all_to_all_ranks
        sent = array("q", [own] * (self.size if is_small else 1))
        received, tensor = array("q", sent), partial(torch.frombuffer, dtype=torch.int64)
        if is_small:
            tensors = tensor(received), tensor(sent)
            work = self.group.alltoall_base(*tensors, [], [], self._all_to_all_options)
        else:
            work = self.group.allreduce([tensor(received)], self._sum_options)
        entry = PendingPass(self.number, stamp, terms, own, received, work, monotonic())
        self._pending.append(entry)

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
                self.store.delete_key(self.waiting_key(self.rank))
            if sum(entry.fingerprints) != entry.fingerprint * self.size:
                # a rank that failed has raised its own error; if it waits, all ranks are in step
                if not (self.waits and entry.stamp.kind is PassKind.FAILURE):
                    raise self._disagreement(entry)
            elif entry.is_posted:
                self.store.delete_key(self.terms_key(entry))
        if self._pending:
            self._check_timeout(self._pending[0])

    def _completes_soon(self, entry: PendingPass) -> bool:
        """Whether a pass is compared, after waiting for a moment."""
        with suppress(RuntimeError):  # a time-out; `_poll` reports what has failed for good
            entry.work.wait(timedelta(seconds=_POLL_S))
        return entry.work.is_completed()

    def _check_abort(self, entry: PendingPass) -> None:
        """Give up a pass that another rank has given up, as only a rank's neighbours miss it."""
        aborted = False
        with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
            aborted = self.store.check([self.abort_key(entry)])
        if aborted and not self._completes_soon(entry):
            raise self._rank_missing(entry, "another rank has given up")

    def _check_timeout(self, entry: PendingPass) -> None:
        """Give up a pass after the time-out. From half of that on its terms are in the store, which
        tells ranks that wait from those that are missing."""
        waited, limit = monotonic() - entry.begin_s, self.consensus.timeout_s
        if waited > limit:
            raise self._rank_missing(entry, f"nothing came within {limit:g} s")
        if waited > limit / 2 and not entry.is_posted:
            with suppress(RuntimeError):
                self.post_terms(entry)
                self.store.set(self.waiting_key(self.rank), "")

    def _disagreement(self, entry: PendingPass) -> BurstError:
        from megatron_burst.desync.differing import disagreement

        error, is_recoverable = disagreement(self, entry)
        self._refuse_later_passes(None if is_recoverable else error)
        return error

    def _rank_missing(self, entry: PendingPass, reason: str) -> BurstError:
        from megatron_burst.desync.verdict import lost_pass

        error, missing = lost_pass(self, entry, reason)
        self._publish_failure(error, missing)  # for a rank that begins the pass later
        self._refuse_later_passes(error)
        return error


def _join_watch(ident: int | None) -> None:
    """At exit wait for the thread: a C++ call that outlives the interpreter ends in abort."""
    if not threading.main_thread().is_alive():
        for thread in threading.enumerate():
            if thread.ident == ident:
                thread.join(_EXIT_S)


def _watch(*watched: Any) -> None:
    from megatron_burst.desync.verdict import watch

    watch(*watched)


@uncompiled
def _before_step(log: ReferenceType[DesyncDetector], *_: object) -> None:
    """Before an optimizer writes weights, compare all passes so far. Nothing is raised a second
    time, as the step may be of weights that another group trains."""
    if (detector := log()) and not detector.raised_to_caller:
        detector.compare()


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
        """`DesyncDetector.begin`. `data`: more terms that must be equal on all ranks."""
        if not self.log:
            return 0
        own = self if data is None else PassAnnouncer.of(self.log, {**self.terms, **data})
        return self.log.begin(kind, own.digest, own.terms, call, layer)

    def reporting_errors(self) -> "Pass":
        """A context that announces an error in it, before the pass that other ranks wait for."""
        return Pass(self, PassKind.FAILURE)


class Pass:
    """A pass of a call on this rank: `begin` announces it, and as a context it announces a failure.
    Where stamps are waited for, a backward then raises on all ranks.

    `number`: of the pass, once it has begun.
    """

    def __init__(
        self, announcer: PassAnnouncer, kind: PassKind, call: int = 0, layer: int = 0
    ) -> None:
        self._announcer, self._stamp_args, self.number = announcer, (kind, call, layer), 0
        self._reports = announcer.log is not None

    def begin(self, data: Mapping[str, str] | None = None) -> None:
        """`PassAnnouncer.begin`, once this rank can take part."""
        reports, self._reports = self._reports, False  # all ranks raise what this raises
        self.number = self._announcer.begin(*self._stamp_args, data)
        self._reports = reports

    def __enter__(self) -> "Pass":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        (kind, _, layer), log = self._stamp_args, self._announcer.log
        if isinstance(error, Exception) and layer and f"layer {layer}" not in str(error):
            error.add_note(f"in layer {layer}, {kind.name.lower()}")
        if self._reports and log and isinstance(error, Exception):
            log.fail(error)
        elif error is None and self.number and log and log.waits and kind is PassKind.BACKWARD:
            # an optimizer's step may be next
            self._announcer.begin(PassKind.OVER, self.number, layer)
