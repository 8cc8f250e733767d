"""The choices that `auto` makes from shapes alone, each with its reason, and their bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import AttentionShape, Cargo, Circulate, Direction
from megatron_burst.schedule.topology import Topology

_ON_CPU = "on CPUs fewer kernel calls gain nothing"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why, as text for the user; "" if it needs no reason."""

    value: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})" if self.reason else self.value


@dataclass(frozen=True, slots=True)
class AllToAll:
    """How an all-to-all over all ranks would run."""

    rounds: int
    again: bool = False  # whether backward sends Q, K and V again (`a2a_widths`)


def on_wire(shape: AttentionShape, grad_wire: str, hops: int) -> AttentionShape:
    """The shape with gradients as wide as on the wire.

    Args:
        shape: sizes of the call.
        grad_wire: "accumulate", "input" or "auto": the model's dtype if a sum makes at most one
            hop. It is then rounded once, like the kernels' results, and added in float32.
        hops: of a sum of gradients.
    """
    narrow = grad_wire == "input" or (grad_wire == "auto" and hops <= 1)
    return replace(shape, grad_bytes=shape.itemsize if narrow else shape.stat_bytes)


def few_come(shape: AttentionShape, others: int, share: float = 1.0) -> bool:
    """Whether K and V of all other nodes' pieces (the share that circulates) take no more memory
    than the queries, and returning their gradients takes no longer than with circulating Q."""
    keys = share * shape.rows_kv * (shape.dim_qk + shape.dim_v)
    sides = hop_bytes(shape, Direction.BACKWARD, Circulate.Q).values()
    return others * keys <= shape.rows_q * shape.dim_qk and keys * shape.grad_bytes <= sum(sides)


def hop_bytes(
    shape: AttentionShape, direction: Direction, circulate: Circulate, share: float = 1.0
) -> dict[Cargo, int]:
    """Bytes of one hop of each cargo; `share`: of the keys that circulates.

    K,V: `read` is K and V, `grad` dK and dV. Q (backward only): `read` is Q, dO and the
    statistics lse and delta, `grad` dQ.
    """
    both_dims = shape.dim_qk + shape.dim_v
    if circulate is Circulate.KV:
        elements = round(share * shape.rows_kv * both_dims)
        read, grad = elements * shape.itemsize, elements * shape.grad_bytes
    else:
        read = shape.rows_q * (both_dims * shape.itemsize + 2 * shape.stat_bytes)
        grad = shape.rows_q * shape.dim_qk * shape.grad_bytes
    return {Cargo.READ: read, Cargo.GRAD: grad if direction is Direction.BACKWARD else 0}


def a2a_bytes(shape: AttentionShape, topology: Topology, again: bool = False) -> int:
    """Bytes that a rank sends to other nodes in both passes of an all-to-all over all ranks.

    Of all that is sent (`a2a_widths`), copies of KV heads among it, 1 - 1/N goes to other nodes.
    """
    widths = a2a_widths(shape.replicated(topology.cp_size), again).values()
    every = shape.batch * shape.tokens * sum(there + back for there, back in widths)
    return every - every // topology.inter_size


def nested_bytes(
    shape: AttentionShape, topology: Topology, circulate: Circulate, share: float = 1.0
) -> int:
    """Bytes that a rank sends to other nodes in both passes of a ring between nodes; `share`: of
    the keys that circulates."""
    forward = hop_bytes(shape, Direction.FORWARD, Circulate.KV, share)
    backward = hop_bytes(shape, Direction.BACKWARD, circulate, share)
    return (topology.inter_size - 1) * sum((*forward.values(), *backward.values()))


def a2a_widths(shape: AttentionShape, again: bool = False) -> dict[Direction, tuple[int, int]]:
    """Bytes of a token's heads in an all-to-all, there and back, by direction; for a shape that is
    `replicated` for its ranks.

    Forward: Q, K, V there; the output and lse back. Backward: dO and delta there; dQ, dK, dV back.
    With `again` backward sends Q, K, V and lse too: kept results replace the forward that would
    have saved them.
    """
    q = shape.heads_q * shape.dim_qk * shape.itemsize
    out = shape.heads_q * shape.dim_v * shape.itemsize
    kv = shape.heads_kv * (shape.dim_qk + shape.dim_v) * shape.itemsize
    stats = shape.heads_q * shape.stat_bytes
    return {
        Direction.FORWARD: (q + kv, out + stats),
        Direction.BACKWARD: (out + stats + (q + kv + stats if again else 0), q + kv),
    }


def choose_circulate(shape: AttentionShape, asked: str, share: float = 1.0) -> Choice:
    """Which operand circulates in backward: the one with fewer bytes per hop, unless asked for;
    `share`: of the keys that circulates.

    Source: break-even of (K,V,dK,dV) against (Q,dO,lse,delta,dQ), BurstAttention
    (arXiv 2403.09347) generalised to grouped heads and to the dtype of the gradient on the wire.
    """
    cost = {
        circulate: sum(hop_bytes(shape, Direction.BACKWARD, circulate, share).values())
        for circulate in Circulate
    }
    figures = (
        f"a hop of backward is {_size(cost[Circulate.KV])} for kv "
        f"and {_size(cost[Circulate.Q])} for q"
    )
    if asked != "auto":
        return Choice(Circulate(asked), f"asked for; {figures}")
    return Choice(min(cost, key=cost.__getitem__), figures)


