"""Calls beside attention's that ranks make together: loss, `shard` (not on the reading path)."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch.distributed as dist

from megatron_burst.comm.detector import PassAnnouncer, PassKind
from megatron_burst.comm.group import log_of, state_of
from megatron_burst.comm.store import CP, WHO, ParallelKind


def announce(
    group: dist.ProcessGroup, terms: Mapping[str, str], caller: str, problem: str = "",
    kind: ParallelKind = CP, data: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Announce a call that ranks of a group make together, before it does anything; see
    `Group.agree`, and `PassAnnouncer.begin` for `data`.

    Raises:
        BurstError: on all ranks, if one refuses it or makes another call; on GPUs, if ranks know
            the call, where stamps are compared.
    """
    state = state_of(group)
    state.agree(terms, caller, problem=problem, kind=kind)
    if state.log is None and group.size() > 1:
        # attention's calls share the log of the group
        state.open_log(group, WHO if kind is CP else caller, kind)
    PassAnnouncer.of(state.log, terms).begin(PassKind.FORWARD, data=data)


def backward_of(group: dist.ProcessGroup | None) -> Callable[[], int]:
    """What announces the backward of the call that a group's ranks announced last, before its
    collectives; raises as `DesyncDetector.begin`. Only on CPUs: on GPUs a rank may have failed in
    that call while the others go on with NaN, and nothing may end the group that can still be
    used."""
    log = log_of(group)
    announcer = PassAnnouncer(log if log and log.waits else None)
    return partial(announcer.begin, PassKind.BACKWARD, log.number if log else 0)


def reporting_errors(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """See `PassAnnouncer.reporting_errors`."""
    return PassAnnouncer(log_of(group)).reporting_errors()
