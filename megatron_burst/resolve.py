"""How a call runs: `resolve` makes each choice that a spec leaves open, with its reason.

The choices are the list `CHOICES`; each may read what the choices before it have set. `CHECKS` are
made between them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from megatron_burst import rules
from megatron_burst.logs import Decision
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.modes import check_intra, check_supported, max_heads, row_refusal
from megatron_burst.schedule.node_shards import halo
from megatron_burst.schedule.spec import LONG_SHARD, Circulate, Dtype, Spec

_MANY = 4  # ranks, of which each has an eighth of a document in a chunk
_WHOLE_BYTES = 384 << 20  # of a KV head over all rows, of which buffers take seven times as much
_IDLE, _SEQUENCE_BYTES = 0.1, 1 << 30  # share of the ranks' time; of a KV head over all rows

type Resolved = tuple[Spec, dict[str, Decision]]  # without open choices; reasons by field


@lru_cache(maxsize=4096)
def resolve(spec: Spec) -> Resolved:
    """Make the choices that a spec leaves open; returns them with the reasons of some.

    It is a pure function of what is the same on all ranks, so they agree without a broadcast.

    Raises:
        BurstError: if a choice that the user made cannot hold.
    """
    requested, reasons = spec, {}
    for field, choose in CHOICES:
        decision = choose(spec, requested)
        spec = replace(spec, **{field: decision.value})
        if decision.reason:
            reasons[field] = decision
        if field in CHECKS:
            CHECKS[field](spec)
    return spec, reasons


def reuses_remote(spec: Spec) -> bool:
    """Whether K and V that a gather received from other nodes stay until backward."""
    return bool(spec.saves_remote) and spec.intra == "gather"


def circulating_share(spec: Spec) -> float:
    """Share of a shard's keys that circulates between nodes if they are gathered inside: under a
    window, what queries of other nodes see."""
    gathers = spec.intra in ("gather", None)
    in_order = spec.layout in (Layout.ZIGZAG, Layout.CONTIGUOUS)
    topology = spec.topology
    if not (spec.mask.windowed and gathers and in_order) or topology.spans_nodes:
        return 1.0
    terms = topology, spec.layout, spec.mask, spec.shape.tokens
    ends = (rank for ranks in topology.grid for rank in {ranks[0], ranks[-1]})
    return max(halo(*terms, rank).rows for rank in ends) / spec.shape.tokens


# ---- between nodes ------------------------------------------------------------------------------


def _inter(spec: Spec, requested: Spec) -> Decision:
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
    if option := _only_in_rings(spec):
        return Decision("ring", f"{option} was asked for")
    if spec.mask.windowed and _prefers_whole_sequences(spec):
        reason = (
            "with an all-to-all over all ranks each rank has whole documents, which windows need"
        )
        return Decision("a2a", reason)
    if spec.layout is Layout.STRIPED or spec.shape.heads_q % spec.topology.cp_size:
        return Decision("ring", "no all-to-all over all ranks has this layout or number of heads")
    return _fewer_bytes(spec)


def _fewer_bytes(spec: Spec) -> Decision:
    over_all = replace(spec, inter="a2a").mode_topology
    shape = rules.with_wire_dtype(spec.shape, spec.grad_wire)
    share = circulating_share(spec)
    ring = min(rules.inter_ring_bytes(shape, spec.topology, way, share) for way in Circulate)
    sent = rules.a2a_bytes(shape, spec.topology, spec.resends)
    sizes = shape, over_all, spec.kernel.multiprocessors, spec.heads_per_round
    heads = rules.choose_heads_a2a(*sizes)
    bare = sent // -(-max_heads(shape, over_all, "a2a") // heads)
    figures = (
        f"between nodes a ring sends {rules.format_bytes(ring)} a rank, an all-to-all "
        f"{rules.format_bytes(sent)}, of which {rules.format_bytes(bare)} are exposed"
    )
    counted = sent + bare * (spec.topology.inter_size == 2)
    return Decision("a2a" if counted < ring else "ring", figures)


def _only_in_rings(spec: Spec) -> str:
    """A given choice that an all-to-all over all ranks does not have, or ""."""
    over_all = replace(spec, inter="a2a").mode_topology
    options = {"intra": spec.intra, "circulate": spec.circulate}
    options["transfer"] = "pull" if spec.pulled else None
    if (spec.heads_per_round or 0) > max_heads(spec.shape, over_all, "a2a"):
        options["heads_per_round"] = f"{spec.heads_per_round}"
    return next((f"{name}={value}" for name, value in options.items() if value is not None), "")


def _prefers_whole_sequences(spec: Spec) -> bool:
    """Whether giving a rank the whole sample for some heads is possible and may be better:
    documents make shards unequal in work, and windows in them need all keys of a query at once."""
    size = spec.topology.cp_size
    even = size > 1 and spec.shape.heads_q % size == 0
    return spec.mask.documents and even and spec.layout is not Layout.STRIPED


# ---- among the ranks of a row -------------------------------------------------------------------


def _intra(spec: Spec, requested: Spec) -> Decision:
    """Among the ranks of a row: "ring", "gather" or "a2a"."""
    row, over_all = spec.mode_topology, spec.inter == "a2a"
    if row.cp_size == 1:
        return Decision("ring", "one rank")
    if spec.inter == "flat":
        return Decision("ring", "one ring over all ranks")
    if spec.shape.tokens_kv:
        return Decision("ring", "queries and keys have different lengths")
    if spec.intra is None and row.inter_size == 1 and not over_all:
        if spec.layout is Layout.DOCUMENTS and spec.mask.right == 0:
            return Decision("gather", "chunks of each document are equal work on all ranks")
        if _prefers_whole_sequences(spec):
            return Decision("a2a", "each rank has all rows of some heads: equal work")
    if over_all:
        return Decision("a2a", "over all ranks")
    if spec.intra is not None:
        return Decision(spec.intra, "asked for")
    if row_refusal(spec):
        return Decision("ring", "gathering does not support it")
    whole = spec.heads_per_round is None and _gives_sequences(spec)
    if whole and _window_leaves_ranks_idle(spec):
        return Decision("a2a", "under this window ranks with the first rows would wait")
    return Decision("gather", "few long kernel calls, merged once")


def _gives_sequences(spec: Spec) -> bool:
    """Whether an all-to-all gives each rank of a node whole causal sequences."""
    mask, row = spec.mask, spec.mode_topology
    causal = spec.layout is Layout.ZIGZAG and mask.right == 0 and not mask.documents
    return causal and row.inter_size == 1 and spec.shape.heads_q % row.cp_size == 0


def _window_leaves_ranks_idle(spec: Spec) -> bool:
    """Whether ranks wait under a window, and an all-to-all fits that would keep them busy."""
    left = spec.mask.left
    if left is None or not _fits_over_all_rows(spec, _SEQUENCE_BYTES):
        return False
    return rules.window_imbalance(left, spec.mode_topology.cp_size, spec.shape.tokens) > _IDLE


def _fits_over_all_rows(spec: Spec, most_bytes: int) -> bool:
    """Whether shards are long, and a KV head over all rows of a node is no larger than that."""
    num_bytes = rules.head_bytes_over_all_rows(spec.shape, spec.mode_topology)
    return spec.shape.tokens >= LONG_SHARD // 2 and num_bytes <= most_bytes


def _wire(spec: Spec, requested: Spec) -> Decision:
    """The shape with the dtype of gradients between ranks."""
    return Decision(rules.with_wire_dtype(spec.shape, spec.grad_wire))


def _heads_per_round(spec: Spec, requested: Spec) -> Decision:
    """KV heads of a round; None in a ring."""
    if spec.intra == "ring":
        return Decision(None)
    sizes = spec.shape, spec.mode_topology, spec.kernel.multiprocessors, spec.heads_per_round
    if spec.intra == "a2a":
        return Decision(rules.choose_heads_a2a(*sizes))
    # a round is one kernel call over all its keys
    return Decision(rules.choose_heads_gather(*sizes, exposed=spec.layout is Layout.DOCUMENTS))


def _pulled(spec: Spec, requested: Spec) -> Decision:
    """Whether ranks of a row may read each other's memory."""
    row = spec.mode_topology
    return Decision(spec.pulled is not False and row.intra_size > 1 and not row.spans_nodes)


