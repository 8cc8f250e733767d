"""Bits of several ranks beside those of one, as the table in docs/concepts/accuracy.md has them.

Guards against a delta, a rounding or an order of sums that depends on the number of ranks.
"""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_burst.call import attention_shape, spec_of
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import backends
from megatron_burst.kernels.interface import Problem as Kernels
from megatron_burst.resolve import resolve
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.modes import program_of
from megatron_burst.schedule.program import Attend
from megatron_burst.schedule.spec import Direction, Kernel
from megatron_burst.schedule.topology import pretend_nodes
from tests.bits import CASES, HEADS, NAMES, Problem, by_heads, equal_in, groups_of, parts_of
from tests.options import burst_config
from tests.oracle import full_attention
from tests.ranks import run_ranks
from tests.sampling import whole

pytestmark = pytest.mark.numeric
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "accuracy.md"
CONFIGS = {"`--burst-invariant`": {"invariant": True}, "all-to-all": {"intra": "a2a"}}
FEW = ("sinks in documents", "window in documents")


def table() -> dict[tuple[str, str], dict[str, bool]]:
    """Rows of the page: which tensors are equal, by mode and whether ranks share KV heads."""
    section = PAGE.read_text().partition("## Bits")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|" + 6 * r" (.+?) \|" + "$", section, re.MULTILINE)
    found = {}
    for mode, heads, out, dq, dk, dv in rows[2:]:
        words = out, out, dq, dk, dv
        for name in mode.split(", "):
            found[name, heads] = {n: w == "equal" for n, w in zip(NAMES, words, strict=True)}
            assert {*words} <= {"equal", "may differ"}
    return found


def found_on(rank, names) -> dict:
    """By row of the table: by mask, heads and number of ranks, which tensors are equal."""
    groups, kernels = groups_of(4), [by_heads("torch-cpu"), by_heads("reference")]
    rows = {}
    for (mode, options), case, heads in product(CONFIGS.items(), names, HEADS):
        config = burst_config(backend=kernels[CASES[case].windowed], **options)
        if CASES[case].windowed and mode == "all-to-all":
            continue  # reference takes delta
        for size, equal in equal_in(Problem(case, HEADS[heads], config), groups).items():
            shares = "shared by ranks" if HEADS[heads][1] % size else "sharded"
            rows.setdefault((mode, shares), {})[case, heads, size] = equal
    return rows


@pytest.mark.parametrize("names", [FEW, *whole((tuple(CASES),))])
def test_bits_are_those_of_one_rank_where_the_page_says_so(names):
    """Elsewhere they may differ, and on some CPUs do not."""
    ranks, said = run_ranks(found_on, 4, names), table()
    said = {row: which for row, which in said.items() if any(which.values())}
    assert ranks[0].keys() == said.keys()
    for row, which in said.items():
        for found, name in product(ranks, NAMES):
            differing = [case for case, equal in found[row].items() if not equal[name]]
            assert not (which[name] and differing), (row, name, differing)


def test_every_promise_is_of_results_that_one_kernel_computes():
    """The page's promises are those of this list: no fewer, and none that a merge of rows or a sum
    over ranks could break."""
    promised = {row: {name for name in NAMES if equal[name]} for row, equal in table().items()}
    rows, shared = {"out", "lse"}, "shared by ranks"
    assert promised == {
        ("`--burst-invariant`", "sharded"): {*NAMES},
        ("`--burst-invariant`", shared): {*rows, "dq"},
        ("all-to-all", "sharded"): {*rows, "dv"}, ("all-to-all", shared): rows,
        **{(mode, heads): set() for mode in ("gather", "ring") for heads in ("sharded", shared)},
    }  # fmt: skip


def expanded_on(rank) -> dict:
    groups, config = groups_of(4), BurstConfig(invariant=True, backend=by_heads("torch-cpu"))
    return equal_in(Problem("causal", HEADS["copied"], config), groups, expand=2)


