"""What a rank says of a pass in which ranks differ or failed; loaded when there is such a pass."""

from collections.abc import Sequence

from megatron_burst.comm.stamps import Members, PassKind, PendingPass, PostedTerms, Stamp
from megatron_burst.comm.store import PROBLEM, ParallelKind
from megatron_burst.desync.hops import Waits
from megatron_burst.desync.verdict import missing_error, posts_of_all, report
from megatron_burst.errors import BurstError, DisagreementError

_POSTS_S = 5.0  # how long a rank waits for what others tell of a pass that all have begun
# a call begins, one way or another
_CALLS = PassKind.AGREEMENT, PassKind.FORWARD, PassKind.RECORDING, PassKind.REFUSAL


def disagreement(log: Members, entry: PendingPass) -> tuple[BurstError, bool]:
    """The error of a pass whose stamps differ; and whether ranks that catch it can go on."""
    posts = posts_of_all(log, entry, min(_POSTS_S, log.consensus.timeout_s / 2))
    posted, of = [post or PostedTerms(None, {}) for post in posts], log.parallel_kind
    stamps = [stamp for stamp, _ in posted if stamp is None or stamp.kind is not PassKind.FAILURE]
    # on GPUs some ranks are ahead, or hang
    goes_on = log.waits and None not in stamps and at_one_place([x for x in stamps if x])
    if any("lost" in terms for _, terms in posted):
        return _heard_of_lost(log, entry, posted), False
    if len(stamps) < len(posted):
        return _failure(log, entry, posted), goes_on
    where = "" if goes_on else ", in a new group, as ranks of this one are not at the same call"
    error = DisagreementError(
        f"{log.caller}: all ranks of a {of.group} group must make the same calls in the same "
        f"order, with the same shapes and options, because {of.reason}; got, as pass "
        f"{entry.number} of the group, {differences(posted, of)}; pass the same shapes and options "
        f"on all ranks, and run every forward and every backward on all of them{where}"
    )
    report(log, "difference", error, Waits.at(entry), [])
    return error, goes_on


def _failure(log: Members, entry: PendingPass, posted: Sequence[PostedTerms]) -> DisagreementError:
    """The error if ranks failed."""
    rank_word, begun = log.parallel_kind.rank, entry.stamp.kind.text
    failed = {
        rank: f"{terms['failure']} on {rank_word} {rank}"
        for rank, (stamp, terms) in enumerate(posted)
        if stamp and stamp.kind is PassKind.FAILURE
    }
    # on GPUs transfers may wait for ever
    can_go_on = "catch it on all ranks and repeat the step on all of them"
    go_on = can_go_on if log.waits else "start the processes again"
    error = DisagreementError(f"{log.caller}: a pass must succeed on every rank, because ranks "
                              "send each other what they compute; got "
                              f"{' and '.join(failed.values())}, while {rank_word} {log.rank} "
                              f"began {begun} as pass {entry.number} of the group; look at the "
                              "output of the failed ranks first, and to go on after such an error, "
                              f"{go_on}")  # fmt: skip
    report(log, "failure of others", error, Waits.at(entry), [*failed])
    return error


def _heard_of_lost(log: Members, entry: PendingPass, posted: Sequence[PostedTerms]) -> BurstError:
    """The error if other ranks waited in vain for some."""
    by = [rank for rank, (_, terms) in enumerate(posted) if "lost" in terms]
    lost, rank_word = posted[by[0]].terms["lost"], log.parallel_kind.rank
    where = f", as {rank_word}s {by} say before pass {entry.number} of the group"
    error = missing_error(log, lost + where)
    report(log, "heard", error, Waits.at(entry), [])
    return error


def at_one_place(stamps: Sequence[Stamp]) -> bool:
    """Whether ranks are in the same call of a step, whatever its terms: then they can go on if all
    of them give it up."""
    places = {(stamp.kind not in _CALLS and stamp.kind, stamp.call) for stamp in stamps}
    unlayered = PassKind.AGREEMENT, PassKind.REFUSAL
    layers = {stamp.layer for stamp in stamps if stamp.kind not in unlayered}
    return len(places) == 1 and len(layers) <= 1


def differences(posted: Sequence[PostedTerms], of: ParallelKind) -> str:
    """What each rank has begun, as text, without what all have in common."""
    calls = [terms for _, terms in posted if terms and terms.keys() != {PROBLEM}]
    names = dict.fromkeys(name for terms in calls for name in terms if name != PROBLEM)
    differing = [name for name in names if len({terms.get(name) for terms in calls}) > 1]
    ranks: dict[str, list[int]] = {}
    for rank, (stamp, terms) in enumerate(posted):
        words = f"{stamp or 'a call that is not announced yet'}"
        if terms in calls and differing:
            words += " with " + ", ".join(f"{name}={terms.get(name)}" for name in differing)
        if problem := terms.get(PROBLEM):
            words += f" ({problem})"
        ranks.setdefault(words, []).append(rank)
    return " and ".join(f"{words} on {of.rank}s {those}" for words, those in ranks.items())
