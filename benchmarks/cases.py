"""Which attention problems are measured: one problem, lists of them, presets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

from benchmarks.impls import pick
from megatron_burst.errors import BurstError, nearest_multiples, require
from megatron_burst.tools.units import in_units, whole_numbers

_WHO = "benchmarks.attention"
Pass = Literal["fwd", "fwd_bwd"]
Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem, over all ranks: fields are columns of the results."""

    seq: int
    batch: int = 1
    heads_q: int = 32
    heads_kv: int = 8
    head_dim_qk: int = 128
    head_dim_v: int = 128
    mask: Literal["causal", "full"] = "causal"
    dtype: str = "bfloat16"

    def flops(self, pass_: Pass) -> float:
        """Floating-point operations of all ranks: 2 products forward, 5 more backward."""
        square = self.batch * self.heads_q * self.seq**2 * (0.5 if self.mask == "causal" else 1.0)
        forward = 2 * square * (self.head_dim_qk + self.head_dim_v)
        return forward * (3.5 if pass_ == "fwd_bwd" else 1.0)

    def columns(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(Case)}

    def check(self, ranks: int) -> None:
        """Refuse what cannot be sharded in zigzag over the ranks."""
        if self.seq % (2 * ranks):
            raise BurstError(
                f"{_WHO}: --seq must be a multiple of twice the ranks, because zigzag gives each "
                f"rank two chunks; got {self.seq} on {ranks} ranks; choose a "
                f"{nearest_multiples(self.seq, 2 * ranks)}"
            )

    def __str__(self) -> str:
        dims = "/".join(map(str, dict.fromkeys((self.head_dim_qk, self.head_dim_v))))
        return (
            f"S {in_units(self.seq)}, batch {self.batch}, heads {self.heads_q}/{self.heads_kv} x "
            f"{dims}, {self.mask}, {self.dtype}"
        )


def numbers(text: str, option: str, who: str) -> tuple[int, ...]:
    """The whole numbers of a list that an option may leave empty."""
    return whole_numbers(text, option, who) if text else ()


def head_counts(text: str, who: str) -> tuple[Heads, ...]:
    """Query and KV heads in a list such as "32/32,32/8", which may be empty; `who` refuses."""
    words = text.split(",") if text else ()
    counts = {word: whole_numbers(word.replace("/", ","), "--heads", who) for word in words}
    require(who, [(
        len(pair) == 2 and not pair[0] % pair[1], "--heads must list query heads / KV heads, "
        "because each KV head serves equally many query heads", repr(word),
        "write for example 32/8",
    ) for word, pair in counts.items()])  # fmt: skip
    return tuple(counts[word] for word in words)


def one_head_count(text: str, who: str) -> Heads:
    """Query and KV heads of a command that has one pair of them, such as "32/8"."""
    counts = head_counts(text, who)
    require(who, [(
        len(counts) == 1, "--heads must be one pair, because all rows of a run have the same",
        repr(text), "write for example 32/8",
    )])  # fmt: skip
    return counts[0]


def head_dims(text: str) -> tuple[int, int]:
    """Widths of query and value heads: "128", or "192/128" where they differ."""
    dims = whole_numbers(text.replace("/", ","), "--head-dim", _WHO)
    require(_WHO, [(
        len(dims) < 3, "--head-dim must be one width, or two as in 192/128, because queries and "
        "keys share one", repr(text), "write for example 128",
    )])  # fmt: skip
    return dims[0], dims[-1]


@dataclass(frozen=True, slots=True)
class Grid:
    """Lists whose product is a list of problems; an empty one keeps the default."""

    seqs: Sequence[int] = ()
    heads: Sequence[Heads] = ()
    batches: Sequence[int] = ()
    masks: Sequence[str] = ()

    def cases(self) -> tuple[Case, ...]:
        """The problems, the shortest sequence first: a run that is cut short has all heads."""
        every = product(
            self.seqs or (65536,), self.batches or (1,), self.masks or ("causal",),
            self.heads or ((32, 8),),
        )  # fmt: skip
        return tuple(Case(seq, batch, *heads, mask=mask) for seq, batch, mask, heads in every)

    def admits(self, case: Case) -> bool:
        """Whether a problem is in the lists."""
        values = case.seq, (case.heads_q, case.heads_kv), case.batch, case.mask
        lists = self.seqs, self.heads, self.batches, self.masks
        return all(not some or value in some for value, some in zip(values, lists, strict=True))


