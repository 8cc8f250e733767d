"""The choices that `auto` makes from a shape alone, each with its reason."""

from dataclasses import dataclass

from megatron_burst.plan.cost import AttentionShape, hop_bytes
from megatron_burst.plan.schedule import Circulate, Direction


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


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
