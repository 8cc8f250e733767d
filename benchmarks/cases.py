"""Which attention problems are measured: one problem, lists of them, presets."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Literal

from megatron_burst.errors import BurstError, nearest_multiples
from megatron_burst.tools.units import in_units, whole_numbers

_WHO = "benchmarks.attention"
Pass = Literal["fwd", "fwd_bwd"]
Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem, as in the columns of the results.

    Attributes:
        seq: tokens of the whole sequence.
        batch: sequences.
        heads_q: query heads of all ranks together.
        heads_kv: KV heads; divides heads_q.
        head_dim_qk: width of a query or KV head.
        head_dim_v: width of a value head.
        mask: what a query sees.
        dtype: torch's name of it.
    """

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
        """Its columns in the results."""
        return asdict(self)

    def check(self, ranks: int) -> None:
        """Refuse what cannot be sharded in zigzag over the ranks."""
        if self.seq % (2 * ranks):
            raise BurstError(
                f"{_WHO}: --seq must be a multiple of twice the ranks, because zigzag gives each "
                f"rank two chunks; got {self.seq} on {ranks} ranks; choose a "
                f"{nearest_multiples(self.seq, 2 * ranks)}"
            )

    def __str__(self) -> str:
        dims = f"{self.head_dim_qk}" + (
            f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim_qk else ""
        )
        return (
            f"S {in_units(self.seq)}, batch {self.batch}, heads {self.heads_q}/{self.heads_kv} x "
            f"{dims}, {self.mask}, {self.dtype}"
        )


def head_counts(text: str, who: str) -> tuple[Heads, ...]:
    """Query and KV heads in a list such as "32/32,32/8"; `who` refuses."""
    found = []
    for word in text.split(","):
        pair = whole_numbers(word.replace("/", ","), "--heads", who)
        if len(pair) != 2 or pair[0] % pair[1]:
            raise BurstError(
                f"{who}: --heads must list query heads / KV heads, because each KV head serves "
                f"equally many query heads; got {word!r}; write for example 32/8"
            )
        found.append(pair)
    return tuple(found)


def one_head_count(text: str, who: str) -> Heads:
    """Query and KV heads of a command that has one pair of them, such as "32/8"."""
    found = head_counts(text, who)
    if len(found) > 1:
        raise BurstError(
            f"{who}: --heads must be one pair, because all rows of a run have the same; got "
            f"{text!r}; write for example 32/8"
        )
    return found[0]


def head_dims(text: str) -> tuple[int, int]:
    """Widths of query and value heads: "128", or "192/128" where they differ."""
    dims = whole_numbers(text.replace("/", ","), "--head-dim", _WHO)
    if len(dims) > 2:
        raise BurstError(
            f"{_WHO}: --head-dim must be one width, or two as in 192/128, because queries and keys "
            f"share one; got {text!r}; write for example 128"
        )
    return dims[0], dims[-1]


@dataclass(frozen=True, slots=True)
class Grid:
    """Lists whose product is a list of problems; an empty one keeps the default.

    Attributes:
        seqs: whole sequence lengths, tokens.
        heads: query and KV heads.
        batches: sequences.
        masks: "causal", "full".
    """

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
        return tuple(
            Case(seq=seq, batch=batch, heads_q=heads[0], heads_kv=heads[1], mask=mask)
            for seq, batch, mask, heads in every
        )

    def admits(self, case: Case) -> bool:
        """Whether a problem is in the lists."""
        pairs = (
            (self.seqs, case.seq),
            (self.heads, (case.heads_q, case.heads_kv)),
            (self.batches, case.batch),
            (self.masks, case.mask),
        )
        return all(not allowed or value in allowed for allowed, value in pairs)


def grid_of(seq: str, heads: str, batch: str, mask: str) -> Grid:
    """The lists that were given as options."""
    masks = tuple(mask.split(",")) if mask else ()
    if not set(masks) <= {"causal", "full"}:
        raise BurstError(
            f"{_WHO}: --mask must list causal or full, because these are measured; got "
            f"{mask!r}; write for example causal,full"
        )
    return Grid(
        seqs=whole_numbers(seq, "--seq", _WHO) if seq else (),
        heads=head_counts(heads, _WHO) if heads else (),
        batches=whole_numbers(batch, "--batch", _WHO) if batch else (),
        masks=masks,
    )


@dataclass(frozen=True, slots=True)
class Preset:
    """Problems and the implementations that they are measured with."""

    cases: tuple[Case, ...]
    impls: tuple[str, ...]

    def narrowed(self, grid: Grid) -> tuple[Case, ...]:
        """Those of its problems that are in the lists."""
        cases = tuple(case for case in self.cases if grid.admits(case))
        if not cases:
            raise BurstError(
                f"{_WHO}: options beside --preset must leave a problem, because they narrow it "
                f"down; got none of its {len(self.cases)} problems, the first of which is "
                f"{self.cases[0]}; leave --preset out to measure others"
            )
        return cases


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
PRESETS = {
    "quick": Preset(Grid((16 * _K, 64 * _K)).cases(), ("burst:auto", "te:p2p", "ceiling")),
    "one-node": Preset(
        Grid((64 * _K, 128 * _K, 256 * _K, 512 * _K), ((32, 32), (32, 8), (8, 2), (8, 1))).cases(),
        (*PEERS, *SAME_KERNEL),
    ),
    "seeds": Preset(_SEEDS, (*PEERS, "one-gpu")),
    "ablation": Preset(
        Grid((64 * _K, 128 * _K), ((32, 8), (32, 32))).cases(),
        (*(f"burst:{label}" for label in _BURST), "ceiling"),
    ),
    "two-nodes": Preset(
        Grid((64 * _K, 128 * _K, 256 * _K, 512 * _K), ((32, 32), (32, 8), (8, 2), (8, 1))).cases(),
        PEERS,
    ),
    "ablation-nodes": Preset(
        Grid((64 * _K, 128 * _K), ((32, 8), (32, 32))).cases(),
        (*(f"burst:{label}" for label in _BURST_NODES), "ceiling"),
    ),
}


def problems(preset: str, grid: Grid) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """Problems of a preset, or of lists alone if it is ""; implementations unless told.

    Raises:
        BurstError: if there is no such preset, or the lists leave nothing of it.
    """
    if not preset:
        return grid.cases(), PEERS
    if preset not in PRESETS:
        raise BurstError(
            f"{_WHO}: --preset must be one that there is, because it stands for a list of "
            f"problems; got {preset!r}; choose among {', '.join(PRESETS)}"
        )
    return PRESETS[preset].narrowed(grid), PRESETS[preset].impls