def test_repeated_kv_heads_are_summed_in_one_order():
    """The gradients of KV heads that ranks would share, if the caller repeats them."""
    for found in run_ranks(expanded_on, 4):
        assert found and all(all(equal.values()) for equal in found.values()), found


def merged_on(rank) -> list:
    """How far out and lse of merged rows are from one rank's, as shares of their bounds."""
    groups, kernel, shares = groups_of(4), by_heads("torch-cpu"), []
    for intra, case in product(("ring", "gather"), ("causal", "sinks")):
        config = BurstConfig(intra=intra, backend=kernel)
        problem = Problem(case, (4, 2), config, torch.bfloat16)
        q, k, v, _ = (x.double() for x in problem.tensors())
        sink = CASES[case].arguments(problem.tokens, 4, "cpu").get("sink")
        sizes = full_attention(
            q, k, v.abs(), True, 0.25, None, None if sink is None else sink.double()
        )
        for size, ((out, one), (lse, lse_one), *_) in parts_of(problem, groups).items():
            rows, half = problem.rows(dist.get_rank(groups[size]), size), 2**-8
            bound = 3 * half * (1 + half) * sizes[:, rows]
            of_lse = 8 * torch.finfo(torch.float32).eps * lse_one.abs().clamp_min(1)
            pairs = ((out.double() - one).abs() / bound, (lse - lse_one).abs() / of_lse)
            shares.append([float(share.max()) for share in pairs])
    return shares


def test_rows_that_are_merged_are_within_three_roundings_of_one_ranks():
    """Of a part, of the sum and of one rank's, each half an eps of the weighted |v|, for any number
    of ranks; lse within eight eps of float32."""
    found = torch.tensor(run_ranks(merged_on, 4))
    print(found.amax(0))
    assert (found <= 1).all() and (found[..., 0].amax(0) > 0.2).all()


def spec_on(topology, heads=(8, 2), layout=Layout.ZIGZAG, **options):
    """How a call in bf16 runs on GPUs."""
    shapes = [(1, 64, count, 16) for count in (heads[0], heads[1], heads[1])]
    shape = attention_shape(shapes, torch.bfloat16)
    mask = Mask(None, 0, layout is Layout.DOCUMENTS)
    config = burst_config(invariant=True, **options)
    return resolve(spec_of(config, topology, shape, layout, mask, Kernel()))[0]


@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.CONTIGUOUS, Layout.DOCUMENTS])
def test_every_number_of_ranks_and_nodes_runs_one_mode(layout):
    for ranks, nodes in ((2, 1), (4, 2), (8, 4)):
        spec = spec_on(pretend_nodes(ranks, nodes), layout=layout)
        assert (spec.intra, spec.mode_topology) == ("a2a", pretend_nodes(ranks, nodes).flat())
        assert all(op.mask == spec.mask for op in attends(spec))
    alone = spec_on(pretend_nodes(1, 1), layout=layout)
    assert len(attends(alone)) == 1 and alone.intra == "ring"


def attends(spec):
    ops = program_of(spec.program_spec(0, Direction.FORWARD).in_units()[0]).ops
    return [op for op in ops if isinstance(op, Attend)]


def test_what_no_all_to_all_can_do_is_refused():
    words = "must divide.*got 6 query heads on 4 ranks; pass.*and no .* or --burst-invariant$"
    with pytest.raises(BurstError, match=words):
        attends(spec_on(pretend_nodes(4, 1), (6, 3)))
    with pytest.raises(BurstError, match="must not be striped.*and no --burst-invariant$"):
        spec_on(pretend_nodes(4, 1), layout=Layout.STRIPED)


@pytest.mark.parametrize("name, refused", [("fa4", 0), ("triton", 0), ("cudnn", 1), ("flash", 1)])
def test_kernels_that_split_the_keys_of_few_heads_are_refused(name, refused):
    kernel = backends()[name].capability
    problem = Kernels("cuda", torch.bfloat16, 128, 128, arch=9, invariant=True)
    assert bool(kernel.refusal(problem)) == refused
    assert not kernel.refusal(replace(problem, invariant=False))
