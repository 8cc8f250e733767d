"""What a rank says of a pass that cannot go on: which ranks differ, failed or are missing.

Loaded when there is something to say, and by the thread that looks whether there is.
"""

import ctypes
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from threading import Event
from time import monotonic, sleep, time
from weakref import ReferenceType

import torch

from megatron_burst.comm.stamps import Members, PendingPass, PostedTerms
from megatron_burst.desync.hops import Waits, awaited_hop, culprits, issued_hop, named_ranks, tell
from megatron_burst.errors import BurstError, DisagreementError
from megatron_burst.logs import log_message
from megatron_burst.rules import format_bytes

_GRACE_S = 1.5  # how long it waits for a word of others before it says that they are missing
_CHAIN_S = 0.5  # how long for whom others wait; who waits for long has told already
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_WATCH_S = 1.0  # how often the thread looks
_EARLY = 0.9  # of the time-out after which hops of GPUs are late: before NCCL's watchdog ends all


# ---- who is missing ----


def lost_pass(log: Members, entry: PendingPass, why: str) -> tuple[BurstError, str]:
    """The error of a pass that not all ranks have begun; and for which this one waits, in words."""
    with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
        log.store.set(log.waiting_key(log.rank), "")
    missing = _silent_in(log, posts_of_all(log, entry, _GRACE_S))
    since = time() - (monotonic() - entry.begin_s)
    waits = _with_broken(log, replace(Waits.at(entry), peers=missing, since=since))
    ranks = culprits(log, waits) if waits.peers else []
    where = f"pass {entry.number} of the group, {entry.stamp}: {why}"
    return _given_up(log, "pass", waits, ranks, where)


def _silent_in(log: Members, posts: Sequence[PostedTerms | None]) -> tuple[int, ...]:
    """The ranks that have posted nothing of a pass; of several, those that wait in no other one."""
    silent = tuple(rank for rank, post in enumerate(posts) if post is None)
    with suppress(RuntimeError):
        return tuple(r for r in silent if not log.store.check([log.waiting_key(r)])) or silent
    return silent


def lost_hop(log: Members, error: Exception) -> tuple[BurstError, str]:
    """The error of a transfer that failed; and for which ranks this one waits, in words."""
    if error_of_call := _strayed(log):
        return error_of_call, ""
    why = str(error).splitlines()[0]
    waits = awaited_hop(log) or issued_hop(log) or Waits.at(log)
    waited_s = log.consensus.timeout_s if "imed out" in why else 0.0
    return late_hop(log, replace(waits, since=time() - waited_s), why)


def late_hop(log: Members, waits: Waits, why: str) -> tuple[BurstError, str]:
    """The error of a hop that this rank gives up; and for which ranks it waits, in words."""
    peers, word = ", ".join(map(str, waits.peers)), log.parallel_kind.rank
    tell(log, _with_broken(log, waits))
    sleep(_CHAIN_S)
    waits = _with_broken(log, waits)
    ranks = culprits(log, waits)
    layer = f" of layer {waits.layer}" if waits.layer else ""
    where = (f"the {waits.link} {waits.cargo} hop of {format_bytes(waits.num_bytes)} between "
             f"{word} {peers} and {word} {log.rank}, step {waits.step} of {waits.steps}{layer}, "
             f"{waits.what}, in pass {waits.number} of the group: {why}")  # fmt: skip
    return _given_up(log, "hop", waits, ranks, where)


def missing_error(log: Members, got: str) -> BurstError:
    """The error if ranks are missing in a pass."""
    of = log.parallel_kind
    return BurstError(f"{log.caller}: all ranks of a {of.group} group must take part in every "
                      f"pass, because {of.reason}; got {got}; check the output of "
                      "these ranks first, and start the processes again")  # fmt: skip


def _given_up(
    log: Members, what: str, waits: Waits, ranks: Sequence[int], where: str
) -> tuple[BurstError, str]:
    """The error of a wait that this rank gives up, reported; and for which ranks, in words."""
    lost = "broken connections of" if waits.broken and log.rank in ranks else "no word from"
    whom = f"{lost} {named_ranks(log, ranks)}" if ranks else "a broken connection"
    error = missing_error(log, f"{whom} in {where}")
    report(log, what, error, waits, ranks)
    return error, whom


def _with_broken(log: Members, waits: Waits) -> Waits:
    """What a rank waits for, if its connections to some ranks are broken: for these.

    Ranks that give up close connections of transfers; those of stamps break with a rank only.
    """
    broken = []
    for rank in {*range(log.size)} - {log.rank}:
        try:
            log.group.send([torch.zeros(1, dtype=torch.int64)], rank, 0)
        except RuntimeError:
            broken.append(rank)
    return replace(waits, peers=tuple(sorted(broken)), broken=True) if broken else waits


