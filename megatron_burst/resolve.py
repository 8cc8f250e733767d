"""How a call runs: `resolve` makes each choice that a spec leaves open, with its reason."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_burst.errors import BurstError, Need, require
from megatron_burst.logs import Decision
from megatron_burst.rules import (
    a2a_bytes,
    choose_heads_a2a,
    choose_heads_gather,
    format_bytes,
    head_bytes_over_all_rows,
    hop_bytes,
    inter_ring_bytes,
    max_heads,
    remote_kv_fits,
    window_imbalance,
    with_wire_dtype,
)
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import check_mask
from megatron_burst.schedule.node_shards import halo
from megatron_burst.schedule.spec import (
    LONG_SHARD,
    AttentionShape,
    Circulate,
    Direction,
    Dtype,
    Spec,
)

_WHO = "burst attention"
_MANY = 4  # ranks, of which each has an eighth of a document in a chunk
_WHOLE_BYTES = 384 << 20  # of a KV head over all rows, of which buffers take seven times as much
_IDLE, _SEQUENCE_BYTES = 0.1, 1 << 30  # share of the ranks' time; of a KV head over all rows
_ON_CPU = "on CPUs fewer kernel calls gain nothing"


class Resolved(NamedTuple):
    """A spec without open choices, and why they were made as they were."""

    spec: Spec
    reasons: dict[str, Decision]  # of "inter", "intra" and "circulate"


@lru_cache(maxsize=4096)
def resolve(spec: Spec) -> Resolved:
    """Make the choices that a spec leaves open.

    It is a pure function of what is the same on all ranks, so they agree without a broadcast.

    Raises:
        BurstError: if a choice that the user made cannot hold.
    """
    why, asked = {}, spec
    why["inter"] = _inter(spec)
    spec = replace(spec, inter=why["inter"].value)
    why["intra"] = _intra(spec)
    spec = replace(spec, intra=why["intra"].value)
    _check(spec)
    together = spec.mode_topology.intra_size > 1 and not spec.mode_topology.spans_nodes
    spec = replace(
        spec, shape=with_wire_dtype(spec.shape, spec.grad_wire), heads_per_round=_heads(spec),
        pulled=spec.pulled is not False and together,
    )  # fmt: skip
    spec = replace(
        spec, saves_remote=_saves_remote(spec), a2a_backward_heads=_a2a_backward_heads(spec, asked)
    )
    why["circulate"] = _circulate(spec, asked.circulate)
    return Resolved(replace(spec, circulate=Circulate(why["circulate"].value)), why)


def describe_mode(spec: Spec) -> str:
    """Mode and topology of a resolved spec."""
    if spec.topology.inter_size == 1:
        both = " in forward and a2a in backward" if spec.a2a_backward_heads else ""
        return f"{spec.intra}{both} on {spec.topology}"
    if spec.inter == "ring":
        return f"{spec.intra} inside nodes, ring between them, on {spec.topology}"
    return f"{spec.intra} over all ranks of {spec.topology}"


def reuses_remote(spec: Spec) -> bool:
    """Whether K and V that a gather received from other nodes stay until backward."""
    return bool(spec.saves_remote) and spec.intra == "gather"


def circulating_share(spec: Spec) -> float:
    """Share of a shard's keys that circulates between nodes if they are gathered inside: under a
    window, what queries of other nodes see."""
    gathers = spec.intra == "gather" or (spec.intra is None and spec.kernel.device != "cpu")
    in_order = spec.layout in (Layout.ZIGZAG, Layout.CONTIGUOUS)
    topology = spec.topology
    if not (spec.mask.windowed and gathers and in_order) or topology.spans_nodes:
        return 1.0
    terms = topology, spec.layout, spec.mask, spec.shape.tokens
    ends = (rank for ranks in topology.grid for rank in {ranks[0], ranks[-1]})
    return max(halo(*terms, rank).rows for rank in ends) / spec.shape.tokens


# ---- between nodes ------------------------------------------------------------------------------


def _inter(spec: Spec) -> Decision:
    """Between nodes: "ring", "a2a" (over all ranks) or "flat".

    Bytes decide. On two nodes exposed ones count twice: for an all-to-all in R rounds, the first
    round there and the last one back, 1/R of the total in each pass. A ring begins and ends with
    work on the node's own shards. On more nodes the link is busy longer than the kernels, so that
    all bytes count once. A ring is counted as if K and V circulated again in backward, even where
    they are kept: counting less would change only calls for which the simulated all-to-all is as
    fast or faster. Documents do not matter: where they start at any token the slowest rank of a
    ring has more work, but never so much that typical ones would change the choice.
    """
    if spec.inter is not None:
        return Decision(spec.inter, "asked for")
    if spec.topology.inter_size == 1:
        return Decision("ring", "one row of ranks")
    if spec.shape.tokens_kv:
        return Decision("ring", "queries and keys have different lengths")
    if spec.intra == "a2a":
        return Decision("a2a", "intra=a2a was asked for")
    if given := _only_in_rings(spec):
        return Decision("ring", f"{given} was asked for")
    if spec.mask.windowed and _prefers_whole_sequences(spec):
        why = "with an all-to-all over all ranks each rank has whole documents, which windows need"
        return Decision("a2a", why)
    if spec.kernel.device == "cpu":
        return Decision("ring", _ON_CPU)
    if spec.layout is Layout.STRIPED or spec.shape.heads_q % spec.topology.cp_size:
        return Decision("ring", "no all-to-all over all ranks has this layout or number of heads")
    return _fewer_bytes(spec)


def _fewer_bytes(spec: Spec) -> Decision:
    over_all = replace(spec, inter="a2a").mode_topology
    shape = with_wire_dtype(spec.shape, spec.grad_wire)
    share = circulating_share(spec)
    ring = min(inter_ring_bytes(shape, spec.topology, circulate, share) for circulate in Circulate)
    sent = a2a_bytes(shape, spec.topology, spec.resends)
    heads = choose_heads_a2a(shape, over_all, spec.kernel.multiprocessors, spec.heads_per_round)
    bare = sent // -(-max_heads(shape, over_all, "a2a") // heads)
    figures = (
        f"between nodes a ring sends {format_bytes(ring)} a rank, an all-to-all "
        f"{format_bytes(sent)}, of which {format_bytes(bare)} are exposed"
    )
    counted = sent + bare * (spec.topology.inter_size == 2)
    return Decision("a2a" if counted < ring else "ring", figures)


def _only_in_rings(spec: Spec) -> str:
    """A given choice that an all-to-all over all ranks does not have, or ""."""
    over_all = replace(spec, inter="a2a").mode_topology
    given = {"intra": spec.intra, "circulate": spec.circulate}
    given["transfer"] = "pull" if spec.pulled else None
    if (spec.heads_per_round or 0) > max_heads(spec.shape, over_all, "a2a"):
        given["heads_per_round"] = f"{spec.heads_per_round}"
    return next((f"{name}={value}" for name, value in given.items() if value is not None), "")


def _prefers_whole_sequences(spec: Spec) -> bool:
    """Whether giving a rank the whole sample for some heads is possible and may be better:
    documents make shards unequal in work, and windows in them need all keys of a query at once."""
    size = spec.topology.cp_size
    even = size > 1 and spec.shape.heads_q % size == 0
    gains = spec.mask.windowed or spec.kernel.device != "cpu"
    return spec.mask.documents and even and spec.layout is not Layout.STRIPED and gains


# ---- among the ranks of a row -------------------------------------------------------------------


def _intra(spec: Spec) -> Decision:
    """Among the ranks of a row: "ring", "gather" or "a2a".

    Raises:
        BurstError: if gather or a2a was asked for across nodes or in the striped layout.
    """
    row, over_all = spec.mode_topology, spec.inter == "a2a"
    if row.cp_size == 1:
        return Decision("ring", "one rank")
    if spec.shape.tokens_kv and (over_all or spec.intra in ("gather", "a2a")):
        raise BurstError(
            f"{_WHO}: queries and keys of different lengths must run in rings, because gather and "
            f"a2a pair a rank's queries with as many keys; got {spec.shape.tokens} queries and "
            f"{spec.shape.tokens_kv} keys on a rank with intra={spec.intra or 'a2a'}; pass "
            "--burst-intra ring (intra='ring') or auto, and no --burst-inter a2a or "
            "--burst-invariant"
        )
    if spec.shape.tokens_kv:
        return Decision("ring", "queries and keys have different lengths")
    if spec.intra is None and row.inter_size == 1 and not over_all:
        if spec.layout is Layout.DOCUMENTS and spec.mask.right == 0:
            return Decision("gather", "chunks of each document are equal work on all ranks")
        if _prefers_whole_sequences(spec):
            return Decision("a2a", "each rank has all rows of some heads: equal work")
    if spec.inter == "flat":
        return Decision("ring", "one ring over all ranks")
    cannot, asked = _gather_refusal(spec), "a2a" if over_all else spec.intra
    if cannot and asked in ("gather", "a2a"):
        raise BurstError(
            f"{_WHO}: for intra={asked} {cannot}; pass --burst-intra ring (intra='ring') or auto, "
            "and no --burst-invariant"
        )
    if asked == "a2a" and row.inter_size > 1:
        raise BurstError(
            f"{_WHO}: an all-to-all must run over all ranks, because no ring between nodes "
            f"continues it; got intra=a2a and inter={spec.inter} on {row}; pass --burst-inter a2a "
            "(inter='a2a') or auto"
        )
    if asked is not None:
        return Decision(asked, "over all ranks" if over_all else "asked for")
    if cannot:
        return Decision("ring", "gathering does not support it")
    if spec.kernel.device == "cpu":
        return Decision("ring", _ON_CPU)
    if spec.heads_per_round is None and _gives_sequences(spec) and _window_leaves_ranks_idle(spec):
        return Decision("a2a", "under this window ranks with the first rows would wait")
    return Decision("gather", "few long kernel calls, merged once")


def _gives_sequences(spec: Spec) -> bool:
    """Whether an all-to-all gives each rank of a node whole causal sequences."""
    mask, row = spec.mask, spec.mode_topology
    causal = spec.layout is Layout.ZIGZAG and mask.right == 0 and not mask.documents
    return causal and row.inter_size == 1 and spec.shape.heads_q % row.cp_size == 0


def _window_leaves_ranks_idle(spec: Spec) -> bool:
    """Whether ranks wait under a window, and an all-to-all fits that would keep them busy."""
    left, row, shape = spec.mask.left, spec.mode_topology, spec.shape
    fits = (
        shape.tokens >= LONG_SHARD // 2 and head_bytes_over_all_rows(shape, row) <= _SEQUENCE_BYTES
    )
    return left is not None and fits and window_imbalance(left, row.cp_size, shape.tokens) > _IDLE


def _gather_refusal(spec: Spec) -> str:
    """Why neither keys can be gathered nor heads be exchanged for rows; "" if they can."""
    if spec.mode_topology.spans_nodes and spec.inter != "a2a":
        why = "a row of ranks must share a node, because keys or heads travel over NVLink"
        return f"{why}; got {spec.mode_topology}"
    if spec.layout is Layout.STRIPED:
        return "the layout must not be striped, because whole sequences lie in order; got striped"
    return ""


def _heads(spec: Spec) -> int | None:
    """KV heads of a round; None in a ring."""
    asked = spec.shape, spec.mode_topology, spec.kernel.multiprocessors, spec.heads_per_round
    if spec.intra == "ring":
        return None
    if spec.intra == "a2a":
        return choose_heads_a2a(*asked)
    # a round is one kernel call over all its keys
    return choose_heads_gather(*asked, exposed=spec.layout is Layout.DOCUMENTS)


def _a2a_backward_heads(spec: Spec, asked: Spec) -> int:
    """KV heads that a rank computes at a time if backward of a gather is an all-to-all; 0 if not.

    Backward's kernels are faster over whole documents than over the short chunks of many ranks. On
    long shards this makes up for sending more, if there are rounds to hide; on very long ones it
    would take too much memory. With two head dimensions cuDNN's are faster at any length.
    """
    taken = asked.intra or asked.heads_per_round is not None
    if spec.intra != "gather" or taken or spec.mask.windowed:
        return 0
    shape, row, kernel = spec.shape, spec.mode_topology, spec.kernel
    slow = shape.dim_qk != shape.dim_v and not kernel.rectangular_causal and _gives_sequences(spec)
    many = row.inter_size == 1 and row.intra_size >= _MANY and not row.spans_nodes
    fits = shape.tokens >= LONG_SHARD // 2 and head_bytes_over_all_rows(shape, row) <= _WHOLE_BYTES
    if not (slow or (many and fits and _prefers_whole_sequences(spec))):
        return 0
    heads = choose_heads_a2a(shape, row, kernel.multiprocessors)
    return heads if slow or heads < max_heads(shape, row, "a2a") else 0


# ---- backward -----------------------------------------------------------------------------------


def _saves_remote(spec: Spec) -> bool:
    """Whether forward saves what it received: everything of an all-to-all; of a gather K and V of
    other nodes, if asked for or if they are few."""
    if spec.intra == "a2a":
        return not spec.resends
    others = spec.mode_topology.inter_size - 1 if spec.intra == "gather" else 0
    if not others or spec.resends or spec.circulate is Circulate.Q or spec.saves_remote is False:
        return False
    return bool(spec.saves_remote) or remote_kv_fits(spec.shape, others, circulating_share(spec))


def _circulate(spec: Spec, asked: Circulate | None) -> Decision:
    """What circulates in backward: what has fewer bytes per hop, unless asked for.

    Source: break-even of (K,V,dK,dV) against (Q,dO,lse,delta,dQ), BurstAttention
    (arXiv 2403.09347) generalised to grouped heads and to the dtype of the gradient on the wire.
    """
    if reuses_remote(spec):
        return Decision(Circulate.KV, "K and V stay in memory; only gradients are sent back")
    if spec.intra != "ring" and spec.mode_topology.inter_size == 1:
        return Decision(Circulate.KV, "one node")
    share = circulating_share(spec) if spec.intra == "gather" else 1.0
    shape = spec.shape
    if (
        spec.mode_topology.inter_size == 1 and spec.ring_sum_dtype is Dtype.SUM
    ):  # all hops are the ring's
        shape = replace(shape, grad_bytes=shape.stat_bytes)
    return choose_circulate(shape, asked, share)


def choose_circulate(
    shape: AttentionShape, asked: Circulate | None = None, share: float = 1.0
) -> Decision:
    """What circulates; `share`: of the keys that would."""
    cost = {
        circulate: sum(hop_bytes(shape, Direction.BACKWARD, circulate, share).values())
        for circulate in Circulate
    }
    of_kv, of_q = (format_bytes(cost[what]) for what in (Circulate.KV, Circulate.Q))
    figures = f"a hop of backward is {of_kv} for kv and {of_q} for q"
    if asked is not None:
        return Decision(asked, f"asked for; {figures}")
    return Decision(min(cost, key=cost.__getitem__), figures)


# ---- what was asked for -------------------------------------------------------------------------


def _check(spec: Spec) -> None:
    """Refuse a choice of the user's that the mode would ignore.

    What is trivially satisfied is not refused: on one node nothing goes between nodes, one rank
    sends nothing, and a ring takes all heads at once anyway.

    Raises:
        BurstError: if there is one, or the mode does not support the mask.
    """
    if spec.topology.cp_size > 1:
        check_mask(spec.mask, spec.layout, spec.intra or "", spec.mode_topology.inter_size == 1)
        require(_WHO, _needs_of_rings(spec) if spec.intra == "ring" else _needs_of_heads(spec))
    if len(set(spec.topology.node_of)) > 1:
        require(_WHO, _needs_between_nodes(spec))


def _needs_of_rings(spec: Spec) -> Iterator[Need]:
    yield from (
        (not spec.heads_per_round,
         "heads_per_round must come with gather or a2a, because a ring has no rounds of some heads",
         f"heads_per_round={spec.heads_per_round} and {describe_mode(spec)}",
         "leave it out, or pass --burst-intra gather (intra='gather') or a2a"),
        (not spec.pulled,
         "transfer=pull must come with gather or a2a, because shards of a ring are sent by NCCL",
         describe_mode(spec),
         "pass --burst-tune force.transfer=send or auto, or --burst-intra gather"),
    )  # fmt: skip


def _needs_of_heads(spec: Spec) -> Iterator[Need]:
    heads, most = (
        spec.heads_per_round or 0,
        max_heads(spec.shape, spec.mode_topology, spec.intra or ""),
    )
    # heads that cannot be sharded evenly are refused with their program
    uneven = spec.intra == "a2a" and spec.shape.heads_q % spec.mode_topology.intra_size
    does = "gathers" if spec.intra == "gather" else "computes"
    yield (
        heads <= most or uneven,
        f"heads_per_round must not exceed the KV heads that a rank {does}, because a round has "
        "some of them", f"{heads} of {most}", "leave it out",
    )  # fmt: skip


def _needs_between_nodes(spec: Spec) -> Iterator[Need]:
    yield (
        spec.circulate is None or spec.inter != "a2a",
        "circulate must come with a ring between nodes, because nothing circulates in an "
        "all-to-all over all ranks", f"circulate={spec.circulate} and inter=a2a",
        "leave one of them out",
    )  # fmt: skip
    # An all-to-all over all ranks keeps what it receives anyway. Where results are kept, backward
    # does not directly follow a forward; where it does, keys are kept.
    gathers = spec.intra == "gather" and spec.mode_topology.inter_size > 1
    yield (
        not spec.saves_remote
        or spec.inter == "a2a"
        or (gathers and spec.circulate is not Circulate.Q),
        "resend=never must come with keys that are gathered inside nodes while K and V circulate "
        "between nodes, because only those can stay until backward",
        f"circulate={spec.circulate or 'auto'}" if gathers else describe_mode(spec),
        "leave it out, or pass --burst-intra gather (intra='gather') and no circulate=q",
    )
