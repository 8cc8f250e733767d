"""`check`: right calls pass with every mask, a wrong tile is an error on every rank."""

import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_burst.attention import burst_attention
from megatron_burst.call import attention_shape
from megatron_burst.checks.definition import head_in_turn, heads_by_rank
from megatron_burst.checks.spot_checks import SpotCheck
from megatron_burst.config import BurstConfig
from megatron_burst.engine.operations import ref_fields
from megatron_burst.kernels.backends import backends
from megatron_burst.schedule.a2a_rounds import AllToAllEmitter
from megatron_burst.schedule.spec import Direction, Spec
from megatron_burst.schedule.topology import pretend_nodes
from tests.attention.failing import failing
from tests.faults.acts import told_in
from tests.mask_cases import Cell, assert_as_declared, cells, outcomes
from tests.options import burst_config
from tests.ranks import run_ranks

ODD = 1
WAYS = {"ring": {"intra": "ring"}, "gather": {"intra": "gather"}, "a2a": {"intra": "a2a"},
        "nested": {"nodes": 2}}  # fmt: skip
ALL = {"lse": 1, "out": 1, "dq": 1, "dk": 1, "dv": 1}


class Checked(Cell):
    """Every call is compared."""

    @property
    def config(self):
        return replace(super().config, check=1)


def counted(function, *args):
    """Its result, and how often what was compared."""
    compare, names = SpotCheck._compare, Counter()

    def noted(self, direction, places, found):
        names.update([*found])
        compare(self, direction, places, found)

    with patch.object(SpotCheck, "_compare", noted):
        return function(*args), names


def of_cells(rank, *args):
    return counted(outcomes, rank, *args)


@pytest.mark.parametrize(
    "dtype, most", [(torch.float64, 1e-12), (torch.bfloat16, 0.02)], ids=lambda x: str(x)
)
def test_right_calls_pass_with_every_mask(dtype, most, draw):
    some = [Checked(*cell) for cell in draw(cells(("torch-cpu", "reference"), (1, 2)), 16, 200)]
    for found, names in run_ranks(of_cells, 4, some, 2, 8, torch.empty(0, dtype=dtype)):
        for cell, got in zip(some, found, strict=True):
            assert_as_declared(cell, got, 4, most, 2)
        ran = sum(isinstance(got, float) for got in found)
        assert ran and names == dict.fromkeys(ALL, ran)


def others(rank):
    """Cross-attention, packed rows of other formats, checkpoints, and results that are kept."""
    config = BurstConfig(check=1)
    q, k, v = (torch.randn(2, n, h, 8, requires_grad=True) for n, h in ((8, 4), (6, 2), (6, 2)))
    burst_attention(q, k, v, causal=False, config=config).sum().backward()
    full = torch.tensor([[0, 32, 0, 20, 0]])
    burst_attention(q, k, v, causal=False, slices=full, config=config).sum().backward()
    k, v = (torch.randn(2, 8, 2, 8, requires_grad=True) for _ in range(2))
    edges, padded = torch.tensor([0, 5, 13, 20]), torch.tensor([0, 8, 16, 32])
    packed = [x[:1] for x in (q, k, v)]
    burst_attention(*packed, cu_seqlens=edges, cu_seqlens_padded=padded, config=config).sum(
    ).backward()  # fmt: skip
    burst_attention(*(x[0] for x in (q, k, v)), qkv_format="thd", config=config).sum().backward()
    for options in (config, replace(config, keep="all")):
        for _ in range(2):
            run = partial(burst_attention, config=options)
            checkpoint(lambda q: run(q * 1, k * 1, v * 1), q, use_reentrant=False).sum().backward()  # noqa: B023
    with torch.no_grad():
        burst_attention(q, k, v, config=config)


def test_right_calls_of_other_kinds_pass():
    for _, names in run_ranks(partial(counted, others), 4):
        assert names["out"] > names["dq"] == names["dk"] >= 8


def scaled(by, step, op, binder, run):
    """A tile whose numbers are too large."""
    step.run(run)
    for ref in op.writes:
        for x in ref_fields(binder, ref)(run).values():
            x.mul_(by)


def of_wrong(rank, way):
    """What is said of a wrong last operation of a rank's forward, and of its backward; whether
    the next call is right again; and of a right call."""
    q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (8, 4, 4))
    config, said = burst_config(check=1, timeout_s=60, **WAYS[way]), []

    def step():
        burst_attention(q, k, v, config=config, layer=7).square().sum().backward()

    for direction in Direction:
        if rank == ODD:
            with failing(direction, "last", act=partial(scaled, 1.01)):
                said.append(told_in(step))
        else:
            said.append(told_in(step))
        said.append(told_in(step))
    return said


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_tile_of_one_rank_is_an_error_on_all_ranks(way):
    forward, good, backward, fine = zip(*run_ranks(of_wrong, 4, way), strict=True)
    assert {*good, *fine} == {""}
    for sentences, name, direction in ((forward, "out|lse", "forward"), (backward, "d.", "back")):
        assert len({*sentences}) == 1, sentences
        assert re.search(rf"got ({name}) at position \d+ and head \d, which is off by .* is allowed"
                         rf"\), on cp rank \d \(rank \d\), and \d+ of .* in layer 7, {direction}",
                         sentences[0]), sentences[0]  # fmt: skip
    assert "on cp rank 1 (rank 1)" in forward[0]


