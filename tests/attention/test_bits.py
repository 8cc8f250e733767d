"""Bits of several ranks beside those of one, as the table in docs/concepts/accuracy.md has them.

Guards against a delta, a rounding or an order of sums that depends on the number of ranks.
"""

import re
from itertools import product
from pathlib import Path

import pytest

from megatron_burst.config import BurstConfig
from tests.bits import CASES, HEADS, NAMES, Problem, by_heads, equal_in, groups_of
from tests.ranks import run_ranks
from tests.sampling import whole

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "accuracy.md"
CONFIGS = {"`--burst-invariant`": {"invariant": True}, "all-to-all": {"intra": "a2a"},
           "gather": {"intra": "gather"}, "ring": {"intra": "ring"}}  # fmt: skip
FEW = ("causal", "sinks in documents", "window in documents")


def table() -> dict[tuple[str, str], dict[str, bool]]:
    """Rows of the page: which tensors are equal, by mode and whether ranks share KV heads."""
    section = PAGE.read_text().partition("## Bits")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|" + 6 * r" (.+?) \|" + "$", section, re.MULTILINE)
    found = {}
    for mode, heads, out, dq, dk, dv in rows[2:]:
        words = out, out, dq, dk, dv
        for name in mode.split(", "):
            found[name, heads] = {n: w == "equal" for n, w in zip(NAMES, words, strict=True)}
    return found


def found_on(rank, names) -> dict:
    """By row of the table: by mask, heads and number of ranks, which tensors are equal."""
    groups, kernels = groups_of(4), [by_heads("torch-cpu"), by_heads("reference")]
    rows = {}
    for (mode, options), case, heads in product(CONFIGS.items(), names, HEADS):
        config = BurstConfig(backend=kernels[CASES[case].windowed], **options)
        if CASES[case].windowed and (mode in ("gather", "ring", "all-to-all")):
            continue  # reference takes delta; and documents with windows need all keys at once
        for size, equal in equal_in(Problem(case, HEADS[heads], config), groups).items():
            shares = "shared by ranks" if HEADS[heads][1] % size else "sharded"
            rows.setdefault((mode, shares), {})[case, heads, size] = equal
    return rows


@pytest.mark.parametrize("names", [FEW, *whole((tuple(CASES),))])
def test_bits_are_those_of_one_rank_where_the_page_says_so(names):
    ranks, said = run_ranks(found_on, 4, names), table()
    assert ranks[0].keys() == said.keys()
    for row, which in said.items():
        every = [equal for found in ranks for equal in found[row].values()]
        for name in NAMES:
            assert all(equal[name] for equal in every) == which[name], (row, name)
