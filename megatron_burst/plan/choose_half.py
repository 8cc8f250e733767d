"""Whether the early half of a sequence is dealt out anew in a replay that keeps the later half."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.plan.choose import Choice
from megatron_burst.plan.cost import AttentionShape
from megatron_burst.plan.half import EarlyHalf, Move, early_half
from megatron_burst.plan.hardware import Hardware
from megatron_burst.plan.layout import Layout
from megatron_burst.plan.mask import Mask
from megatron_burst.plan.topology import Topology

_KERNEL_SHARE = 0.7  # of the GPU's peak, of a good attention kernel
_MESSAGE_MIB = 64


@dataclass(frozen=True, slots=True)
class Rates:
    """What dealing rows out between hosts is weighed with.

    Unless the machine is known: a fast kernel and a slow link, so that dealing does not lose.

    Attributes:
        tflops: TFLOP/s of attention's forward on a rank.
        gbs: GB/s that leave a rank for other hosts while all ranks send.
        source: where they are from, in words.
    """

    tflops: float = 700.0
    gbs: float = 5.0
    source: str = "assumed: --burst-hardware tells more"

    @classmethod
    def of(cls, machine: Hardware) -> "Rates":
        """Those of a machine that is known."""
        gbs = machine.links.inter.gbs.at(_MESSAGE_MIB) * machine.inter_share(machine.host.gpus)
        return cls(_KERNEL_SHARE * machine.gpu.peak_tflops, gbs, machine.name)


@lru_cache(maxsize=256)
def choose_half(
    layout: Layout,
    mask: Mask,
    topology: Topology,
    shape: AttentionShape,
    rates: Rates = Rates(),
    exchanged: bool = False,
) -> Choice:
    """What keeping the later half comes to: "dealt", "plain", or "none" where it gains nothing.

    Args:
        layout: how tokens are dealt out.
        mask: which keys a query may see.
        topology: of the group.
        shape: sizes of the call on one rank.
        rates: what dealing between hosts is weighed with.
        exchanged: whether heads are exchanged over all ranks, each of which has all rows then.
    """
    alone, several = topology.cp_size == 1, len(set(topology.host_of)) > 1
    if mask is not Mask.CAUSAL:
        return Choice("none", "without a causal mask half of the rows cost half of the time")
    if shape.tokens < 2:
        return Choice("none", "one row a rank cannot be halved")
    if alone or _is_even(layout, exchanged):
        return Choice("plain", "the early rows are spread evenly")
    otherwise, loses = "plain", "not dealt out anew"
    if layout is Layout.CONTIGUOUS:
        otherwise, loses = "none", "the later ranks would keep all of their rows"
    if shape.tokens % 4:
        return Choice(otherwise, f"{loses}: {shape.tokens} rows a rank are no multiple of 4")
    gains = "the early rows are dealt out anew, a quarter of a forward on each rank"
    if not several:
        return Choice("dealt", gains)
    spent = deal_seconds(early_half(layout, topology.cp_size, shape.tokens, True), topology, shape,
                         rates)  # fmt: skip
    saved = (_share(otherwise, topology.cp_size) - 0.25) * forward_seconds(shape, topology, rates)
    figures = (
        f"{1e3 * spent:.3g} ms between hosts for {1e3 * saved:.3g} ms of kernels less, at "
        f"{rates.gbs:.3g} GB/s and {rates.tflops:.3g} TFLOP/s a rank, {rates.source}"
    )
    if spent < saved:
        return Choice("dealt", f"{gains}: {figures}")
    return Choice(otherwise, f"{loses}: {figures}")


def _is_even(layout: Layout, exchanged: bool) -> bool:
    """Whether all ranks compute equally much of the early rows where they are."""
    return layout is Layout.STRIPED or (exchanged and layout is Layout.ZIGZAG)


def replayed_share(
    layout: Layout,
    mask: Mask,
    topology: Topology,
    shape: AttentionShape,
    rates: Rates = Rates(),
    exchanged: bool = False,
) -> float:
    """Share of a forward that the slowest rank computes again if the later half is kept.

    Args: those of `choose_half`.
    """
    how = choose_half(layout, mask, topology, shape, rates, exchanged).value
    if how == "plain" and _is_even(layout, exchanged):
        return 0.25
    return _share(how, topology.cp_size)


def _share(how: str, cp_size: int) -> float:
    return {"none": 1.0, "dealt": 0.25, "plain": (2 * cp_size - 1) / (4 * cp_size)}[how]


def forward_seconds(shape: AttentionShape, topology: Topology, rates: Rates) -> float:
    """Seconds of a causal forward on a rank, kernels alone."""
    pairs = shape.rows_q * shape.tokens * topology.cp_size / 2
    return 2 * pairs * (shape.dim_qk + shape.dim_v) / (rates.tflops * 1e12)


def deal_seconds(half: EarlyHalf, topology: Topology, shape: AttentionShape, rates: Rates) -> float:
    """Seconds that rows pass between hosts: Q, K, V of the early ones there, out and lse home;
    of the later ones that others keep, out and lse in both passes."""
    heads = shape.heads_q * shape.dim_qk + shape.heads_kv * (shape.dim_qk + shape.dim_v)
    inputs = shape.batch * heads * shape.itemsize
    outputs = shape.batch * shape.heads_q * (shape.dim_v * shape.itemsize + shape.stat_bytes)
    num_bytes = rows_between_hosts(half.moves, topology) * (inputs + outputs)
    num_bytes += rows_between_hosts(half.kept, topology) * 2 * outputs
    return num_bytes / (rates.gbs * 1e9)


def rows_between_hosts(moves: Sequence[Move], topology: Topology) -> int:
    """Rows that the busiest rank sends to other hosts, or receives from there."""
    sent, received = Counter(), Counter()
    for move in moves:
        if topology.host_of[move.source] != topology.host_of[move.dest]:
            sent[move.source] += len(move.rows)
            received[move.dest] += len(move.rows)
    return max([*sent.values(), *received.values()], default=0)
