"""Which of the options that were asked for a call does not satisfy."""

from megatron_burst.errors import BurstError
from megatron_burst.plan.attention import AttentionCall
from megatron_burst.plan.choose_heads import most_heads


def check_asked(call: AttentionCall) -> None:
    """Refuse an option that the call, with the group's nodes as rows, would ignore.

    Raises:
        BurstError: if there is one, or the call cannot run at all.
    """
    reason = misses(call)
    if reason:
        raise BurstError(f"burst attention: {reason}")


def misses(call: AttentionCall) -> str | None:
    """The option that a call does not satisfy, as a sentence; None if it satisfies all.

    What is trivially satisfied is not refused: on one node nothing goes between nodes, one rank
    sends nothing, and a ring takes all heads at once anyway.

    Raises:
        BurstError: if the call cannot run this way at all.
    """
    several = len(set(call.topology.node_of)) > 1
    return (
        _heads_missing(call)
        or _transfer_missing(call)
        or (_circulate_missing(call) or _resend_missing(call) if several else None)
    )


def _heads_missing(call: AttentionCall) -> str | None:
    asked = call.heads_per_round
    if asked is None or (call.mode == "ring" and call.topology.cp_size == 1):
        return None
    if call.mode == "ring":
        return (
            "heads_per_round must come with gather or a2a, because a ring has no rounds of some "
            f"heads; got heads_per_round={asked} and {call.in_words}; leave it out, or pass "
            "--burst-intra gather (intra='gather') or a2a"
        )
    most = most_heads(call.shape, call.arranged, call.mode)
    if asked <= most or (call.mode == "a2a" and call.shape.heads_q % call.arranged.intra_size):
        return None  # heads that cannot be sharded evenly are refused with their program
    does = "gathers" if call.mode == "gather" else "computes"
    return (
        f"heads_per_round must not exceed the KV heads that a rank {does}, because a round has "
        f"some of them; got {asked} of {most}; leave it out"
    )


def _transfer_missing(call: AttentionCall) -> str | None:
    if call.transfer != "pull" or call.mode != "ring" or call.topology.cp_size == 1:
        return None
    return (
        "transfer=pull must come with gather or a2a, because shards of a ring are sent by NCCL; "
        f"got {call.in_words}; pass --burst-tune transfer=send or transfer=auto, or --burst-intra "
        "gather"
    )


def _circulate_missing(call: AttentionCall) -> str | None:
    if call.circulate == "auto" or call.between != "a2a":
        return None
    return (
        "circulate must come with a ring between nodes, because nothing circulates in an "
        f"all-to-all over all ranks; got circulate={call.circulate} and inter=a2a; leave one of "
        "them out"
    )


def _resend_missing(call: AttentionCall) -> str | None:
    """For "never" only: nothing has to be kept for "always".

    An all-to-all over all ranks keeps what it receives anyway. Under recomputation with kept
    results, backward does not directly follow a forward; where it does, keys are kept.
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
