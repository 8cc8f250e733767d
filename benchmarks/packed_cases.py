"""Which packed samples and windows are measured, and what with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from benchmarks.cases import Case, Heads, Pass, head_counts, narrowed, numbers, preset_of
from benchmarks.documents import SEED, area, lengths_of, parents_of
from megatron_burst.errors import BurstError, nearest_multiples
from megatron_burst.schedule.layout import Layout
from megatron_burst.tools.units import in_units

_WHO = "benchmarks.packed"
_K = 1024
DOCUMENT_IMPLS = (
    "burst:auto", "burst:auto@zigzag", "burst:a2a@zigzag", "burst:gather@zigzag",
    "burst:ring@zigzag", "te:p2p", "te:a2a", "te:all_gather", "ceiling",
)  # fmt: skip
WINDOW_IMPLS = (
    "burst:auto", "burst:a2a", "burst:gather", "burst:ring", "te:a2a", "te:all_gather", "ceiling"
)  # fmt: skip
_DOCUMENTS_BETWEEN = (
    "burst:auto", "burst:auto@zigzag", "burst:ring", "burst:inter=a2a", "burst:inter=a2a@zigzag",
    "te:p2p", "te:a2a", "te:all_gather", "ceiling",
)  # fmt: skip
_WINDOWS_BETWEEN = ("burst:auto", "burst:inter=a2a", "te:a2a", "te:all_gather", "ceiling")


@dataclass(frozen=True, slots=True)
class PackedCase(Case):
    """Causal attention in a packed sample of these kinds of documents (`documents.lengths_of`),
    whose lengths are multiples of `multiple`; or, without, with a window: how many keys before its
    own a query sees. A batch of one."""

    documents: str = ""
    window: int | None = None
    seed: int = SEED
    multiple: int = 4

    @property
    def lengths(self) -> tuple[int, ...]:
        if not self.documents:
            return (self.seq,)
        return lengths_of(self.documents, self.seq, self.seed, self.multiple)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where documents begin, and where the last one ends."""
        return (0, *accumulate(self.lengths))

    @property
    def parents(self) -> tuple[int, ...] | None:
        """Of the documents, if they are an answer each to the first one."""
        return parents_of(self.documents, len(self.lengths))

    @property
    def layout(self) -> Layout:
        """The usual one."""
        each = self.documents and not self.parents
        return Layout.DOCUMENTS if each else Layout.ZIGZAG

    @property
    def area(self) -> float:
        """Pairs of queries and keys."""
        prompt, *answers = self.lengths if self.parents else (0,)
        return area(self.lengths, self.window) + prompt * sum(answers)

    @property
    def kind(self) -> str:
        """Documents, or the window, in a word."""
        if self.window is not None:
            return f"window-{in_units(self.window)}"
        return f"drawn-{self.seed}" if self.documents == "drawn" else self.documents

    def flops(self, pass_: Pass) -> float:
        """Floating-point operations of all ranks, by area; 2.5 times as many in backward."""
        forward = 2 * self.area * self.heads_q * (self.head_dim_qk + self.head_dim_v)
        return forward * (3.5 if pass_ == "fwd_bwd" else 1.0)

    def columns(self) -> dict[str, object]:
        columns = {"seed": self.seed, **Case.columns(self), "mask": self.kind}
        columns |= {"num_documents": len(self.lengths), "longest": max(self.lengths)}
        return columns | {"area": 2 * self.area / self.seq**2}

    def check(self, ranks: int) -> None:
        """Refuse what cannot be sharded, and unknown kinds of documents."""
        if self.seq % self.multiple:
            raise BurstError(
                f"{_WHO}: --seq must be a multiple of {self.multiple}, because each rank has two "
                f"chunks of each document; got {self.seq} on {ranks} ranks; choose a "
                f"{nearest_multiples(self.seq, self.multiple)}"
            )
        _ = self.lengths

    def __str__(self) -> str:
        what = f"{len(self.lengths)} documents, {self.kind}" if self.documents else self.kind
        return (
            f"S {in_units(self.seq)}, heads {self.heads_q}/{self.heads_kv} x {self.head_dim_qk}, "
            f"{what}, {100 * 2 * self.area / self.seq**2:.3g} % of causal, {self.dtype}"
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """A case and what it is measured with, as `--impl` says it."""

    case: PackedCase
    impls: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.case)