def grid_of(seq: str, heads: str, batch: str, mask: str) -> Grid:
    """The lists that were given as options."""
    masks = tuple(mask.split(",")) if mask else ()
    require(_WHO, [(
        set(masks) <= {"causal", "full"}, "--mask must list causal or full, because these are "
        "measured", repr(mask), "write for example causal,full",
    )])  # fmt: skip
    batches = numbers(batch, "--batch", _WHO)
    return Grid(numbers(seq, "--seq", _WHO), head_counts(heads, _WHO), batches, masks)


def narrowed(cases: Sequence[Any], grid: Any, who: str) -> tuple[Any, ...]:
    """Those of a preset's problems that lists given beside it admit; BurstError if none is left."""
    admitted = tuple(filter(grid.admits, cases))
    require(who, [(
        admitted, "options beside --preset must leave a problem, because they narrow it down",
        f"none of its {len(cases)} problems, the first of which is {cases[0]}",
        "leave --preset out to measure others",
    )])  # fmt: skip
    return admitted


def preset_of[T](name: str, presets: Mapping[str, T], who: str) -> T:
    """The preset of a name; BurstError if there is none."""
    must = f"{who}: --preset must be one that there is, because it stands for a list of problems"
    return pick([name], presets, must)[0]


PEERS = ("burst:auto", "te", "ceiling")
SAME_KERNEL = ("burst:backend=cudnn", "ceiling:cudnn")  # TransformerEngine's kernel on both sides
_BURST = (  # labels after "burst:"; each changes one thing of auto
    "auto", "overlap=false", "transfer=send", "heads_per_round=1", "heads_per_round=4",
    "intra=a2a", "intra=ring", "backend=cudnn", "backend=flash", "deterministic=true",
)  # fmt: skip
_BURST_NODES = (  # the same on several nodes
    "auto", "inter=flat", "intra=ring", "circulate=kv", "circulate=q", "overlap=false",
    "pieces=false", "transfer=send", "intra=a2a", "inter=a2a", "resend=never", "resend=always",
)  # fmt: skip
_K = 1024
_MHA = ((32, 32),)
_SEEDS = (
    *Grid((64 * _K,), _MHA, (1, 2, 4, 8), ("causal", "full")).cases(),
    *Grid((128 * _K, 256 * _K, 512 * _K, 1024 * _K), _MHA, (1,), ("causal", "full")).cases(),
)
_LONG = Grid((64 * _K, 128 * _K, 256 * _K, 512 * _K), ((32, 32), (32, 8), (8, 2), (8, 1))).cases()
_SOME = Grid((64 * _K, 128 * _K), ((32, 8), (32, 32))).cases()
PRESETS = {  # problems and the implementations that they are measured with
    "quick": (Grid((16 * _K, 64 * _K)).cases(), ("burst:auto", "te:p2p", "ceiling")),
    "one-node": (_LONG, (*PEERS, *SAME_KERNEL)),
    "seeds": (_SEEDS, (*PEERS, "one-gpu")),
    "ablation": (_SOME, (*(f"burst:{label}" for label in _BURST), "ceiling")),
    "two-nodes": (_LONG, PEERS),
    "ablation-nodes": (_SOME, (*(f"burst:{label}" for label in _BURST_NODES), "ceiling")),
}


def problems(preset: str, grid: Grid) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """Problems of a preset, or of lists alone if it is ""; and the usual implementations."""
    if not preset:
        return grid.cases(), PEERS
    cases, impls = preset_of(preset, PRESETS, _WHO)
    return narrowed(cases, grid, _WHO), impls