# ---- backward -----------------------------------------------------------------------------------


def _saves_remote(spec: Spec, requested: Spec) -> Decision:
    """Whether forward saves what it received: everything of an all-to-all; of a gather K and V of
    other nodes, if asked for or if they are few."""
    if spec.intra == "a2a":
        return Decision(not spec.resends)
    num_remote = spec.mode_topology.inter_size - 1 if spec.intra == "gather" else 0
    must_resend = spec.resends or spec.circulate is Circulate.Q or spec.saves_remote is False
    if not num_remote or must_resend:
        return Decision(False)
    fits = rules.remote_kv_fits(spec.shape, num_remote, circulating_share(spec))
    return Decision(bool(spec.saves_remote) or fits)


def _a2a_backward_heads(spec: Spec, requested: Spec) -> Decision:
    """KV heads that a rank computes at a time if backward of a gather is an all-to-all; 0 if not.

    Backward's kernels are faster over whole documents than over the short chunks of many ranks. On
    long shards this makes up for sending more, if there are rounds to hide; on very long ones it
    would take too much memory. With two head dimensions cuDNN's are faster at any length.
    """
    is_requested = requested.intra or requested.heads_per_round is not None
    if spec.intra != "gather" or is_requested or spec.mask.windowed:
        return Decision(0)
    shape, row, kernel = spec.shape, spec.mode_topology, spec.kernel
    slow = shape.dim_qk != shape.dim_v and not kernel.rectangular_causal and _gives_sequences(spec)
    many = row.inter_size == 1 and row.intra_size >= _MANY and not row.spans_nodes
    fits = _fits_over_all_rows(spec, _WHOLE_BYTES)
    if not (slow or (many and fits and _prefers_whole_sequences(spec))):
        return Decision(0)
    heads = rules.choose_heads_a2a(shape, row, kernel.multiprocessors)
    return Decision(heads if slow or heads < max_heads(shape, row, "a2a") else 0)


def _circulate(spec: Spec, requested: Spec) -> Decision:
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
    # on one row all hops are the ring's, which may sum in the accumulation dtype
    if spec.mode_topology.inter_size == 1 and spec.ring_sum_dtype is Dtype.SUM:
        shape = replace(shape, grad_bytes=shape.stat_bytes)
    return rules.choose_circulate(shape, requested.circulate, share)


CHOICES: tuple[tuple[str, Callable[[Spec, Spec], Decision]], ...] = (  # (field, its choice)
    ("inter", _inter),
    ("intra", _intra),
    ("shape", _wire),
    ("heads_per_round", _heads_per_round),
    ("pulled", _pulled),
    ("saves_remote", _saves_remote),
    ("a2a_backward_heads", _a2a_backward_heads),
    ("circulate", _circulate),
)
CHECKS = {"inter": check_intra, "intra": check_supported}  # what is refused once it is chosen
