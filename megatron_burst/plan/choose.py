"""The choices that `auto` makes from a shape alone, each with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_burst.errors import BurstError
from megatron_burst.plan.cost import AttentionShape, hop_bytes
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.schedule import Circulate, Direction
from megatron_burst.plan.topology import Topology

_ROUND_BYTES = 128 << 20  # gathered keys and values of one round: more of them is no faster
_ONLY_ROUND_BYTES = 256 << 20  # but what fits in a single round needs no second slot either
_ROUND_QUERIES = 32 << 10  # rows x query heads of a tile: 256 blocks of 128 fill a Hopper twice


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why, in words for the user."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


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
    return Choice(min(cost, key=cost.get), figures)


def choose_intra(topology: Topology, layout: Layout, device: str, asked: str) -> Choice:
    """How queries and keys come together inside a host: "ring", "gather" or "a2a".

    Args:
        topology: of the group.
        layout: how tokens are dealt out.
        device: torch device type.
        asked: "auto", "ring", "gather" or "a2a".

    Raises:
        BurstError: if gathering or exchanging was asked for across hosts or in the striped layout.
    """
    hosts = len(set(topology.host_of))
    cannot = None
    if hosts > 1:
        cannot = (
            f"all ranks must share a host, because keys or heads travel over NVLink; got {hosts}"
        )
    elif layout is Layout.STRIPED:
        cannot = "the layout must not be striped, because whole sequences lie in order; got striped"
    if asked in ("gather", "a2a") and cannot:
        what = "gather" if asked == "gather" else "exchange heads"
        raise BurstError(
            f"burst attention: to {what}, {cannot}; pass --burst-intra ring (intra='ring') or auto"
        )
    if asked != "auto":
        return Choice(asked, "asked for")
    if cannot or topology.cp_size == 1:
        return Choice("ring", "one rank" if topology.cp_size == 1 else "gathering cannot do it")
    if device == "cpu":
        return Choice("ring", "on CPU nothing is gained by fewer kernel calls")
    return Choice("gather", "one host: few long kernel calls, no merging")


def choose_transfer(
    topology: Topology, device: str, asked: str, try_out: Callable[[], str | None]
) -> Choice:
    """How gathered keys move inside a host: "send" or "pull".

    Args:
        topology: of the group.
        device: torch device type.
        asked: "auto", "send" or "pull".
        try_out: why ranks cannot pull here, or None; called only if nothing else speaks against it.

    Raises:
        BurstError: if pulling was asked for and cannot be done.
    """
    if asked == "send":
        return Choice("send", "asked for")
    if device != "cuda":
        cannot = f"the ranks must use GPUs, because copy engines are theirs; got {device}"
    elif (hosts := len(set(topology.host_of))) > 1:
        cannot = f"all ranks must share a host, because they read each other's memory; got {hosts}"
    else:
        reason = try_out() if topology.cp_size > 1 else None
        cannot = reason and f"symmetric memory must work between the GPUs; got: {reason}"
    if cannot and asked == "pull":
        raise BurstError(
            f"burst attention: to pull, {cannot}; pass --burst-transfer send (transfer='send') or "
            "auto"
        )
    if cannot:
        return Choice("send", cannot)
    return Choice("pull", "asked for" if asked == "pull" else "by copy engine, beside the kernels")


def choose_heads_per_round(shape: AttentionShape, cp_size: int, asked: int | None) -> int:
    """Key heads that are gathered at a time: as few as keep the kernels busy, for small buffers.

    Args:
        shape: sizes of the call on one rank.
        cp_size: size of the context-parallel group.
        asked: by the user; None lets the rule decide.

    Raises:
        BurstError: if more heads were asked for than there are.
    """
    if asked is not None and asked > shape.heads_kv:
        raise BurstError(
            "burst attention: heads_per_round must not exceed the key heads of a rank, because a "
            f"round gathers some of them; got {asked} of {shape.heads_kv}; leave it out"
        )
    if asked is not None:
        return asked
    head_bytes = shape.batch * shape.tokens * cp_size * (shape.dim_qk + shape.dim_v)
    head_bytes *= shape.itemsize
    if head_bytes * shape.heads_kv <= _ONLY_ROUND_BYTES:
        return shape.heads_kv
    in_bytes = _ROUND_BYTES // head_bytes
    chunk = shape.batch * -(-shape.tokens // 2)  # of zigzag: the queries of a tile
    to_fill = -(-_ROUND_QUERIES // (chunk * shape.heads_q // shape.heads_kv))
    return min(shape.heads_kv, max(1, in_bytes, to_fill))


def choose_heads_per_exchange(shape: AttentionShape, cp_size: int, asked: int | None) -> int:
    """Key heads that a rank computes in a round: few, as each is a whole sequence's work.

    Args:
        shape: sizes of the call on one rank.
        cp_size: size of the context-parallel group.
        asked: by the user; None lets the rule decide.
    """
    group = shape.heads_q // shape.heads_kv
    a_head = shape.batch * shape.tokens * cp_size * (group + 1) * (shape.dim_qk + shape.dim_v)
    most = max(1, shape.heads_kv // cp_size)
    return min(most, asked or max(1, 2 * _ROUND_BYTES // (a_head * shape.itemsize)))


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
