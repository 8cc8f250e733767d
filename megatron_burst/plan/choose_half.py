"""Whether the early half of a sequence is dealt out anew in a replay that keeps the later half."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_burst.plan.choose import Choice
from megatron_burst.plan.half import EarlyHalf, Move, early_half
from megatron_burst.plan.hardware import Hardware
from megatron_burst.schedule.call import AttentionShape
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import Topology

_KERNEL_SHARE = 0.7  # of the GPU's peak, of a good attention kernel
_MESSAGE_MIB = 64


@dataclass(frozen=True, slots=True)
class Rates:
    """What dealing rows out between nodes is weighed with.

    Unless the machine is known: a fast kernel and a slow link, so that dealing does not lose.

    Attributes:
        tflops: TFLOP/s of attention's forward on a rank.
        gbs: GB/s that leave a rank for other nodes while all ranks send.
        source: where they are from, in words.
    """

    tflops: float = 700.0
    gbs: float = 5.0
    source: str = "assumed: --burst-hardware tells more"

    @classmethod
    def of(cls, machine: Hardware) -> "Rates":
        """Those of a machine that is known."""
        gbs = machine.links.inter.gbs.at(_MESSAGE_MIB) * machine.inter_share(machine.node.gpus)
        return cls(_KERNEL_SHARE * machine.gpu.peak_tflops, gbs, machine.name)


@dataclass(frozen=True, slots=True)
class HalfCall:
    """A call of which the later half's results are to be kept.

    Attributes:
        layout: how tokens are dealt out.
        mask: which keys a query may see.
        topology: of the group.
        shape: sizes of the call on one rank.
        rates: what dealing between nodes is weighed with.
        exchanged: whether heads are exchanged over all ranks, each of which has all rows then.
    """

    layout: Layout
    mask: Mask
    topology: Topology
    shape: AttentionShape
    rates: Rates = Rates()
    exchanged: bool = False

    @property
    def is_even(self) -> bool:
        """Whether all ranks compute equally much of the early rows where they are."""
        exchanged = self.exchanged and self.layout is Layout.ZIGZAG
        return self.layout is Layout.STRIPED or exchanged or self.topology.cp_size == 1

    def half(self, deal: bool) -> EarlyHalf:
        """The early half, dealt out anew or not."""
        return early_half(self.layout, self.topology.cp_size, self.shape.tokens, deal)

    @property
    def forward_seconds(self) -> float:
        """Seconds of a causal forward on a rank, kernels alone."""
        shape = self.shape
        pairs = shape.rows_q * shape.tokens * self.topology.cp_size / 2
        return 2 * pairs * (shape.dim_qk + shape.dim_v) / (self.rates.tflops * 1e12)

    @property
    def deal_seconds(self) -> float:
        """Seconds that rows dealt out anew pass between nodes: Q, K, V of the early ones there, out
        and lse home; of the later ones that others keep, out and lse in both passes."""
        shape, half = self.shape, self.half(deal=True)
        heads = shape.heads_q * shape.dim_qk + shape.heads_kv * (shape.dim_qk + shape.dim_v)
        inputs = shape.batch * heads * shape.itemsize
        outputs = shape.batch * shape.heads_q * (shape.dim_v * shape.itemsize + shape.stat_bytes)
        num_bytes = rows_between_nodes(half.moves, self.topology) * (inputs + outputs)
        num_bytes += rows_between_nodes(half.kept, self.topology) * 2 * outputs
        return num_bytes / (self.rates.gbs * 1e9)


@lru_cache(maxsize=256)
def choose_half(call: HalfCall) -> Choice:
    """What keeping the later half comes to: "dealt", "plain", or "none" where it gains nothing."""
    rates, tokens = call.rates, call.shape.tokens
    if call.mask.documents or not call.mask.causal:
        return Choice("none", "but for one causal document half of the rows cost half of the time")
    if tokens < 2:
        return Choice("none", "one row a rank cannot be halved")
    if call.is_even:
        return Choice("plain", "the early rows are spread evenly")
    otherwise, loses = "plain", "not dealt out anew"
    if call.layout is Layout.CONTIGUOUS:
        otherwise, loses = "none", "the later ranks would keep all of their rows"
    if tokens % 4:
        return Choice(otherwise, f"{loses}: {tokens} rows a rank are no multiple of 4")
    gains = "the early rows are dealt out anew, a quarter of a forward on each rank"
    if len(set(call.topology.node_of)) == 1:
        return Choice("dealt", gains)
    spent = call.deal_seconds
    saved = (_share(otherwise, call.topology.cp_size) - 0.25) * call.forward_seconds
    figures = (
        f"{1e3 * spent:.3g} ms between nodes for {1e3 * saved:.3g} ms of kernels less, at "
        f"{rates.gbs:.3g} GB/s and {rates.tflops:.3g} TFLOP/s a rank, {rates.source}"
    )
    if spent < saved:
        return Choice("dealt", f"{gains}: {figures}")
    return Choice(otherwise, f"{loses}: {figures}")


def replayed_share(call: HalfCall) -> float:
    """Share of a forward that the slowest rank computes again if the later half is kept."""
    how = choose_half(call).value
    return 0.25 if how == "plain" and call.is_even else _share(how, call.topology.cp_size)


def _share(how: str, cp_size: int) -> float:
    return {"none": 1.0, "dealt": 0.25, "plain": (2 * cp_size - 1) / (4 * cp_size)}[how]


def rows_between_nodes(moves: Sequence[Move], topology: Topology) -> int:
    """Rows that the busiest rank sends to other nodes, or receives from there."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for move in moves:
        if topology.node_of[move.source] != topology.node_of[move.dest]:
            sent[move.source] += len(move.rows)
            received[move.dest] += len(move.rows)
    return max([*sent.values(), *received.values()], default=0)