def _strayed(log: Members) -> DisagreementError | None:
    """The error if a rank wants to agree on something that this one has not reached."""
    keys = log.consensus.keys() if log.consensus.name else ()
    strayed = ((r, key) for r, key in enumerate(keys) if r != log.rank and log.store.check([key]))
    kind, (rank, key) = log.parallel_kind, next(strayed, (None, ""))
    return None if rank is None else DisagreementError(
        f"{log.caller}: all ranks of a {kind.group} group must make the same calls, because every "
        f"call sends shards between them; got a call from {kind.rank} {rank} that this rank "
        f"({kind.rank} {log.rank}) did not make: {log.store.get(key).decode()}; give all ranks "
        "batches of the same shape and the same options"
    )  # fmt: skip


def own_failure(log: Members, error: Exception) -> None:
    """Report that this rank could not run a pass."""
    report(log, "failure", error, Waits.at(log), [log.rank])


def posts_of_all(log: Members, entry: PendingPass, patience_s: float) -> list[PostedTerms | None]:
    """Post this rank's stamp and terms; returns those of all ranks that post them soon, by rank."""
    keys = [f"{log.name}/{entry.number}/{rank}" for rank in range(log.size)]
    posts: list[PostedTerms | None] = [PostedTerms(None, {})] * log.size  # nothing is known
    with suppress(RuntimeError):  # the store may be gone, with the rank that keeps it
        log.post_terms(entry)
        log.store.set(log.abort_key(entry), "")
        with suppress(RuntimeError):
            log.store.wait(keys, timedelta(seconds=patience_s))
        for rank, key in enumerate(keys):
            posts[rank] = log.posted_terms(key)
    posts[log.rank] = PostedTerms(entry.stamp, entry.terms)
    return posts


# ---- lines for `megatron-burst doctor --explain` ----


def report(log: Members, what: str, error: Exception, waits: Waits, ranks: Sequence[int]) -> None:
    """Append what this rank found to its file in the folder of faults, if there is one."""
    if not (name := os.environ.get("MEGATRON_BURST_FAULTS")):
        return
    folder = Path(name)
    rank = log.ranks[log.rank]
    line = {"time": time(), "rank": rank, "cp_rank": log.rank, "group": log.name,
            "ranks": log.ranks, "nodes": log.nodes, "what": what, "waits": asdict(waits),
            "culprits": [*ranks], "error": f"{type(error).__name__}: {error}"}  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as problem:  # a full disk must not hide what is wrong
        log_message(f"{log.caller}: {folder} could not be written: {problem}", logging.WARNING)


# ---- hops that take long ----


def _allow_queries() -> bool:
    """Let this thread ask for CUDA events while another one captures a graph, which the question
    would end otherwise; returns whether it may. PyTorch has no function for it, but loads CUDA's.
    """
    exchange = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)
    return exchange is not None and exchange(ctypes.byref(ctypes.c_int(_RELAXED))) == 0


class HopWatch:
    """Looks again and again which hop a rank waits for, in one thread."""

    def __init__(self, on_gpu: bool) -> None:
        self._is_blind = on_gpu and not _allow_queries()
        self._hop: Waits | None = None
        self._since, self._has_posted = 0.0, False

    def late(self, log: Members) -> tuple[BurstError, str] | None:
        """Tell others of a hop that takes half of the time-out. On GPUs, where nothing else gives
        up, returns what `lost_hop` does for one that takes nearly all of it."""
        hop, limit = None if self._is_blind else awaited_hop(log), log.consensus.timeout_s
        if hop != self._hop:
            if self._has_posted:
                tell(log, None)
            self._hop, self._since, self._has_posted = hop, monotonic(), False
        elif hop is not None and not self._has_posted and monotonic() - self._since > limit / 2:
            tell(log, replace(hop, since=time() - (monotonic() - self._since)))
            self._has_posted = True
        elif hop is not None and not log.waits and monotonic() - self._since > _EARLY * limit:
            hop = replace(hop, since=time() - _EARLY * limit)
            return late_hop(log, hop, f"the hop has not ended after {_EARLY * limit:g} s")
        return None


def watch(log: ReferenceType, ended: Event, on_gpu: bool) -> None:
    """Look at a `DesyncDetector` as long as it lives; log what is found, once."""
    hops, pause_s = HopWatch(on_gpu), 0.0
    while not ended.wait(pause_s) and (living := log()) and not living.later_error:
        try:
            if not living.waits:
                living.poll()
            if late := hops.late(living):
                raise living.abort(*late)
        except BurstError as error:
            logging.getLogger(__name__).error("%s", error)
            return
        pause_s = min(_WATCH_S, living.consensus.timeout_s / 8)
        del living
