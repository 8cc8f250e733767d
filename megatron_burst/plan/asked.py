"""What was asked for that the way in which a call is settled to run does not have.

What holds of itself is not refused: on one node nothing goes between nodes, one rank sends nothing,
and a ring takes all heads at once anyway.
"""

from megatron_burst.errors import BurstError
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose_heads import most_heads

_WHO = "burst attention"


def check_asked(call: AttentionCall) -> None:
    """Refuse an option that the settled way would drop.

    Args:
        call: with the group's nodes as rows.

    Raises:
        BurstError: if there is one, or the call cannot run at all.
    """
    reason = misses(call)
    if reason:
        raise BurstError(f"{_WHO}: {reason}")


def misses(call: AttentionCall) -> str | None:
    """What a call was asked for and does not have, as a sentence; None if it has all of it.

    Raises:
        BurstError: if the call cannot run so at all.
    """
    several = len(set(call.topology.node_of)) > 1
    return (
        _heads_missing(call)
        or _transfer_missing(call)
        or (_circulate_missing(call) or _resend_missing(call) if several else None)
    )


def _heads_missing(call: AttentionCall) -> str | None:
    asked = call.heads_per_round
    if asked is None:
        return None
    if call.mode == "ring":
        if call.topology.cp_size == 1:
            return None
        return (
            "heads_per_round must come with gathering or exchanging heads, because a ring has "
            f"no rounds of some heads; got heads_per_round={asked} and {call.in_words}; leave it "
            "out, or pass --burst-intra gather (intra='gather') or a2a"
        )
    most = most_heads(call.shape, call.arranged, call.mode)
    if asked <= most or (call.mode == "a2a" and call.shape.heads_kv % call.arranged.intra_size):
        return None  # heads that are not dealt out evenly are refused with their schedule
    does = "gathers" if call.mode == "gather" else "computes"
    return (
        f"heads_per_round must not exceed the KV heads that a rank {does}, because a round has "
        f"some of them; got {asked} of {most}; leave it out"
    )


def _transfer_missing(call: AttentionCall) -> str | None:
    if call.transfer != "pull" or call.mode != "ring" or call.topology.cp_size == 1:
        return None
    return (
        "transfer=pull must come with gathering or exchanging heads, because shards of a ring are "
        f"sent by NCCL; got {call.in_words}; pass --burst-tune transfer=send or "
        "transfer=auto, or --burst-intra gather"
    )


def _circulate_missing(call: AttentionCall) -> str | None:
    if call.circulate == "auto" or call.between != "a2a":
        return None
    return (
        "circulate must come with a ring between nodes, because nothing circulates where heads are "
        f"exchanged over all ranks; got circulate={call.circulate} and inter=a2a; leave one of "
        "them out"
    )


def _resend_missing(call: AttentionCall) -> str | None:
    """Of "never" only: nothing has to stay for "always".

    What is exchanged over all ranks stays of itself. Under recomputation with kept results backward
    follows no forward directly; where it does all the same, keys stay.
    """
    if call.resend != "never" or call.between == "a2a" or call.can_recall:
        return None
    got = call.in_words
    if call.mode == "gather" and call.arranged.inter_size > 1:
        got = f"circulate={call.circulate}"
    return (
        "resend=never must come with keys that are gathered inside nodes while K and V go round "
        f"between nodes, because only those can stay until backward; got {got}; leave it out, or "
        "pass --burst-intra gather (intra='gather') and no circulate=q"
    )
