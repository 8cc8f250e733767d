"""Lengths of the documents of a packed sample, or of a global batch: drawn, or made up.

The histogram in document_lengths.csv, the way to draw and the seed are those of MagiAttention's
benchmark (github.com/SandAI-org/MagiAttention, exps/dist_attn, 2c6413571c2c). A global batch of
whole documents for the benchmarks of balance is of one of these kinds:

- pretraining: the histogram, longer ones cut to the longest.
- sft: made up, long-tailed: 95 % log-normal with median 1K (sigma 1), 5 % with median 24K
  (sigma 0.7), as conversations among whole repositories and papers.
- rollouts: made up, as of reasoning models: prompts log-normal with median 512 (sigma 0.6), each
  with 8 answers, whose median is log-normal with median 6K (sigma 0.8), each answer log-normal
  around it (sigma 0.35), and cut at 32K, where generation ends.
"""

import csv
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_burst.errors import require
from megatron_burst.tools.units import whole_numbers

_WHO = "benchmarks.packed"
_HISTOGRAM = Path(__file__).with_name("document_lengths.csv")
SEED = 42
KINDS = "drawn, half, one, each-N, tree-N"
_SAMPLES = 20  # of which one is taken
_ANSWERS = 8  # to a prompt
_GENERATED = 32 << 10
_SHORTEST = 16
_SHORT = 1 << 14  # samples of fewer tokens are for trying out: a thousandth of the corpus suffices


def multiple_for(ranks: int) -> int:
    """What lengths must be multiples of, so that no implementation needs padding."""
    return max(4, 2 * ranks)


@lru_cache
def lengths_of(kind: str, seq: int, seed: int, multiple: int) -> tuple[int, ...]:
    """Tokens of each document of a sample, in order; lengths are multiples of `multiple`.

    Kinds are "drawn" from the histogram; "half": one of seq / 2 between those of seq / 64; "one";
    "each-N": all of N tokens, as in each-2K; "tree-N": a prompt of seq / 2 and N answers."""
    if kind == "drawn":
        return _drawn(seq, seed, multiple)
    if kind == "one":
        return (seq,)
    if kind == "half":
        small = _rounded(np.arange(0, seq // 4 + 1, seq // 64), multiple)
        return (*small, seq - 2 * sum(small), *small)
    name, _, size = kind.partition("-")
    require(_WHO, [(
        name in ("each", "tree") and size, f"--documents must list {KINDS}, because these are "
        "measured", repr(kind), "write for example drawn,each-2K",
    )])  # fmt: skip
    (tokens,) = whole_numbers(size, f"--documents {name}-N", _WHO)
    if name == "tree":
        return _rounded(np.append(0, np.linspace(seq // 2, seq, tokens + 1).astype(int)), multiple)
    return _rounded(np.append(np.arange(0, seq, tokens), seq), multiple)


def parents_of(kind: str, documents: int) -> tuple[int, ...] | None:
    """The parent of each document that is a segment of a tree; -1: none."""
    return (-1, *(documents - 1) * (0,)) if kind.startswith("tree-") else None


def _drawn(seq: int, seed: int, multiple: int) -> tuple[int, ...]:
    """The sample whose area is nearest to the mean of the first ones; ends are rounded down."""
    samples = [_rounded(edges, multiple) for edges in _samples(seq, seed)]
    mean = sum(map(area, samples)) / len(samples)
    return min(samples, key=lambda lengths: abs(area(lengths) - mean))


@lru_cache
def _samples(seq: int, seed: int) -> list[np.ndarray]:
    """Bounds of documents in each of the first samples of a corpus, shuffled. It has each bin's
    documents at its middle, cut to seq / 4 and shuffled; samples split what does not fit."""
    longest = seq // 4
    middles, counts = histogram()
    counts = counts // (1000 if seq < _SHORT else 1)
    tails = middles % longest
    whole = np.full(int((middles // longest * counts).sum()), longest, dtype=np.int32)
    rest = np.repeat(tails.astype(np.int32), np.where(tails > 0, counts, 0))
    pieces = np.concatenate((whole, rest))
    rng = np.random.default_rng(seed)
    rng.shuffle(pieces)
    ends = np.cumsum(pieces, dtype=np.int64)
    order = rng.permutation(int(ends[-1]) // seq)
    starts = [int(number) * seq for number in order[:_SAMPLES]]
    bounds = [np.searchsorted(ends, (start, start + seq), "right") for start in starts]
    inside = [ends[slice(*bound)] - start for start, bound in zip(starts, bounds, strict=True)]
    return [np.concatenate(([0], edges, [seq])) for edges in inside]


def area(lengths: Sequence[int], window: int | None = None) -> float:
    """Attended pairs: half of each document's square, or its band of so many earlier keys."""
    if window is None:
        return sum(length**2 for length in lengths) / 2
    bands = ((length, min(window + 1, length)) for length in lengths)
    return sum(keys * (keys + 1) / 2 + (length - keys) * keys for length, keys in bands)


def _rounded(edges: np.ndarray, multiple: int) -> tuple[int, ...]:
    """Lengths between edges, those rounded down."""
    return tuple(np.diff(np.unique(edges // multiple * multiple)).tolist())


@lru_cache
def histogram() -> tuple[np.ndarray, np.ndarray]:
    """Midpoints of the bins, and the number of documents in each."""
    with _HISTOGRAM.open(newline="") as file:
        bins = [tuple(map(int, row.values())) for row in csv.DictReader(file)]
    low, high, counts = (np.array(column, dtype=np.int64) for column in zip(*bins, strict=True))
    return (low + high) // 2, counts


def _pretraining(rng: np.random.Generator, count: int) -> np.ndarray:
    middles, counts = histogram()
    return rng.choice(middles, count, p=counts / counts.sum())


def _sft(rng: np.random.Generator, count: int) -> np.ndarray:
    short = rng.lognormal(np.log(1 << 10), 1.0, count)
    return np.where(rng.random(count) < 0.05, rng.lognormal(np.log(24 << 10), 0.7, count), short)


def _rollouts(rng: np.random.Generator, count: int) -> np.ndarray:
    prompts = -(-count // _ANSWERS)
    prompt = np.repeat(rng.lognormal(np.log(512), 0.6, prompts), _ANSWERS)
    median = np.repeat(rng.lognormal(np.log(6 << 10), 0.8, prompts), _ANSWERS)
    answer = median * rng.lognormal(0.0, 0.35, len(median))
    return (prompt + np.minimum(answer, _GENERATED))[:count]


BATCHES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "pretraining": _pretraining, "sft": _sft, "rollouts": _rollouts,
}  # fmt: skip


def draw(kind: str, count: int, seed: int, longest: int) -> list[int]:
    """Lengths of so many documents of a global batch; longer ones are cut to the longest."""
    lengths = BATCHES[kind](np.random.default_rng(seed), count)
    return lengths.astype(int).clip(_SHORTEST, longest).tolist()
