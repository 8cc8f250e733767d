"""Profiler ranges of passes and operations.

Guards against operations without a range or under another's name, ranges outside their pass, and
any cost while nobody profiles.
"""

import re
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from megatron_burst.attention import burst_attention
from megatron_burst.engine import executor
from megatron_burst.schedule.program import Transfer
from tests.options import backward_as_a2a, burst_config
from tests.ranks import run_ranks

CONFIGS = [
    {"intra": "gather", "heads_per_round": 1, "nodes": 2},
    {"intra": "ring", "nodes": 1},
    {"inter": "a2a", "nodes": 2},
]
MIXED = {"intra": "gather", "heads_per_round": 2, "nodes": 1}  # whose backward is an all-to-all


def profiled(rank, options):
    """Burst's ranges in a profile of one call, and what the call's programs contain."""
    config, programs = burst_config(**options), []
    q, k, v = (torch.randn(1, 16, heads, 8, requires_grad=True) for heads in (8, 4, 4))
    run = executor.Executor.run

    def noted(self, *args, **given):
        programs.append((self.program, self.unit))
        return run(self, *args, **given)

    def call():
        burst_attention(q, k, v, config=config, layer=3).sum().backward()

    def refused(name):
        raise AssertionError(f"nobody profiles, and there is a range {name}")

    record, profiler.record_function = profiler.record_function, refused
    with backward_as_a2a() if options == MIXED else nullcontext():
        call()
    profiler.record_function, executor.Executor.run = record, noted
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    profiler.record_function = refused
    call()  # and no more
    events = [event for event in found.events() if event.name.startswith("burst ")]
    ops = [
        (type(op).__name__, isinstance(op, Transfer) and _mib(program, op, unit))
        for program, unit in programs[:2]
        for op in program.ops
    ]
    ranges = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    return sorted(ranges, key=lambda each: (each[1], -each[2])), ops


def _mib(program, op, unit):
    return sum(program.num_bytes(give.rows) for give in op.sends) * unit / 2**20


@pytest.mark.parametrize("options", [*CONFIGS, MIXED], ids=str)
def test_each_operation_has_a_range_within_its_pass_and_nothing_has_one_otherwise(options):
    mode = options.get("intra", "a2a")
    backward_mode = "a2a" if options == MIXED else mode
    for ranges, ops in run_ranks(profiled, 4, options):
        passes = [each for each in ranges if "layer" in each[0]]
        assert [name for name, *_ in passes] == [
            f"burst forward, layer 3, {mode}",
            f"burst backward, layer 3, {backward_mode}",
        ]  # fmt: skip
        inner = [each for each in ranges if each not in passes]
        assert len(inner) == len(ops) > 4
        forward, backward = passes
        for (name, start, end), (kind, mib) in zip(inner, ops, strict=True):
            assert name.startswith(f"burst {kind}")
            around = forward if start < backward[1] else backward
            assert around[1] <= start <= end <= around[2]
            if kind == "Transfer":
                said = re.fullmatch(
                    r"burst Transfer (intra|inter) (read|grad): .*; (\S+) MiB sent", name
                )
                assert said and float(said[3]) == pytest.approx(mib, rel=1e-2)