WORK = {  # KV heads of a call, and of a round, ranks, nodes, and the heads that each place computes
    "rounds": ((8, 1), (4, 1), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    "one round": ((8, 0), (4, 1), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "shared heads": ((2, 0), (4, 1), [[0], [0], [1], [1]]),
    "nodes": ((8, 1), (4, 2), [[0, 4], [1, 5], [2, 6], [3, 7]]),
}


@pytest.mark.parametrize("work", WORK)
def test_as_many_checks_as_ranks_see_heads_of_each(work):
    """Counts are those of the programs; the first check of a group is not always of one head."""
    (heads, a_round), (size, nodes), expected = WORK[work]
    shape = attention_shape([(1, 8, n, 8) for n in (8, heads, heads)], torch.float32)
    kept = Spec(
        pretend_nodes(size, nodes), shape, inter="a2a", intra="a2a", heads_per_round=a_round
    )
    assert heads_by_rank(kept) == expected
    emitter, group = AllToAllEmitter(kept.program_spec(0, Direction.FORWARD)), 8 // heads
    emitted = [emitter.own_heads(r) for r in range(len(emitter.rounds))]
    assert sorted({head // group for some in emitted for head in some}) == expected[0]
    firsts = set()
    for first in range(40):
        numbers = range(first * len(expected), (first + 8) * len(expected))
        drawn = [head_in_turn(number, expected) for number in numbers]
        firsts.add(drawn[0])
        for start in range(0, len(drawn), len(expected)):
            some = {*drawn[start : start + len(expected)]}
            assert all(some & {*own} for own in expected)
        assert {*drawn} == {*range(heads)}
    assert firsts == {*range(heads)}


def of_faulty(rank):
    """By faulty rank, whose kernel is wrong, at which call it is found; an all-to-all."""
    q, k, v = (torch.randn(1, 8, heads, 8) for heads in (8, 4, 4))
    kernel, found = type(backends()["reference"]), []
    right, config = kernel.forward, BurstConfig(
        check=1, timeout_s=60, intra="a2a", backend="reference"
    )  # fmt: skip

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        out.mul_(1.01)
        return out, lse

    for faulty in range(4):
        with patch.object(kernel, "forward", wrong) if rank == faulty else nullcontext():
            calls = (told_in(partial(burst_attention, q, k, v, config=config)) for _ in range(8))
            found.append(next((number for number, said in enumerate(calls, 1) if said), None))
    return found


def test_a_faulty_rank_of_any_number_is_found_within_few_calls_of_an_all_to_all():
    first, *rest = run_ranks(of_faulty, 4)
    assert all(other == first for other in rest) and None not in first
    assert first[0] <= 4 and max(first) <= 7, first


def of_failure(rank, direction):
    """What is said where a rank fails in a call that is compared, and of the next call."""
    q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (8, 4, 4))
    config = BurstConfig(check=1, timeout_s=60, intra="ring")

    def step():
        burst_attention(q, k, v, config=config, layer=7).square().sum().backward()

    step()
    with failing(direction, "middle") if rank == ODD else nullcontext():
        said = told_in(step)
    return said, told_in(step)


@pytest.mark.parametrize("direction", Direction)
def test_ranks_hear_of_one_that_failed_instead_of_waiting_for_it(direction):
    for rank, (said, again) in enumerate(run_ranks(of_failure, 4, direction)):
        assert rank == ODD or re.search(
            r"got NoMemoryError: no memory left.* on cp rank 1, while .* "
            r"began the (end of a backward|check of a call)", said), said  # fmt: skip
        assert again == ""


def alone(every, calls=1):
    q, k, v = (torch.randn(1, 200, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    for _ in range(calls):
        burst_attention(q, k, v, config=BurstConfig(backend="reference", check=every))


def test_a_kernel_that_is_wrong_in_a_few_rows_of_one_rank_alone_is_found():
    kernel = type(backends()["reference"])
    right = kernel.forward

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        out[:, 150:, :].mul_(1.1)
        return out, lse

    alone(1)
    with patch.object(kernel, "forward", wrong):
        assert "got out at position" in told_in(partial(alone, 1))
        assert "and 50 of 128" not in told_in(partial(alone, None))


def drawn(rank):
    """At which calls of 60 a rank compares."""
    q, k, v = (torch.randn(1, 8, 4, 8) for _ in range(3))
    config, found = BurstConfig(check=5), []
    for number in range(60):
        _, names = counted(partial(burst_attention, q, k, v, config=config))
        if names:
            found.append(number)
    return found


def test_ranks_draw_the_same_calls_about_one_in_so_many():
    first, *rest = run_ranks(drawn, 4)
    assert all(other == first for other in rest) and 8 <= len(first) <= 17
    assert len({number % 5 for number in first}) > 2


def test_nothing_of_it_is_loaded_without_the_option():
    with patch.dict(sys.modules, {SpotCheck.__module__: None}):
        alone(None)
        with pytest.raises(ImportError):
            alone(1)
