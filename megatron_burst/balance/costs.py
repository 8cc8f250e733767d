"""Seconds of a micro-batch, as a few coefficients: from a plan, or fitted to measured ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from megatron_burst.errors import Need, require
from megatron_burst.files import Reader
from megatron_burst.integers import MOST, as_integer, integers, shown

WHO = "megatron_burst.balance"
IN_PLAN = "micro_batch_s"  # where a plan has them


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a pipeline stage takes for a micro-batch, forward and backward, recomputation
    and exposed communication included.

    With T tokens and A (query, key) pairs on `cp` ranks:
    `fixed + (token + transfer[cp]) * T / cp + pair * A / cp`.
    """

    token: float  # seconds per token: matrix products, element-wise kernels, LM head
    pair: float  # seconds per (query, key) pair of attention
    fixed: float = 0.0  # seconds of a micro-batch besides
    # what a token takes more at a context-parallel size: exposed transfers, smaller kernels.
    # Sizes that are not named take nothing more.
    transfer: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at = self.transfer if isinstance(self.transfer, Mapping) else {0: None}
        sane = all(_is_number(v, 1e9) for v in (self.token, self.pair, self.fixed, *at.values()))
        sizes = all(isinstance(size, Integral) and (as_integer(size) or 0) > 0 for size in at)
        require(WHO, [(
            sane and sizes and self.token + self.pair > 1e-30,
            "costs must be seconds from 0 to 1e9, above 0 for a token or a pair, and transfer must "
            "map context-parallel sizes to seconds, because work is compared by its cost",
            shown(self), "fit them to measured micro-batches, or read a plan")])  # fmt: skip

    def per_token(self, cp: int) -> float:
        """Seconds of a token of a micro-batch at a context-parallel size."""
        return (self.token + self.transfer.get(cp, 0.0)) / cp

    def seconds(self, tokens: float, area: float, cp: int) -> float:
        """Seconds of a micro-batch of so many tokens and (query, key) pairs on `cp` ranks."""
        return self.fixed + self.per_token(cp) * tokens + self.pair / cp * area

    @classmethod
    def from_plan(cls, path: Path | str) -> "Costs":
        """Those of the best strategy of a plan that `megatron-burst plan --json FILE` wrote.

        Raises:
            BurstError: if the file is not such a plan.
        """
        change = "make it with megatron-burst plan --json"
        reader = Reader(WHO, str(path), "costs are read from it", change)
        plan = reader.json()
        if not isinstance(plan, dict) or not plan.get(IN_PLAN):
            raise reader.refusal(f'be a plan with "{IN_PLAN}"', plan)
        return reader.typed(cls, plan[IN_PLAN], IN_PLAN)


def pairs_of(lengths: np.ndarray) -> np.ndarray:
    """(query, key) pairs of causal documents of these lengths, int64.

    Raises:
        BurstError: if they are no integers from 0 to 2^31.
    """
    if not isinstance(lengths, np.ndarray | np.generic):
        lengths = np.array(integers(WHO, "lengths", lengths), dtype=np.int64)
    whole = np.issubdtype(lengths.dtype, np.integer)
    fits = whole and (lengths >= 0).all() and (lengths <= MOST).all()
    must = f"lengths must be integers from 0 to {MOST}, because pairs are counted in 64 bits"
    require(WHO, [(fits, must, shown(lengths), "pass an array of integers")])
    lengths = lengths.astype(np.int64)
    return lengths * (lengths + 1) // 2


@dataclass(frozen=True, slots=True)
class Measured:
    """A micro-batch of which the time is known."""

    tokens: int
    area: int  # (query, key) pairs: the sum of `pairs_of` its documents
    cp: int  # ranks that shared it
    seconds: float  # of forward and backward, on the slowest rank


def fit(measured: Sequence[Measured]) -> Costs:
    """The coefficients with the least squares of relative errors; none is negative.

    What a token takes more at a context-parallel size is relative to the smallest size measured.
    A coefficient that would be negative is 0, and the others are fitted again.

    Raises:
        BurstError: if there are too few micro-batches for as many coefficients, or they are alike.
    """
    require(WHO, _of_measured(measured))
    values = np.array([astuple(batch) for batch in measured], dtype=float)
    tokens, area, cp, seconds = values.T
    wider = np.unique(cp)[1:]
    columns = [tokens / cp, area / cp, np.ones(len(cp)), *(tokens / cp * (cp == c) for c in wider)]
    matrix = np.stack(columns, axis=1) / seconds[:, None]
    scale = matrix.max(axis=0)
    rank, wanted = np.linalg.matrix_rank(matrix / scale), matrix.shape[1]
    require(WHO, [(
        rank >= wanted,
        f"measured micro-batches must differ enough for {wanted} coefficients, because "
        "the fit must separate the effects of tokens, area and context-parallel size",
        f"enough for only {rank}", "at each size, measure micro-batches of a few "
        "long documents, of many short ones, and of half as many tokens")])  # fmt: skip
    token, pair, fixed, *more = (_least_squares(matrix / scale) / scale).tolist()
    return Costs(token, pair, fixed, dict(zip(wider.astype(int).tolist(), more, strict=True)))


def _least_squares(matrix: np.ndarray) -> np.ndarray:
    """x >= 0 with matrix @ x nearest to 1."""
    used = np.ones(matrix.shape[1], dtype=bool)
    while True:
        x = np.zeros(matrix.shape[1])
        x[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
        if x.min() >= 0:
            return x
        used &= x > 0


def _is_number(value: Any, most: float = 1e18) -> bool:
    """Whether it is a real number from 0 on, and not too large to be summed up."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(0 <= value <= most)


def _of_measured(measured: Sequence[Measured]) -> Iterable[Need]:
    listed = isinstance(measured, Sequence)
    invalid = [x for x in (measured if listed else ()) if not isinstance(x, Measured)
               or not all(_is_number(value) and value > 0 for value in astuple(x))]  # fmt: skip
    yield (listed and measured and not invalid, "measured micro-batches must have tokens, area, a "
           "context-parallel size and seconds above 0, because coefficients are fitted to them",
           shown(invalid[0]) if invalid else "none" if listed else shown(measured),
           "leave out micro-batches that did not run")  # fmt: skip