def choose_intra(
    topology: Topology, layout: Layout, device: str, asked: str, inter: str = "ring"
) -> Choice:
    """The mode inside a node: "ring", "gather" or "a2a".

    Args:
        topology: of the group.
        layout: how tokens are sharded.
        device: torch device type.
        asked: "auto", "ring", "gather" or "a2a".
        inter: the mode between nodes; "a2a" and "flat" run one mode over all ranks.

    Raises:
        BurstError: if gather or a2a was asked for across nodes or in the striped layout.
    """
    if topology.cp_size == 1:
        return Choice("ring", "one rank")
    if inter == "flat":
        return Choice("ring", "one ring over all ranks")
    if inter == "a2a":
        asked = "a2a"
    cannot = None
    if topology.spans_nodes and inter != "a2a":
        cannot = (
            "a row of ranks must share a node, because keys or heads travel over NVLink; got "
            f"{topology}"
        )
    elif layout is Layout.STRIPED:
        cannot = "the layout must not be striped, because whole sequences lie in order; got striped"
    if asked in ("gather", "a2a") and cannot:
        raise BurstError(
            f"burst attention: for intra={asked} {cannot}; pass --burst-intra ring (intra='ring') "
            "or auto"
        )
    if asked != "auto":
        return Choice(asked, "over all ranks" if inter == "a2a" else "asked for")
    if cannot:
        return Choice("ring", "gathering does not support it")
    if device == "cpu":
        return Choice("ring", _ON_CPU)
    return Choice("gather", "few long kernel calls, merged once")


def choose_inter(
    shape: AttentionShape,
    topology: Topology,
    layout: Layout,
    device: str,
    asked: tuple[str, str],
    over_all: AllToAll,
    share: float = 1.0,
) -> Choice:
    """The mode between nodes: "ring", "a2a" (over all ranks) or "flat".

    Bytes decide, and exposed ones count twice: for an all-to-all in R rounds, the first round there
    and the last one back, 1/R of the total in each pass. A ring begins and ends with work on the
    node's own shards. It is counted as if K and V circulated again in backward, even where they are
    kept: counting less would change only calls for which the simulated all-to-all is as fast or
    faster. Documents do not matter: where they start at any token the slowest rank of a ring has
    more work, but never so much that typical ones would change the choice.

    Args:
        shape: sizes of the call on one rank.
        topology: of the group.
        layout: how tokens are sharded.
        device: torch device type.
        asked: inter ("auto", "ring", "a2a", "flat"), and a given option that an all-to-all over all
            ranks does not have, such as "intra=gather", or "".
        over_all: the all-to-all that the ring is compared with.
        share: of the keys that circulates in a ring.
    """
    inter, of_rings = asked
    if inter != "auto":
        return Choice(inter, "asked for")
    if topology.inter_size == 1:
        return Choice("ring", "one row of ranks")
    if of_rings:
        return Choice("ring", f"{of_rings} was asked for")
    if device == "cpu":
        return Choice("ring", _ON_CPU)
    if layout is Layout.STRIPED or shape.heads_q % topology.cp_size:
        return Choice("ring", "no all-to-all over all ranks has this layout or number of heads")
    ring = min(nested_bytes(shape, topology, circulate, share) for circulate in Circulate)
    sent = a2a_bytes(shape, topology, over_all.again)
    bare = sent // over_all.rounds
    figures = (
        f"between nodes a ring sends {_size(ring)} a rank, an all-to-all {_size(sent)}, of "
        f"which {_size(bare)} are exposed"
    )
    return Choice("a2a" if sent + bare < ring else "ring", figures)


def choose_transfer(
    topology: Topology, device: str, asked: str, try_out: Callable[[], str | None]
) -> Choice:
    """How gathered keys move inside a node: "send" or "pull".

    Args:
        topology: of the group.
        device: torch device type.
        asked: "auto", "send" or "pull".
        try_out: returns why ranks cannot pull here, or None; called only if nothing else rules it
            out.

    Raises:
        BurstError: if pulling was asked for and cannot be done.
    """
    if topology.cp_size == 1:
        return Choice("send", "one rank")
    if asked == "send":
        return Choice("send", "asked for")
    cannot: str | None
    if device != "cuda":
        cannot = f"the ranks must use GPUs, because only GPUs have copy engines; got {device}"
    elif topology.spans_nodes or topology.intra_size == 1:
        cannot = (
            "a rank must share its node with those it gathers from, because it reads their memory; "
            f"got {topology}"
        )
    else:
        reason = try_out()
        cannot = reason and f"symmetric memory must work between the GPUs; got: {reason}"
    if cannot and asked == "pull":
        raise BurstError(
            f"burst attention: to pull, {cannot}; pass --burst-tune transfer=send or transfer=auto"
        )
    if cannot:
        return Choice("send", cannot)
    return Choice("pull", "asked for" if asked == "pull" else "by copy engine, while kernels run")


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