def _case(seq: int, heads: Heads, what: str | int) -> PackedCase:
    window, documents = (what, "") if isinstance(what, int) else (None, what)
    return PackedCase(seq, 1, *heads, documents=documents, window=window)


_MANY, _FEW = (64, 8), (32, 8)
_ONE_NODE = (  # the most telling ones first: time may run out
    (128, _MANY, "drawn"), (32, _MANY, "drawn"), (128, _MANY, 4 * _K), (64, _MANY, "drawn"),
    (128, _MANY, "half"), (128, _MANY, "each-2K"), (256, _MANY, "drawn"), (128, _FEW, "drawn"),
    (32, _FEW, "drawn"), (256, _MANY, 4 * _K), (64, _FEW, "drawn"), (256, _FEW, "drawn"),
    (128, _FEW, 4 * _K), (64, _MANY, "one"), (256, _FEW, 4 * _K), (64, _FEW, "one"),
)  # fmt: skip
_TWO_NODES = (
    (128, _MANY, "drawn"), (128, _FEW, "drawn"), (32, _MANY, "drawn"), (128, _MANY, 4 * _K),
    (128, _MANY, "half"), (256, _FEW, "drawn"), (128, _MANY, "each-2K"), (128, _FEW, 4 * _K),
    (64, _MANY, "one"),
)  # fmt: skip
PRESETS = {
    "one-node": (_ONE_NODE, DOCUMENT_IMPLS, WINDOW_IMPLS),
    "two-nodes": (_TWO_NODES, _DOCUMENTS_BETWEEN, _WINDOWS_BETWEEN),
}


@dataclass(frozen=True, slots=True)
class PackedGrid:
    """Lists whose product is a list of problems; beside a preset they narrow it down."""

    seqs: Sequence[int] = ()
    heads: Sequence[Heads] = ()
    documents: Sequence[str] = ()
    windows: Sequence[int] = ()

    def cases(self) -> tuple[PackedCase, ...]:
        what = (*self.documents, *self.windows) or ("drawn",)
        every = product(self.seqs or (128 * _K,), self.heads or (_MANY,), what)
        return tuple(_case(*each) for each in every)

    def admits(self, case: PackedCase) -> bool:
        """Whether a case is in the lists."""
        what = {*self.documents, *self.windows}
        listed = not self.heads or (case.heads_q, case.heads_kv) in self.heads
        listed &= not self.seqs or case.seq in self.seqs
        return listed and (not what or bool({case.documents, case.window} & what))


def grid_of(seq: str, heads: str, documents: str, window: str) -> PackedGrid:
    """The lists that were given as options."""
    kinds, windows = documents.split(",") if documents else (), numbers(window, "--window", _WHO)
    return PackedGrid(numbers(seq, "--seq", _WHO), head_counts(heads, _WHO), tuple(kinds), windows)


def packed_problems(preset: str, grid: PackedGrid, impls: Sequence[str]) -> tuple[Problem, ...]:
    """Problems of a preset, or of lists alone if it is ""; `impls` instead of the usual ones."""
    every, documents, windows = preset_of(preset or "one-node", PRESETS, _WHO)
    cases = grid.cases()
    if preset:
        cases = narrowed([_case(seq * _K, *rest) for seq, *rest in every], grid, _WHO)
    usual = {True: documents, False: windows}
    return tuple(Problem(case, tuple(impls) or usual[bool(case.documents)]) for case in cases)
