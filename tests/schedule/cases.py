"""Calls whose programs are checked: every mode, direction, layout, mask and option."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from unittest.mock import patch

from megatron_burst.schedule import emitter
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import EMITTERS
from megatron_burst.schedule.program import Program
from megatron_burst.schedule.spec import (
    AttentionShape,
    Circulate,
    Direction,
    Kernel,
    Spec,
    pulled_count,
)
from megatron_burst.schedule.topology import Topology, pretend_nodes

LAYOUTS = (Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.STRIPED)  # those that say where tokens are
MASKS = (Mask.FULL, Mask.CAUSAL)
# windows smaller and larger than a chunk, to the left, to the right and to both; documents
BANDS = (Mask(1, 0), Mask(3, 0), Mask(2, 1), Mask(None, 2), Mask(4, None))
DOCUMENTS = (Mask(right=0, documents=True), Mask(documents=True), Mask(2, 0, documents=True))


def shape_of(tokens: int, heads: tuple[int, int], tokens_kv: int | None = None) -> AttentionShape:
    """Sizes on a rank; chosen so that no two byte counts coincide."""
    widths = {"itemsize": 2, "stat_bytes": 7, "grad_bytes": 4}
    return AttentionShape(1, tokens, *heads, 3, 5, **widths, tokens_kv=tokens_kv)


@dataclass(frozen=True)
class Case:
    """A call on all ranks of a group."""

    mode: str
    topology: Topology
    layout: Layout
    mask: Mask
    circulate: Circulate = Circulate.KV
    kernel: Kernel = Kernel()
    rounds: int = 2
    pulled: bool = False
    one_slot: bool = False
    left: bool = False
    group: int = 1  # query heads per KV head on one rank
    copies: int = 1  # ranks of an all-to-all with the same KV heads
    tokens: int = 2
    tokens_kv: int | None = None
    boundaries: tuple[int, ...] = ()  # where documents begin, except the first

    def __str__(self) -> str:
        size = "x".join(map(str, (self.topology.inter_size, self.topology.intra_size)))
        flags = [name for name in ("pulled", "one_slot", "left") if getattr(self, name)]
        kernel = "rectangular_causal", "takes_delta", "wide_grads"
        flags += [name for name in kernel if getattr(self.kernel, name)]
        words = (self.mode, size, self.layout, f"{self.mask}", self.circulate,
                 f"{self.rounds} rounds", f"group {self.group}", f"copies {self.copies}",
                 f"{self.tokens} and {self.tokens_kv or self.tokens} rows", *flags)  # fmt: skip
        return " ".join(words)

    @cached_property
    def shape(self) -> AttentionShape:
        per_round = self.topology.intra_size if self.mode == "a2a" else 1
        heads = self.rounds * per_round
        heads = heads * self.group, heads // self.copies
        return shape_of(self.tokens, heads, self.tokens_kv)

    def spec(self, direction: Direction, rank: int = 0) -> Spec:
        circulate = self.circulate if direction is Direction.BACKWARD else Circulate.KV
        return Spec(
            self.topology, self.shape, self.layout, self.mask, self.kernel, intra=self.mode,
            heads_per_round=1, circulate=circulate, pulled=self.pulled, saves_remote=self.left,
            cp_rank=rank, direction=direction,
        )  # fmt: skip

    def programs(self, direction: Direction) -> list[Program]:
        spec = self.spec(direction)
        ranks = range(self.topology.cp_size)
        count = (lambda *_: 1) if self.one_slot else pulled_count
        with patch.object(emitter, "pulled_count", count):
            return [EMITTERS[self.mode](replace(spec, cp_rank=rank)) for rank in ranks]

    def passes(self) -> list[list[Program]]:
        """Forward and backward."""
        return [self.programs(direction) for direction in Direction]


def cases_on(topology: Topology, masks: Sequence[Mask] = MASKS) -> Iterator[Case]:
    """All distinct cases on a topology."""
    tokens = 4 if topology.cp_size <= 3 else 2  # chunks of two rows, where causal is not full
    for mode, layout, mask, circulate in product(EMITTERS, LAYOUTS, masks, Circulate):
        row = topology.flat() if mode == "a2a" else topology
        case = Case(mode, row, layout, mask, circulate, tokens=tokens)
        if mode == "ring":
            yield from _rings(replace(case, rounds=1))
        elif layout is not Layout.STRIPED:
            yield from _gathers(case)


def _rings(case: Case) -> Iterator[Case]:
    for takes_delta in (True, False):
        yield replace(case, kernel=Kernel(takes_delta=takes_delta), group=1 + takes_delta)


def _gathers(case: Case) -> Iterator[Case]:
    """Gather and a2a: rounds, remainders, transports, kernel abilities."""
    size, nodes = case.topology.intra_size, case.topology.inter_size
    if case.mode == "a2a" and case.circulate is Circulate.Q:
        return  # nothing circulates: the programs are those of circulating keys
    lefts = (False, True) if case.mode == "a2a" or nodes > 1 else (False,)
    if case.mode == "gather" and case.circulate is Circulate.Q:
        lefts = (False,)
    pulls = size > 1 and not case.topology.spans_nodes
    ways = ((False, False), (True, False), (True, True)) if pulls else ((False, False),)
    for left, (pulled, one_slot) in product(lefts, ways):
        for rounds, kernel in ((1, Kernel()), (2, Kernel(False, False)), (3, Kernel())):
            wide = replace(kernel, wide_grads=rounds == 2)
            copies = copies_of(size, rounds) if case.mode == "a2a" and pulled else 1
            yield replace(
                case, left=left, pulled=pulled, one_slot=one_slot, rounds=rounds, kernel=wide,
                group=1 + (rounds == 2), copies=copies,
            )  # fmt: skip


def copies_of(ranks: int, rounds: int) -> int:
    """The most copies possible in `rounds` rounds of one KV head per rank."""
    return next(n for n in range(ranks, 0, -1) if ranks % n == 0 and gcd(n, rounds) == 1)


def grid(nodes: int, ranks: int) -> Topology:
    return pretend_nodes(nodes * ranks, nodes)
