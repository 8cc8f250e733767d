"""The choices that `auto` makes from a shape alone, each with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.plan.cost import exchange_bytes, hop_bytes, nested_bytes
from megatron_burst.schedule.call import AttentionShape, Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.topology import Topology


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why, in words for the user; "" where it needs no reason."""

    value: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})" if self.reason else self.value


@dataclass(frozen=True, slots=True)
class Exchange:
    """How heads would be exchanged over all ranks.

    Attributes:
        rounds: in which.
        again: whether backward exchanges Q, K and V again (`exchange_widths`).
    """

    rounds: int
    again: bool = False


def choose_circulate(shape: AttentionShape, asked: str) -> Choice:
    """Which operand circulates in backward: the one with fewer bytes a hop, unless asked for.

    Args:
        shape: sizes of the call on one rank.
        asked: "auto", "kv" or "q".

    Source: break-even of (K,V,dK,dV) against (Q,dO,lse,delta,dQ), BurstAttention
    (arXiv 2403.09347) generalised to grouped heads and to the dtype of the gradient on the wire.
    """
    cost = {
        circulate: sum(hop_bytes(shape, Direction.BACKWARD, circulate).values())
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
    """How queries and keys come together inside a node: "ring", "gather" or "a2a".

    Args:
        topology: of the group.
        layout: how tokens are dealt out.
        device: torch device type.
        asked: "auto", "ring", "gather" or "a2a".
        inter: how it goes between nodes; "a2a" and "flat" run the same over all ranks.

    Raises:
        BurstError: if gathering or exchanging was asked for across nodes or in the striped layout.
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
        what = "gather" if asked == "gather" else "exchange heads"
        raise BurstError(
            f"burst attention: to {what}, {cannot}; pass --burst-intra ring (intra='ring') or auto"
        )
    if asked != "auto":
        return Choice(asked, "over all ranks" if inter == "a2a" else "asked for")
    if cannot:
        return Choice("ring", "gathering cannot do it")
    if device == "cpu":
        return Choice("ring", "on CPU nothing is gained by fewer kernel calls")
    return Choice("gather", "few long kernel calls, merged once")


def choose_inter(
    shape: AttentionShape,
    topology: Topology,
    layout: Layout,
    device: str,
    asked: tuple[str, str],
    exchange: Exchange,
) -> Choice:
    """How queries and keys come together between nodes: "ring", "a2a" (over all ranks) or "flat".

    Bytes decide, and those that nothing hides count twice: of an exchange in R rounds the first
    round there and the last one back, 1/R of all in each pass. A ring begins and ends with work on
    the node's own shards. It is counted as if K and V went round again in backward, also where they
    stay: counting less would change only calls of which simulation says that the exchange is as
    fast or faster.

    Args:
        shape: sizes of the call on one rank.
        topology: of the group.
        layout: how tokens are dealt out.
        device: torch device type.
        asked: inter ("auto", "ring", "a2a", "flat"), and an option that was given and that an
            exchange over all ranks does not have, such as "intra=gather", or "".
        exchange: what the ring is compared with.
    """
    inter, of_rings = asked
    if inter != "auto":
        return Choice(inter, "asked for")
    if topology.inter_size == 1:
        return Choice("ring", "one row of ranks")
    if of_rings:
        return Choice("ring", f"{of_rings} was asked for")
    if device == "cpu":
        return Choice("ring", "on CPU nothing is gained by fewer kernel calls")
    if layout is Layout.STRIPED or shape.heads_kv % topology.cp_size:
        return Choice("ring", "this layout or number of heads is not exchanged over all ranks")
    ring = min(nested_bytes(shape, topology, circulate) for circulate in Circulate)
    sent = exchange_bytes(shape, topology, exchange.again)
    bare = sent // exchange.rounds
    figures = (
        f"between nodes a ring sends {_size(ring)} a rank, an exchange {_size(sent)}, of which "
        f"{_size(bare)} have nothing to hide behind"
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
        try_out: why ranks cannot pull here, or None; called only if nothing else speaks against it.

    Raises:
        BurstError: if pulling was asked for and cannot be done.
    """
    if topology.cp_size == 1:
        return Choice("send", "one rank")
    if asked == "send":
        return Choice("send", "asked for")
    cannot: str | None
    if device != "cuda":
        cannot = f"the ranks must use GPUs, because copy engines are theirs; got {device}"
    elif topology.spans_nodes:
        cannot = (
            "the ranks that gather must share a node, because they read each other's memory; got "
            f"{topology}"
        )
    elif topology.intra_size == 1:
        cannot = "a rank must share its node with another, because it reads the other's memory"
    else:
        reason = try_out()
        cannot = reason and f"symmetric memory must work between the GPUs; got: {reason}"
    if cannot and asked == "pull":
        raise BurstError(
            f"burst attention: to pull, {cannot}; pass --burst-tune transfer=send or transfer=auto"
        )
    if cannot:
        return Choice("send", cannot)
    return Choice("pull", "asked for" if asked == "pull" else "by copy engine, beside the kernels")


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
