"""One attention call, how it is resolved, and the programs that the engine runs for it."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_burst.plan.choose import (
    AllToAll,
    Choice,
    choose_circulate,
    choose_inter,
    choose_intra,
    few_come,
    on_wire,
)
from megatron_burst.plan.choose_heads import (
    USUAL_MULTIPROCESSORS,
    choose_heads_a2a,
    choose_heads_gather,
    most_heads,
)
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.pieces import halo
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.spec import AttentionShape, Circulate, Direction, Kernel, Spec
from megatron_burst.schedule.topology import Topology, pretend_nodes

# kernels whose causal tiles may have more keys than queries
_RECTANGULAR = ("auto", "fa4", "fa3", "flash-attn", "flash", "triton", "reference")


@dataclass(frozen=True)
class AttentionCall:
    """An attention call and how it runs; "auto" as in `BurstConfig`."""

    shape: AttentionShape  # sizes on one rank; `grad_bytes` is left to `grad_wire`
    topology: Topology  # of the context-parallel group
    # GPUs of a node per rank of this group, including those that run other groups' rings at the
    # same time: the tensor-parallel size
    neighbours: int = 1
    intra: str = "auto"  # inside a node
    inter: str = "auto"  # between nodes
    heads_per_round: int | None = None  # of gather and a2a; None: as the engine chooses
    pieces: bool = True  # whether several rounds are allowed
    circulate: str = "auto"  # in backward
    transfer: str = "auto"  # inside a node: "send", "pull" by copy engine; "auto": pulls if it can
    overlap: bool = True  # whether transfers are hidden
    backend: str = "auto"  # attention kernel, or several joined by commas, the fastest first
    layout: Layout = Layout.ZIGZAG
    mask: Mask = Mask.CAUSAL
    device: str = "cuda"  # torch device type
    multiprocessors: int = USUAL_MULTIPROCESSORS  # of a GPU: heads of a round depend on them
    grad_wire: str = "auto"  # of gradients between ranks
    resend: str = "auto"  # whether gathered K and V go between nodes again in backward
    kernel: Kernel | None = None  # its properties that programs depend on; None: those of `backend`
    again: bool = False  # whether backward of a2a sends Q, K, V again, as results are kept

    @cached_property
    def between_why(self) -> Choice:
        """The mode between nodes, with the reason."""
        free = self.inter == "auto" and not self._of_rings and self.topology.inter_size > 1
        if free and self._wants_whole and self.mask.windowed:
            return Choice(
                "a2a",
                "with an all-to-all over all ranks each rank has whole "
                "documents, which windows need",
            )
        shape = on_wire(self.shape, self.grad_wire, self.topology.inter_size - 1)
        over_all = AllToAll(self._rounds_over_all, self.again)
        asked = self.inter, self._of_rings
        where = self.topology, self.layout, self.device
        return choose_inter(shape, *where, asked, over_all, self._travelling_share)

    @cached_property
    def _travelling_share(self) -> float:
        """Share of a shard's keys that circulates between nodes if gathered inside: under a window,
        what queries of other nodes see."""
        gathers = self.intra == "gather" or (self.intra == "auto" and self.device != "cpu")
        in_order = self.layout in (Layout.ZIGZAG, Layout.CONTIGUOUS)
        if not (self.mask.windowed and gathers and in_order) or self.topology.spans_nodes:
            return 1.0
        terms = self.topology, self.layout, self.mask, self.shape.tokens
        ends = (rank for ranks in self.topology.grid for rank in {ranks[0], ranks[-1]})
        return max(halo(*terms, rank).rows for rank in ends) / self.shape.tokens

    @property
    def _wants_whole(self) -> bool:
        """Whether giving a rank the whole sample for some heads is possible and may be better:
        documents make shards unequal in work, and windows in them need all keys of a query at
        once."""
        even = self.topology.cp_size > 1 and self.shape.heads_q % self.topology.cp_size == 0
        chunks = self.layout is not Layout.STRIPED
        gains = self.mask.windowed or self.device != "cpu"
        return self.mask.documents and even and chunks and gains

    @property
    def _of_rings(self) -> str:
        """A given option that an all-to-all over all ranks does not have, or ""."""
        given = {"intra": self.intra, "circulate": self.circulate, "transfer": self.transfer}
        given = {name: value for name, value in given.items() if value not in ("auto", "send")}
        if (self.heads_per_round or 0) > most_heads(self.shape, _flat(self.topology), "a2a"):
            given["heads_per_round"] = f"{self.heads_per_round}"
        return next((f"{name}={value}" for name, value in given.items()), "")

    @property
    def _rounds_over_all(self) -> int:
        """Rounds of an all-to-all over all ranks."""
        everyone = _flat(self.topology)
        asked = self.multiprocessors, self.heads_per_round, self.pieces
        heads = choose_heads_a2a(self.shape, everyone, *asked)
        return -(-most_heads(self.shape, everyone, "a2a") // heads)

    @property
    def between(self) -> str:
        """ "ring", "a2a" (over all ranks) or "flat"."""
        return self.between_why.value

    @cached_property
    def arranged(self) -> Topology:
        """The topology for programs: one row of all ranks, if nodes are ignored."""
        return self.topology if self.between == "ring" else _flat(self.topology)

    @cached_property
    def mode_why(self) -> Choice:
        """The mode among the ranks of a row of `arranged`, with the reason."""
        between = self.between
        one_row = self.arranged.inter_size == 1 and self.intra == "auto" and between != "a2a"
        if one_row and self.layout is Layout.DOCUMENTS and self.mask.right == 0:
            return Choice("gather", "chunks of each document are equal work on all ranks")
        if one_row and self._wants_whole:
            return Choice(
                "a2a", "each rank has all rows of some heads, so all ranks have equal work"
            )
        return choose_intra(self.arranged, self.layout, self.device, self.intra, between)

    @property
    def mode(self) -> str:
        """ "ring", "gather" or "a2a"."""
        return self.mode_why.value

    @property
    def can_recall(self) -> bool:
        """Whether gathered K and V come from other nodes and may be kept for backward."""
        travels = self.mode == "gather" and self.arranged.inter_size > 1
        return travels and self.circulate != "q"

    @cached_property
    def recalls(self) -> bool:
        """Whether K and V received from other nodes in forward are kept for backward."""
        if not self.can_recall or self.again or self.resend == "always":
            return False
        shape, others = self.priced, self.arranged.inter_size - 1
        return self.resend == "never" or few_come(shape, others, self._travelling_share)

    @property
    def left_bytes(self) -> int:
        """Memory of other nodes' K and V kept until backward."""
        if not self.recalls:
            return 0
        shape = self.shape
        width = (shape.dim_qk + shape.dim_v) * shape.itemsize
        rows = round(self._travelling_share * shape.rows_kv)
        return (self.arranged.inter_size - 1) * rows * width

    @cached_property
    def circulate_why(self) -> Choice:
        """What circulates in backward, with the reason."""
        if self.recalls:
            return Choice(
                Circulate.KV, "K and V stay in memory from forward; only gradients are sent back"
            )
        if self.mode == "ring" or self.arranged.inter_size > 1:
            share = self._travelling_share if self.mode == "gather" else 1.0
            ranks = self.arranged.intra_size if self.mode == "a2a" else 1
            return choose_circulate(self.priced.replicated(ranks), self.circulate, share)
        return Choice(Circulate.KV, "one node")

    @cached_property
    def priced(self) -> AttentionShape:
        """The shape, with gradients as wide as on the wire."""
        ring = self.mode == "ring"
        hops = (self.topology.cp_size if ring else self.arranged.inter_size) - 1
        return on_wire(self.shape, self.grad_wire, hops)

    @property
    def in_words(self) -> str:
        """Mode and topology."""
        if self.topology.inter_size == 1:
            return f"{self.mode} on {self.topology}"
        if self.between == "ring":
            return f"{self.mode} inside nodes, ring between them, on {self.topology}"
        return f"{self.mode} over all ranks of {self.topology}"

    @property
    def by_copy_engine(self) -> bool:
        """Whether ranks of a node pull from each other."""
        together = self.arranged.intra_size > 1 and not self.arranged.spans_nodes
        return self.transfer != "send" and together

    @cached_property
    def heads(self) -> int:
        """KV heads of a round: gathered, or per rank in an all-to-all."""
        asked = self.multiprocessors, self.heads_per_round, self.pieces
        if self.mode == "a2a":
            return choose_heads_a2a(self.shape, self.arranged, *asked)
        exposed = self.layout is Layout.DOCUMENTS  # a round is one kernel call over all its keys
        return choose_heads_gather(self.shape, self.arranged, *asked, exposed=exposed)

    def resolved(self, direction: Direction) -> "AttentionCall":
        """The call reduced to what a pass depends on: calls with the same pass become equal.

        What circulates is a choice in backward only; only an all-to-all can send everything again.
        """
        backward = direction is Direction.BACKWARD
        return replace(
            self, inter=self.between, intra=self.mode,
            heads_per_round=None if self.mode == "ring" else self.heads,
            circulate=Circulate(self.circulate_why.value if backward else Circulate.KV).value,
            resend="never" if self.recalls else "always",
            again=self.again and self.mode == "a2a",
        )  # fmt: skip

    def on_nodes(self, count: int) -> "AttentionCall":
        """A resolved call on another number of nodes in nested rings."""
        ranks = count * self.arranged.intra_size
        return replace(self, topology=pretend_nodes(ranks, count), inter="ring")

    @property
    def left(self) -> bool:
        """Whether forward saves for backward what it received: everything of an all-to-all, or K
        and V of other nodes."""
        return not self.again and (self.mode == "a2a" or self.recalls)

    def spec(self, cp_rank: int, direction: Direction) -> Spec:
        """The spec of a rank's program."""
        backward = direction is Direction.BACKWARD
        circulate = self.circulate_why.value if backward else Circulate.KV
        whole = self.backend.partition(",")[0] in _RECTANGULAR
        return Spec(
            self.arranged, cp_rank, direction, self.priced, self.layout, self.mask,
            Circulate(circulate), self.kernel or Kernel(rectangular_causal=whole),
            1 if self.mode == "ring" else self.heads, self.by_copy_engine, self.left,
        )  # fmt: skip

    def program(self, cp_rank: int, direction: Direction) -> Program:
        """The program that the engine runs on a rank.

        Raises:
            BurstError: if the call cannot run this way.
        """
        return self.program_of(self.spec(cp_rank, direction))

    def program_of(self, spec: Spec) -> Program:
        """The program of a spec that differs from this call's in a detail."""
        return program_of(self.mode, spec)


@lru_cache(maxsize=256)
def _flat(topology: Topology) -> Topology:
    return topology.flat()
