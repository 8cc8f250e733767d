"""Draws of documents for benchmarks/balance.py: what a global batch of whole documents has.

- pretraining: the histogram of document_lengths.csv, longer ones cut to the longest.
- sft: made up, long-tailed: 95 % log-normal with median 1K (sigma 1), 5 % with median 24K
  (sigma 0.7), as conversations among whole repositories and papers.
- rollouts: made up, as of reasoning models: prompts log-normal with median 512 (sigma 0.6); each
  prompt has 8 answers, whose median is log-normal with median 6K (sigma 0.8), each answer
  log-normal around it (sigma 0.35), and cut at 32K, where generation ends.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.documents import histogram

_ANSWERS = 8  # to a prompt
_GENERATED = 32 << 10
_SHORTEST = 16


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


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "pretraining": _pretraining, "sft": _sft, "rollouts": _rollouts,
}  # fmt: skip


def draw(kind: str, count: int, seed: int, longest: int) -> list[int]:
    """Lengths of so many documents.

    Args:
        kind: of `KINDS`.
        count: how many.
        seed: of the draw.
        longest: longer ones are cut to it.
    """
    lengths = KINDS[kind](np.random.default_rng(seed), count)
    return lengths.astype(int).clip(_SHORTEST, longest).tolist()
